"""Combiners: a rank needs the summaries of the other ranks' blocks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.axial import Grid, row_part
from ..core.blocks import ceil_div
from ..core.joint import Part, Rows, joint_attention, valid_in
from ..core.partitions import default_block, other_blocks, own_block
from .context import Context, refuse_dropout, sharded
from .near import around, flags_around, whole_blocks
from .softmax import merge, partial_attention


@sharded("combiner-fixed")
def combiner_fixed(
    context: Context, attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: None
) -> Tensor:
    """The rank that holds the last token of a block summarises it."""
    if attn.levels > 2:
        raise ValueError(f"context parallelism supports combiner-fixed with levels=2, got levels={attn.levels}")
    L, n, device, dtype, causal = context.length, q.shape[2], q.device, q.dtype, attn.causal
    m = attn.block_size or default_block(L, attn.max_length)
    q, k, v = (attn._widen(t) for t in (q, k, v))
    reach = whole_blocks(m, causal, L)
    lo, hi = reach(context.start, context.stop)
    near = around(context, f"blocks {m} {causal}", reach, q, k, v)
    layout = Rows(m)
    real = None
    if mask is not None or not causal:
        real = valid_in(layout, flags_around(context, reach, mask, q), hi - lo, m, device)
    blocks_q, blocks_k, blocks_v = (layout.arrange(t) for t in near)
    own = own_block(m, causal, device).view(1, 1, 1, m, m)
    parts = [Part(layout, blocks_k, blocks_v, own if real is None else own & real[:, :, :, None])]

    total = ceil_div(L, m)
    held = [range(a // m, total if b == L else b // m) for a, b in context.parts()]
    wanted = [range((b - 1) // m if causal else total) for _, b in context.parts()]
    plan = context.plan(f"summaries {m} {causal}", held.__getitem__, wanted.__getitem__)
    nodes, mine = attn._blocks(blocks_q, blocks_k, blocks_v, real), len(held[context.rank])
    node_k, node_v = context.move(plan, nodes.k[:, :, :mine], nodes.v[:, :, :mine])
    block = lo // m + torch.arange(blocks_k.shape[2], device=device)
    other = torch.arange(len(wanted[context.rank]), device=device)
    sees = other < block[:, None] if causal else (other != block[:, None]) | attn.own_span
    allowed = sees[None, None, :, None]
    if nodes.real is not None:
        flags = nodes.real.expand(q.shape[0], -1, -1)[:, 0, :mine]
        allowed = allowed & context.move_flags(plan, flags)[:, None, None, None]
    span_k, span_v = (t[:, :, None].expand(-1, -1, len(block), -1, -1) for t in (node_k, node_v))
    parts.append(Part(layout, span_k, span_v, allowed))
    out = joint_attention(near[0], parts, dropout=attn.dropout_now)
    first = context.start - lo
    return out[:, :, first : first + n].to(dtype)


@sharded("combiner-axial")
def combiner_axial(
    context: Context, attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: None
) -> Tensor:
    """Rows are local. For the spans, each rank takes some columns of the whole grid: it gets their queries and
    summaries, and sends the results back."""
    refuse_dropout(attn)
    if attn.needs_input:
        raise ValueError(f"context parallelism does not support key_summary={attn.key_summary!r}; use 'wsum' or 'none'")
    L, device = context.length, q.device
    m = attn.block_size or default_block(L, attn.max_length)
    rows = ceil_div(L, m)
    reach = whole_blocks(m, False, L)
    lo, hi = reach(context.start, context.stop)
    first, n = context.start - lo, q.shape[2]
    near_k, near_v = around(context, f"blocks {m} False", reach, k, v)
    near_q = F.pad(q, (0, 0, first, near_k.shape[2] - first - n))
    flags = None
    if mask is not None or not attn.causal:
        flags = flags_around(context, reach, mask, q)
    grid = Grid.of(near_k, near_v, flags, m, attn.causal)
    own = row_part(grid)
    lines = Rows(m)
    rows_q = lines.arrange(near_q)
    direct = tuple(
        lines.restore(t, hi - lo)[:, :, first : first + n]
        for t in partial_attention(rows_q, grid.k, grid.v, own.allowed)
    )

    # Cells of the grid: those of this rank's tokens; the last rank also has the cells after the end.
    ends = [*context.bounds[:-1], rows * m]
    cells = ends[context.rank + 1] - context.start
    bounds = [r * m // context.ranks for r in range(context.ranks + 1)]  # columns of each rank

    def held(r: int) -> range:
        return range(ends[r], ends[r + 1])

    def columns(r: int) -> Tensor:
        c = torch.arange(bounds[r], bounds[r + 1])
        return (c[:, None] + m * torch.arange(rows)).flatten()

    there = context.plan(f"columns {m}", held, columns)
    back = context.plan(f"cells {m}", columns, held)
    kbar, vbar = (
        t.flatten(2, 3)[:, :, first : first + cells]
        for t in attn._summarise(rows_q, grid.k, lines.arrange(near_v), grid.real, None, grid.v)
    )
    moved = context.move(there, F.pad(q, (0, 0, 0, cells - n)), kbar, vbar)
    queries, keys, values = (torch.unflatten(t, 2, (-1, rows)) for t in moved)
    seen = other_blocks(rows, attn.causal, device)
    seen = torch.ones_like(seen) if attn.own_span else seen
    if mask is not None:
        real = valid_in(lines, context.everywhere(mask), L, m, device)
        assert real is not None
        seen = seen & real.any(-1)[:, :, None, None]
    else:
        seen = seen[None, None, None]
    out, size = (t.flatten(2, 3) for t in partial_attention(queries, keys, values, seen))
    out, size = (t[:, :, :n] for t in context.move(back, out, size))
    return merge([direct, (out, size)])[0].to(q.dtype)  # type: ignore[list-item]


@sharded("combiner-logsparse")
def combiner_logsparse(
    context: Context, attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: None
) -> Tensor:
    """The sequence is first split into parts of T tokens, T a power of two: shorter spans are inside a part, longer
    ones consist of whole parts and are the same for all tokens of a part."""
    from ..attention.combiner.logsparse import BLOCK, spans_before

    refuse_dropout(attn)
    L, B, device, dtype, n = context.length, q.shape[0], q.device, q.dtype, q.shape[2]
    q, k, v = (attn._widen(t) for t in (q, k, v))
    real = torch.ones(B, n, dtype=torch.bool, device=device) if mask is None else mask
    T = 1 << max(1, (ceil_div(L, context.ranks) - 1).bit_length())
    s, layout, found = attn.summary, Rows(BLOCK), []
    for mirrored in (False,) if attn.causal else (False, True):

        def part(r: int, mirrored: bool = mirrored) -> range:
            at = range(min(r * T, L), min((r + 1) * T, L))
            return range(L - 1 - at.start, L - 1 - at.stop, -1) if mirrored else at

        there = context.plan(f"powers {mirrored}", context.tokens, part)
        back = context.plan(f"parts {mirrored}", part, context.tokens)
        short = T - there.rows
        own_q, own_k, own_v = (F.pad(t, (0, 0, 0, short)) for t in context.move(there, q, k, v))
        valid = F.pad(context.move_flags(there, real), (0, short))
        spans = spans_before(layout, own_q, own_k, own_v, valid, s, own=not mirrored)
        far_k, far_v, exists = _part_spans(context, s, own_q, own_k, own_v, valid)
        blocks = spans.k.shape[2]
        keys, values = (
            torch.cat([near, far[:, :, None].expand(-1, -1, blocks, -1, -1)], 3)
            for near, far in ((spans.k, far_k), (spans.v, far_v))
        )
        assert spans.allowed is not None
        inside = spans.allowed.expand(B, 1, blocks, BLOCK, -1)
        allowed = torch.cat([inside, exists[:, None, None, None].expand(B, 1, blocks, BLOCK, -1)], -1)
        out, size = (
            layout.restore(t, T)[:, :, : there.rows]
            for t in partial_attention(layout.arrange(own_q), keys, values, allowed)
        )
        found.append(tuple(context.move(back, out, size)))
    return merge(found)[0].to(dtype)  # type: ignore[arg-type]


def _part_spans(
    context: Context, s: Any, q: Tensor, k: Tensor, v: Tensor, valid: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values (B, H, levels, D) of the spans of whole parts before this part, and which exist (B, levels)."""
    rank, ranks, D = context.rank, context.ranks, q.shape[-1]
    levels = max(1, (ranks - 1).bit_length())
    flags, count = valid[:, None], valid.sum(1)
    each = context.plan("each part", lambda r: range(r, r + 1), lambda r: range(ranks))
    pooled = [s.reduce(s.lift_queries(q, flags), 2), s.reduce(s.lift_keys(k, flags), 2)]
    numbers = count.to(pooled[0].dtype)[:, None, None].expand(-1, q.shape[1], 1)
    query_features, key_features, counts = context.move(each, *(t[:, :, None] for t in (*pooled, numbers)))

    def pool(features: Tensor, parts: range, dtype: torch.dtype) -> Tensor:
        inside = features[:, :, parts.start : parts.stop]
        total = s.reduce(inside, 2) if len(parts) else torch.zeros_like(features[:, :, 0])
        return s.finish(total, counts[:, :, parts.start : parts.stop, 0].sum(2), dtype)

    # The node of level b that contains this part, if it is the first half of a pair.
    shares = []
    for b in range(levels):
        node = range(rank >> (b + 1) << (b + 1), min((rank >> (b + 1) << (b + 1)) + (1 << b), ranks))
        member = flags[:, :, None] & (rank in node)
        shares.append(torch.cat(partial_attention(pool(query_features, node, q.dtype)[:, :, None], k, v, member), -1))
    (received,) = context.move(each, torch.cat(shares, 2).flatten(2)[:, :, None])
    received = torch.unflatten(received, 3, (levels, D + 1))
    keys, values, exist = [], [], []
    for b in range(levels):
        seen = rank >> b & 1
        node = range(rank >> (b + 1) << (b + 1), (rank >> (b + 1) << (b + 1)) + (1 << b)) if seen else range(1)
        keys.append(pool(key_features, node, k.dtype))
        parts = [received[:, :, r, b].split([D, 1], -1) for r in node]
        values.append(merge([(out, size) for out, size in parts])[0].to(v.dtype))
        exist.append((counts[:, 0, node.start : node.stop, 0].sum(1) > 0) & bool(seen))
    return torch.stack(keys, 2), torch.stack(values, 2), torch.stack(exist, 1)
