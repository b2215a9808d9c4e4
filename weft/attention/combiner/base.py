"""Combiner: full attention at the cost of sparse attention.

Ren et al., Combiner: Full Attention Transformer with Sparse Computation Cost, https://arxiv.org/abs/2107.05768

A factorisation gives every query i a direct set Ω_i^0 and spans Ω_i^1, Ω_i^2, ... These sets are disjoint and together
contain every token that i may attend to. A span is represented by one key and one value, which do not depend on i:

    kbar_Ω = pool_{j∈Ω} φ_k(k_j)          qbar_Ω = pool_{j∈Ω} φ_q(q_j)                       (summaries.py)
    vbar_Ω = Σ_{j∈Ω} softmax_{j∈Ω}(qbar_Ω · k_j / √D) v_j
    out_i  = ( Σ_{j∈Ω_i^0} exp(q_i · k_j / √D) v_j + Σ_r exp(q_i · kbar_{Ω_i^r} / √D) vbar_{Ω_i^r} ) / Z_i

with one normaliser Z_i for both, so the effective attention is a distribution over all these tokens. A variant defines
its sets: `parts` for all queries at once, `advance` for one more token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.contract import Attention, PositionBias
from ...core.decoding_state import Place
from ...core.dense import dense_softmax, legal
from ...core.joint import Part, joint_attention
from ...core.softmax import softmax_attention
from .summaries import Summary

Seen = tuple[Tensor, Tensor, Tensor | None]  # keys and values (B, H, K, D); which count, (B, K) or (B, H, K)


def combiner_naive(
    attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, direct: Tensor, spans: Tensor
) -> Tensor:
    """`direct` (.., L, L): i attends to j directly. `spans` (.., L, S, L): j is in span s of i. If causal, j ≤ i."""
    able, s = legal(attn, q, k, mask), attn.summary
    members = spans & able[:, :, :, None]
    qbar, kbar = dense_pool(s, q, s.query, members), dense_pool(s, k, s.key, members)
    within = dense_softmax(qbar @ k.mT[:, :, None] / q.shape[-1] ** 0.5, members)
    return dense_combiner(q, k, v, direct & able, members.any(-1), kbar, within)


def dense_pool(summary: Summary, x: Tensor, linear: nn.Linear | None, members: Tensor) -> Tensor:
    """pool_{j∈Ω} φ(x_j) as (.., S, D) for spans Ω with members (.., S, L); zeros for an empty span."""
    x = x if linear is None else x @ linear.weight.T
    x = x if summary.kind in ("max", "mean", "sum") else x.relu()
    x, inside = x.view(*x.shape[:2], *[1] * (members.dim() - 3), *x.shape[2:]), members[..., None]
    if summary.pool == "max":
        return torch.where(inside, x, float("-inf")).amax(-2).where(inside.any(-2), 0)
    total = torch.where(inside, x, 0).sum(-2)
    return total / inside.sum(-2).clamp(min=1) if summary.pool == "mean" else total


def dense_combiner(
    q: Tensor, k: Tensor, v: Tensor, direct: Tensor, seen: Tensor, kbar: Tensor, within: Tensor
) -> Tensor:
    """out_i of the formula. `seen` (.., L, S): the spans of i. kbar (.., L or 1, S, D): their keys. Their values are
    vbar = within v with `within` (.., L or 1, S, L)."""
    B, H, L, D = q.shape
    logits = torch.cat([q @ k.mT, (q[:, :, :, None] * kbar).sum(-1)], -1) / D**0.5
    allowed = torch.cat([direct.expand(B, H, L, L), seen.expand(B, H, L, seen.shape[-1])], -1)
    p, p_spans = dense_softmax(logits, allowed).split([L, seen.shape[-1]], -1)
    return (p + (p_spans[..., None] * within).sum(-2)) @ v


class Combiner(Attention):
    """Base class of the variants: attends to direct sets and spans with one softmax."""

    def __init__(self, *, summary: str = "max", **contract: Any):
        super().__init__(**contract)
        self.summary = Summary(summary, self.head_dim)
        self.long_sums = self.summary.pool == "sum"

    def parts(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> list[Part]:
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: PositionBias | None) -> Tensor:
        dtype = q.dtype
        q, k, v = (self._widen(t) for t in (q, k, v))
        parts = self.parts(q, k, v, mask)
        return joint_attention(q, parts, dropout=self.dropout_now, may_be_empty=mask is not None).to(dtype)

    def advance(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor, state: Any, at: Place) -> tuple[Seen, Any]:
        """Process one token. Return the keys and values it attends to, and the next state."""
        raise NotImplementedError

    def attend_next(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, mask: Tensor | None, bias: PositionBias | None, at: Place
    ) -> tuple[Tensor, Any]:
        dtype = q.dtype
        if mask is None:
            mask = torch.ones(q.shape[0], dtype=torch.bool, device=q.device)
        q, k, v = (self._widen(t) for t in (q, k, v))
        (keys, values, valid), state = self.advance(q, k, v, mask, state, at)
        allowed = None if valid is None else valid[:, None, None] if valid.dim() == 2 else valid[:, :, None]
        return softmax_attention(q, keys, values, allowed=allowed).to(dtype), state

    def state_after(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, capacity: int) -> Any:
        q, k, v = (self._widen(t) for t in (q, k, v))
        return self.summarised(q, k, v, mask, capacity)

    def summarised(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, capacity: int) -> Any:
        """`state_after` in the dtype of the sums."""
        raise NotImplementedError

    def _widen(self, x: Tensor) -> Tensor:
        """Use float32 for sums over long spans, which overflow in half precision."""
        return x.to(torch.promote_types(x.dtype, torch.float32)) if self.long_sums else x


def join_seen(seen: list[Seen]) -> Seen:
    valid = [s[2] for s in seen if s[2] is not None]  # None in all, or in none
    keys, values = torch.cat([s[0] for s in seen], 2), torch.cat([s[1] for s in seen], 2)
    return keys, values, torch.cat(valid, 1) if valid else None


def line_summaries(
    summary: Summary, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, which: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Summarise a part of the line for every position p: return kbar, vbar, and whether the part has any token.

    q, k and v are (B, H, lines, T, D), `real` (B or 1, H or 1, lines, T). The part is all tokens "before" p, "after" p,
    "up_to" p (with p), or all "others". The last result is (1, 1, 1, 1) if every part has a token.
    """
    if which == "after":
        flipped = None if real is None else real.flip(3)
        kbar, vbar, some = line_summaries(summary, q.flip(3), k.flip(3), v.flip(3), flipped, "before")
        return kbar.flip(3), vbar.flip(3), some.flip(3)
    T = k.shape[3]
    if which == "before":  # up to the previous position; empty for the first
        if T == 1:
            return torch.zeros_like(k), torch.zeros_like(v), torch.zeros_like(k[..., 0], dtype=torch.bool)
        earlier = None if real is None else real[..., :-1]
        kbar, vbar, some = line_summaries(summary, q[..., :-1, :], k[..., :-1, :], v[..., :-1, :], earlier, "up_to")
        kbar, vbar = (torch.cat([torch.zeros_like(t[..., :1, :]), t], 3) for t in (kbar, vbar))
        return kbar, vbar, F.pad(some.expand(*some.shape[:3], T - 1), (1, 0))
    t = torch.arange(T, device=k.device)
    i, j = t[:, None], t[None]
    allowed = {"up_to": j <= i, "others": j != i}[which].view(1, 1, 1, T, T)
    if real is not None:
        allowed = allowed & real[..., None, :]
    count = allowed.sum(-1)
    may_be_empty = real is not None or (which == "others" and T == 1)
    pool = {"up_to": summary.up_to, "others": summary.others}[which]
    counted = count if may_be_empty or summary.pool == "mean" else None
    qbar = summary.finish(pool(summary.lift_queries(q, real)), counted, q.dtype)
    kbar = summary.finish(pool(summary.lift_keys(k, real)), counted, k.dtype)
    some = count > 0 if may_be_empty else torch.ones_like(count[:1, :1, :1, :1], dtype=torch.bool)
    return kbar, softmax_attention(qbar, k, v, allowed=allowed, may_be_empty=may_be_empty), some
