"""Full attention: keys and values travel around the ring of ranks, one part at a time.

If causal, each rank first takes an early and a late piece of the sequence, so that all ranks do the same work. Pieces
of keys that lie after all queries are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..core.contract import PositionBias
from .context import Context, refuse_dropout, sharded, split_sizes
from .softmax import partial_attention

Pieces = list[range]  # the positions of a rank's tokens


@sharded("full")
def full(
    context: Context, attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: PositionBias | None
) -> Tensor:
    refuse_dropout(attn)
    if bias is not None and _learned(bias, q.device):
        raise ValueError(
            f"full does not support {type(bias).__name__} with context parallelism: the ring does not compute the "
            "gradient of its parameters; use weft.ALiBi or rotary positions"
        )
    real = torch.ones(q.shape[0], q.shape[2], dtype=torch.bool, device=q.device) if mask is None else mask
    if not attn.causal:
        whole: list[Pieces] = [[context.tokens(r)] for r in range(context.ranks)]
        return _Ring.apply(q, k, v, real, context, whole, False, bias)
    ends = [0]
    for size in split_sizes(context.length, 2 * context.ranks):
        ends.append(ends[-1] + size)
    halves: list[Pieces] = [
        [range(ends[r], ends[r + 1]), range(ends[-2 - r], ends[-1 - r])] for r in range(context.ranks)
    ]

    def held(r: int) -> Tensor:
        return torch.cat([torch.arange(piece.start, piece.stop) for piece in halves[r]])

    there = context.plan("pieces", context.tokens, held)
    back = context.plan("whole", held, context.tokens)
    q, k, v = context.move(there, q, k, v)
    out = _Ring.apply(q, k, v, context.move_flags(there, real), context, halves, True, bias)
    return context.move(back, out)[0]


def _learned(bias: Any, device: torch.device) -> bool:
    """Whether a position bias has parameters; those of a function show in its result."""
    if isinstance(bias, torch.nn.Module):
        return any(p.requires_grad for p in bias.parameters())
    first = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
    return bias(first, first).requires_grad


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, real: Tensor, context: Context, at: list[Pieces], causal: bool,
        bias: Any,
    ) -> Tensor:  # fmt: skip
        ctx.settings = context, at, causal, bias
        total = torch.zeros_like(q, dtype=torch.promote_types(q.dtype, torch.float32))
        size = total.new_full((*q.shape[:3], 1), float("-inf"))
        for source, keys, values, flags in _visits(context, at, k, v, real):
            for rows, columns, allowed, offsets in _tiles(context, source, at, flags, causal, bias):
                out, lse = partial_attention(
                    q[:, :, rows], keys[:, :, columns], values[:, :, columns], allowed, offsets
                )
                new = torch.logaddexp(size[:, :, rows], lse)
                old, added = ((x - new).exp().nan_to_num(0.0) for x in (size[:, :, rows], lse))  # NaN: no key so far
                total[:, :, rows] = total[:, :, rows] * old + out * added
                size[:, :, rows] = new
        out = total.to(q.dtype)
        ctx.save_for_backward(q, k, v, real, out, size)
        return out

    @staticmethod
    @once_differentiable  # what other ranks send has no graph
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, real, out, size = ctx.saved_tensors
        context, at, causal, bias = ctx.settings
        dtype, scale = size.dtype, q.shape[-1] ** -0.5
        dout = dout.to(dtype)
        delta = (dout * out).sum(-1, keepdim=True)
        dq, dkv = torch.zeros_like(q, dtype=dtype), torch.zeros((), dtype=dtype, device=q.device)
        for source, keys, values, flags in _visits(context, at, k, v, real):
            keys, values = keys.to(dtype), values.to(dtype)
            dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
            for rows, columns, allowed, offsets in _tiles(context, source, at, flags, causal, bias):
                queries, d, lse = q[:, :, rows].to(dtype), dout[:, :, rows], size[:, :, rows]
                logits = queries @ keys[:, :, columns].mT * scale
                logits = logits if offsets is None else logits + offsets.to(dtype)
                p = (logits - lse).exp().masked_fill(~allowed | lse.isinf(), 0)
                ds = p * (d @ values[:, :, columns].mT - delta[:, :, rows]) * scale
                dv[:, :, columns] += p.mT @ d
                dk[:, :, columns] += ds.mT @ queries
                dq[:, :, rows] += ds @ keys[:, :, columns]
            dkv = dkv + _send_home(context, source, torch.cat([dk, dv], -1).movedim(2, 0), k.shape[2]).movedim(0, 2)
        dk, dv = dkv.split([k.shape[-1], v.shape[-1]], -1)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None, None


def _visits(
    context: Context, at: list[Pieces], k: Tensor, v: Tensor, real: Tensor
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """(source, keys, values, mask) of every rank, own part first. Each step passes the parts on by one rank."""
    rank, ranks = context.rank, context.ranks
    rows = torch.cat([k, v, real[:, None, :, None].expand(-1, k.shape[1], -1, 1).to(k.dtype)], -1).movedim(2, 0)
    for step in range(ranks):
        source = (rank - step) % ranks
        keys, values, flags = rows.movedim(0, 2).split([k.shape[-1], v.shape[-1], 1], -1)
        yield source, keys, values, flags[:, 0, :, 0] > 0.5
        if step + 1 < ranks:
            coming = sum(map(len, at[(source - 1) % ranks]))
            rows = _pass(context, rows, (rank + 1) % ranks, (rank - 1) % ranks, coming)


def _send_home(context: Context, source: int, gradients: Tensor, tokens: int) -> Tensor:
    """Send the gradients of a visited part to its rank; receive those of this rank's part from its visitor."""
    visitor = (2 * context.rank - source) % context.ranks
    return _pass(context, gradients, source, visitor, tokens)


def _pass(context: Context, rows: Tensor, to: int, origin: int, coming: int) -> Tensor:
    parts = [rows if r == to else rows[:0] for r in range(context.ranks)]
    return context.all_to_all(parts, [coming if r == origin else 0 for r in range(context.ranks)])[origin]


def _tiles(
    context: Context, source: int, at: list[Pieces], flags: Tensor, causal: bool, bias: Any
) -> Iterator[tuple[slice, slice, Tensor, Tensor | None]]:
    """Tiles of pairs that may see each other: queries, keys, which pairs are allowed, and their position bias."""
    row = 0
    for piece in at[context.rank]:
        for first in range(0, len(piece), context.tile):
            i = piece[first : first + context.tile]
            column = 0
            for j in at[source]:
                if len(i) and len(j) and not (causal and j[0] > i[-1]):
                    rows, columns = slice(row, row + len(i)), slice(column, column + len(j))
                    at_i, at_j = (torch.arange(x.start, x.stop, device=flags.device) for x in (i, j))
                    allowed = flags[:, None, None, columns]
                    if causal:
                        allowed = allowed & (at_j <= at_i[:, None])
                    values = None if bias is None else bias(at_i[None, None, :, None], at_j[None, None, None])
                    yield rows, columns, allowed, values
                column += len(j)
            row += len(i)
