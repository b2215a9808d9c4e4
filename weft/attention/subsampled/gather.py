"""Softmax attention of windows of targets (queries) over given samples of sources (keys).

    out_t = Σ_{s ∈ S_w(t)} softmax_s(q_t · k_s / √D + bias_ts) v_s          over the allowed s (real, and ≤ t if causal)

Bias, mask and causality use the original positions of the sources. A target without an allowed source in its sample
attends to the nearest allowed token instead: itself, or the last one before it, or, if not causal, the first one after
it. Only a target without any allowed token returns zeros.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.blocks import both, ceil_div, pad_length
from ...core.contract import PositionBias
from ...core.softmax import softmax_attention
from ...core.staging import send


def sampled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sources: Tensor,
    *,
    targets: Tensor | None = None,
    causal: bool = False,
    mask: Tensor | None = None,
    bias: PositionBias | None = None,
    gate: PositionBias | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """q, k, v (B, H, L, D); the targets of window w attend to sources[w]. k and v must be zero where `mask` is False.

    `sources` is (W, S) and `targets` (W, P), every target once, with L or more in empty slots. Without `targets`, the
    windows are W consecutive runs. `gate` multiplies the probabilities.
    """
    L = q.shape[2]
    W = sources.shape[0]
    sources = send(sources, q.device).long()
    if targets is None:
        size = ceil_div(L, W)
        windows = torch.unflatten(pad_length(q, W * size), 2, (W, size))
        targets = torch.arange(W * size, device=q.device).view(W, size)
        slot_of_target = None
    else:
        targets = send(targets, q.device)
        slot_of_target = targets.flatten().argsort(stable=True)[:L]
        windows = _take(q, targets.clamp(max=L - 1))
    s, t = sources.clamp(max=L - 1), targets.clamp(max=L - 1)

    usable = None if targets.numel() == L else (sources < L)[None]
    if mask is not None:
        usable = both(usable, torch.unflatten(mask[:, s.flatten()], 1, s.shape))
    allowed = None if usable is None else usable[:, None, :, None, :]
    if causal:
        allowed = both(allowed, (sources[:, None, :] <= t[:, :, None])[None, None])
    at = t[None, None, :, :, None], s[None, None, :, None, :]
    bias_values = None if bias is None else bias(*at)
    if gate is None:
        out = softmax_attention(windows, _take(k, s), _take(v, s), allowed=allowed, bias=bias_values, dropout=dropout)
    else:
        out = _gated_attention(windows, _take(k, s), _take(v, s), allowed, bias_values, gate(*at), dropout)
    out = _in_order(out.flatten(2, 3), slot_of_target, L)
    if allowed is None:
        return out
    alive = allowed.any(-1).expand(-1, -1, *targets.shape).flatten(2)[..., None]
    nearest = nearest_legal(mask, L, causal, q.device)
    instead = v.gather(2, nearest[:, None, :, None].expand(v.shape))
    pair = torch.arange(L, device=q.device)[None, None], nearest[:, None]
    if gate is not None:
        instead = instead * gate(*pair)[..., None].to(v.dtype)
    if bias is not None:  # -inf forbids a pair
        instead = torch.where(bias(*pair)[..., None] == float("-inf"), 0, instead)
    return torch.where(_in_order(alive, slot_of_target, L), out, instead)


def nearest_legal(mask: Tensor | None, length: int, causal: bool, device: torch.device) -> Tensor:
    """(B or 1, L): each target itself, or the nearest real token before it, else after it; any if there is none."""
    position = torch.arange(length, device=device)[None]
    if mask is None:
        return position
    before = torch.where(mask, position, -1).cummax(-1).values
    if causal:
        return before.clamp(min=0)
    return torch.where(before < 0, mask.int().argmax(-1, keepdim=True), before)


def _gated_attention(q, k, v, allowed, bias, gate, dropout) -> Tensor:
    logits = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if bias is not None:
        logits = logits + bias.to(q.dtype)
    if allowed is not None:
        # A query without keys attends to all of them; the caller replaces its row.
        logits = logits.masked_fill(~(allowed | ~allowed.any(-1, keepdim=True)), float("-inf"))
    return F.dropout(logits.softmax(-1) * gate.to(q.dtype), dropout) @ v


def _take(x: Tensor, index: Tensor) -> Tensor:
    """(B, H, L, D) at index (W, S) -> (B, H, W, S, D)."""
    return torch.unflatten(x.index_select(2, index.flatten()), 2, index.shape)


def _in_order(x: Tensor, slot_of_target: Tensor | None, length: int) -> Tensor:
    """(B, H, slots, D) -> (B, H, L, D)."""
    return x[:, :, :length] if slot_of_target is None else x.index_select(2, slot_of_target)
