"""Triton kernels: the summaries of the dyadic spans, each stored at the last position of its span.

    kbar = pool k_j        qbar = pool q_j        vbar = Σ_j softmax_j(qbar · k_j / √D) v_j        over the span

A span is the first half of a node of the binary tree over all positions. `pool_tiles` pools the nodes inside a tile of
T positions, and the tile itself. `pool_blocks` pools blocks of 2, 4, 8, ... tiles from these. TREE keeps the pools of
all tiles and blocks for the backward, level by level. `span_values` computes the values of the spans inside a tile, and
what the tile adds to the values of longer spans, at most U; `collect_values` joins these parts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..line_pool.forward import finish
from ..rows import load_rows, store_rows, valid_rows
from ..softmax import log_normaliser, weigh
from .forward import rows_of


@triton.jit
def halves(x, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, POOL: tl.constexpr):
    """(ROWS, BLOCK_D) -> (ROWS / 2, BLOCK_D): the pools of two rows each."""
    x = tl.reshape(x, [ROWS // 2, 2, BLOCK_D])
    return tl.max(x, 1) if POOL == "max" else tl.sum(x, 1)


@triton.jit
def ends_in_tile(tile, L, LEVEL: tl.constexpr, ROWS: tl.constexpr):
    """The last positions of the ROWS nodes of 2^LEVEL tokens in a tile, and which of them are spans."""
    r = tl.arange(0, ROWS)
    end = tile * (ROWS << LEVEL) + ((r + 1) << LEVEL) - 1
    return end, (r % 2 == 0) & (end < L)


@triton.jit
def pool_tiles(
    Q, K, MASK, QBAR, KBAR, COUNT, TREE, COUNTS,
    q_b, q_h, q_l, k_b, k_h, k_l,
    BH, H, L, n, nodes,
    D: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr, LEVELS: tl.constexpr, POOL: tl.constexpr,
    REVERSE: tl.constexpr, HAS_MASK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """QBAR and KBAR (B·H, L, D); COUNT (B, L): real tokens in each span. TREE (2, B·H, nodes, D) and COUNTS (B, n): the
    pools and tokens of the tiles. T = 2^LEVELS. Programs of the second axis: queries, keys."""
    bh, tile = tl.program_id(0) % BH, tl.program_id(0) // BH
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    second = tl.program_id(1)
    if second == 0:
        X, x_l, OUT = Q + b * q_b + h * q_h, tl.cast(q_l, tl.int64), QBAR + bh.to(tl.int64) * L * D
    else:
        X, x_l, OUT = K + b * k_b + h // GROUP * k_h, tl.cast(k_l, tl.int64), KBAR + bh.to(tl.int64) * L * D
    COUNT += b * L
    d = tl.arange(0, BLOCK_D)
    p = tile * T + tl.arange(0, T)
    row = rows_of(p, L, REVERSE)
    real = valid_rows(MASK + b * L, row, p < L, HAS_MASK)
    x = load_rows(X, row, d, x_l, real, D, BLOCK_D).to(tl.float32)
    if POOL == "max":
        x = tl.where(real[:, None], x, float("-inf"))
    count = real.to(tl.float32)
    counted = tl.where((h == 0) & (second == 0), L, 0)  # one program of each tile writes the counts
    for level in tl.static_range(LEVELS):
        end, keep = ends_in_tile(tile, L, level, T >> level)
        at = rows_of(end, L, REVERSE)
        store_rows(OUT, finish(x, count[:, None], POOL), at, d, D, keep, D, BLOCK_D)
        tl.store(COUNT + at, count, mask=keep & (end < counted))
        x = halves(x, T >> level, BLOCK_D, POOL)
        count = tl.sum(tl.reshape(count, [T >> (level + 1), 2]), 1)
    x = tl.sum(x, 0)  # one row
    tokens = tl.sum(count, 0)
    TREE += ((second * BH + bh).to(tl.int64) * nodes + tile) * D
    tl.store(TREE + d, x, mask=d < D)
    tl.store(COUNTS + b * n + tile, tokens, mask=tile * T < counted)
    end = tile * T + T - 1
    keep = (tile % 2 == 0) & (end < L)
    at = rows_of(end, L, REVERSE)
    tl.store(OUT + at * D + d, finish(x, tokens, POOL).to(OUT.dtype.element_ty), mask=d < tl.where(keep, D, 0))
    tl.store(COUNT + at, tokens, mask=end < tl.where(tile % 2 == 0, counted, 0))


@triton.jit
def pool_blocks(
    QBAR, KBAR, COUNT, TREE, COUNTS,
    BH, H, L, n, nodes, levels,
    D: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr, ROWS: tl.constexpr, POOL: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """Blocks of 2^level tiles, as many as are whole. Those that are spans are also written to QBAR and KBAR."""
    bh, block = tl.program_id(0) % BH, tl.program_id(0) // BH
    b, second = (bh // H).to(tl.int64), tl.program_id(1)
    node = n + block
    level = 1
    for u in range(1, levels):  # which level, and which of its blocks
        later = (level == u) & (block >= (n >> u))
        block = tl.where(later, block - (n >> u), block)
        level = tl.where(later, u + 1, level)
    d, r = tl.arange(0, BLOCK_D), tl.arange(0, ROWS)
    TREE += (second * BH + bh).to(tl.int64) * nodes * D
    tokens = tl.sum(tl.zeros([ROWS], tl.float32), 0)
    x = tl.full([BLOCK_D], float("-inf") if POOL == "max" else 0.0, tl.float32)
    for start in range(block << level, (block + 1) << level, ROWS):
        t = start + r
        inside = t < (block + 1) << level
        rows = load_rows(TREE, t, d, D, inside, D, BLOCK_D)
        if POOL == "max":
            x = tl.maximum(x, tl.max(tl.where(inside[:, None], rows, float("-inf")), 0))
        else:
            x += tl.sum(rows, 0)
        tokens += tl.sum(tl.load(COUNTS + b * n + t, mask=inside, other=0.0), 0)
    tl.store(TREE + node * D + d, x, mask=d < D)
    end = ((block + 1) << level) * T - 1
    keep = (block % 2 == 0) & (end < L)
    at = rows_of(end, L, REVERSE)
    OUT = tl.where(second == 0, QBAR, KBAR) + (bh.to(tl.int64) * L + at) * D
    tl.store(OUT + d, finish(x, tokens, POOL).to(OUT.dtype.element_ty), mask=d < tl.where(keep, D, 0))
    counted = tl.where(keep & (bh % H == 0) & (second == 0), L, 0)
    tl.store(COUNT + b * L + at, tokens, mask=end < counted)


@triton.jit
def tokens_of_spans(T: tl.constexpr):
    """(T, T): which positions i of a tile are in the span that ends with j, without spans that end with the tile."""
    j, i = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]
    return (i <= j) & (i >= (j & (j + 1))) & (j < T - 1)


@triton.jit
def spans_around(tile, L, T: tl.constexpr, U: tl.constexpr, REVERSE: tl.constexpr):
    """Rows of the spans of 1, 2, 4, ... tiles that contain a tile, and which of the U exist."""
    u = tl.arange(0, U)
    end = (((tile >> u) + 1) << u) * T - 1
    exist = (((tile >> u) & 1) == 0) & (end < L)
    return rows_of(tl.where(exist, end, 0), L, REVERSE), exist


@triton.jit
def span_values(
    QBAR, K, V, MASK, VBAR, LOCAL, PARTS, NORMS,
    k_b, k_h, k_l, v_b, v_h, v_l,
    BH, H, L, n, levels, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr, U: tl.constexpr, REVERSE: tl.constexpr,
    HAS_MASK: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """VBAR (B·H, L, D) and LOCAL (B·H, L): values and log normalisers. PARTS (B·H, n, levels, D) and NORMS: the same of
    the part of longer spans in this tile, float32."""
    bh, tile = tl.program_id(0) % BH, tl.program_id(0) // BH
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    at = bh.to(tl.int64) * L
    QBAR += at * D
    VBAR += at * D
    LOCAL += at
    d = tl.arange(0, BLOCK_D)
    p = tile * T + tl.arange(0, T)
    live = p < L
    row = rows_of(p, L, REVERSE)
    real = valid_rows(MASK + b * L, row, live, HAS_MASK)
    k = load_rows(K + b * k_b + h // GROUP * k_h, row, d, k_l, real, D, BLOCK_D)
    v = load_rows(V + b * v_b + h // GROUP * v_h, row, d, v_l, real, D, BLOCK_D)

    q = load_rows(QBAR, row, d, D, live, D, BLOCK_D)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    none = tl.full([T], float("-inf"), tl.float32)
    w, _, top, total = weigh(s, tokens_of_spans(T) & real[None, :], none, tl.zeros([T], tl.float32), scale)
    x = tl.dot(w.to(v.dtype), v, input_precision=PRECISION) / tl.where(total > 0.0, total, 1.0)[:, None]
    store_rows(VBAR, x, row, d, D, live, D, BLOCK_D)
    tl.store(LOCAL + row, log_normaliser(top, total), mask=live)

    far, exist = spans_around(tile, L, T, U, REVERSE)
    q = load_rows(QBAR, far, d, D, exist, D, BLOCK_D)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    none = tl.full([U], float("-inf"), tl.float32)
    w, _, top, total = weigh(s, exist[:, None] & real[None, :], none, tl.zeros([U], tl.float32), scale)
    x = tl.dot(w.to(v.dtype), v, input_precision=PRECISION) / tl.where(total > 0.0, total, 1.0)[:, None]
    u = tl.arange(0, U)
    part = (bh.to(tl.int64) * n + tile) * levels
    store_rows(PARTS + part * D, x, u, d, D, exist, D, BLOCK_D)
    tl.store(NORMS + part + u, log_normaliser(top, total), mask=exist)


@triton.jit
def span_of_tiles(tile, U: tl.constexpr):
    """The span that ends with a tile: its first tile, and the logarithm of its number of tiles."""
    size = (tile + 1) & -(tile + 1)
    return tile + 1 - size, tl.sum((size > (1 << tl.arange(0, U))).to(tl.int32), 0)


@triton.jit
def collect_values(
    PARTS, NORMS, VBAR, LOCAL,
    BH, L, n, levels,
    D: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr, U: tl.constexpr, ROWS: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """The value of the span that ends with a tile."""
    bh, tile = (tl.program_id(0) % BH).to(tl.int64), tl.program_id(0) // BH
    end = tile * T + T - 1
    if end >= L:
        return
    first, level = span_of_tiles(tile, U)
    d, r = tl.arange(0, BLOCK_D), tl.arange(0, ROWS)
    NORMS += bh * n * levels + level
    PARTS += (bh * n * levels + level) * D
    acc = tl.zeros([BLOCK_D], tl.float32)
    top = tl.max(tl.full([ROWS], float("-inf"), tl.float32), 0)
    total = tl.sum(tl.zeros([ROWS], tl.float32), 0)
    for start in range(first, tile + 1, ROWS):
        t = start + r
        norm = tl.load(NORMS + t * levels, mask=t <= tile, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(norm, 0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        w, old = tl.exp2(norm - shift), tl.exp2(top - shift)
        acc = acc * old + tl.sum(w[:, None] * load_rows(PARTS, t, d, levels * D, t <= tile, D, BLOCK_D), 0)
        top, total = new_top, total * old + tl.sum(w, 0)
    at = bh * L + rows_of(end, L, REVERSE)
    x = acc / tl.where(total > 0.0, total, 1.0)
    tl.store(VBAR + at * D + d, x.to(VBAR.dtype.element_ty), mask=d < D)
    tl.store(LOCAL + at, log_normaliser(top, total))
