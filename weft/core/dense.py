"""Building blocks of the dense specifications.

Every mechanism has a `naive(attn, q, k, v, mask=None, bias=None)`: the formula of its paper on full L x L matrices,
without dropout. `attn` is the mechanism; `naive` reads its options, parameters and random draws. The tests compare
outputs and gradients of `attn` and `naive`. No efficient version uses this file.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .contract import PositionBias


def positions(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """i (Lq, 1) and j (1, Lk)."""
    return torch.arange(q.shape[2], device=q.device)[:, None], torch.arange(k.shape[2], device=q.device)[None]


def real_tokens(k: Tensor, mask: Tensor | None) -> Tensor:
    """The mask (B, Lk), or all True."""
    return torch.ones_like(k[:, 0, :, 0], dtype=torch.bool) if mask is None else mask


def legal(attn: Any, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """(B or 1, 1, Lq, Lk): j is a real token, and not after i when causal."""
    i, j = positions(q, k)
    past = ((j <= i) | (not attn.causal))[None, None]
    return past if mask is None else past & mask[:, None, None]


def dense_softmax(logits: Tensor, allowed: Tensor) -> Tensor:
    """Softmax over the allowed entries of the last dimension; zeros if there are none or all are -inf."""
    allowed = allowed & (logits > float("-inf"))
    alive = allowed.any(-1, keepdim=True)
    return logits.masked_fill(~allowed & alive, float("-inf")).masked_fill(~alive, 0).softmax(-1) * alive


def dense_logits(q: Tensor, k: Tensor, bias: PositionBias | None = None) -> Tensor:
    """q_i · k_j / √D + bias_ij, (B, H, Lq, Lk)."""
    i, j = positions(q, k)
    logits = q @ k.mT / q.shape[-1] ** 0.5
    return logits if bias is None else logits + bias(i[None, None], j[None, None])


def dense_attention(
    attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: PositionBias | None, allowed: Tensor
) -> Tensor:
    """out_i = Σ_j softmax_j(q_i · k_j / √D + bias_ij) v_j over the legal j with allowed(i, j)."""
    return dense_softmax(dense_logits(q, k, bias), allowed & legal(attn, q, k, mask)) @ v


def same(x: Tensor) -> Tensor:
    """x (.., L) -> (.., L, L): x_i = x_j."""
    return x[..., :, None] == x[..., None, :]


def runs_of(group: Tensor, mask: Tensor | None, size: int) -> tuple[Tensor, Tensor]:
    """Return the group of every token (B, H, L), -1 if masked, and its run: runs have `size` members of one group."""
    group = group if mask is None else group.masked_fill(~mask[:, None], -1)
    return group, same(group).tril(-1).sum(-1) // size
