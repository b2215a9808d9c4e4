"""Triton kernels: backward pass of the summaries. No atomics: sums have a fixed order.

    α_j = exp2(qbar · k_j − local)          dα_j = dvbar · v_j          Σ_j α_j dα_j = dvbar · vbar
    dqbar = Σ_j α_j (dα_j − dvbar · vbar) k_j / √D          dk_j = Σ_spans α_j (dα_j − dvbar · vbar) qbar / √D

A tile has all spans of its tokens: those inside it, and at most U around it, whose part of dqbar goes to PARTS.
`pool_gradients` walks down the tree of the pools. As in `combiner/logsparse.py`, each node halves a gradient if its two
halves are equal.
"""

# mypy: disable-error-code="assignment,misc"
# The levels of the tree in a tile are a tuple that grows while a loop is unrolled.

from __future__ import annotations

import triton
import triton.language as tl

from ..line_pool.backward import share
from ..rows import load_rows, store_rows, valid_rows
from .forward import rows_of
from .summaries import ends_in_tile, halves, span_of_tiles, spans_around, tokens_of_spans


@triton.jit
def value_gradients(
    QBAR, K, V, MASK, VBAR, LOCAL, DVBAR, DQBAR, DK, DV, PARTS,
    k_b, k_h, k_l, v_b, v_h, v_l, dk_b, dk_h, dk_l, dv_b, dv_h, dv_l,
    BH, H, L, n, levels, scale, logit_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr, U: tl.constexpr, REVERSE: tl.constexpr,
    HAS_MASK: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Add to DK and DV. Write DQBAR (B·H, L, D), and PARTS (B·H, n, levels, D) of the longer spans."""
    bh, tile = tl.program_id(0) % BH, tl.program_id(0) // BH
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    at = bh.to(tl.int64) * L
    QBAR += at * D
    VBAR += at * D
    DVBAR += at * D
    LOCAL += at
    DK += b * dk_b + h * dk_h
    DV += b * dv_b + h * dv_h
    d = tl.arange(0, BLOCK_D)
    p = tile * T + tl.arange(0, T)
    live = p < L
    row = rows_of(p, L, REVERSE)
    real = valid_rows(MASK + b * L, row, live, HAS_MASK)
    k = load_rows(K + b * k_b + h // GROUP * k_h, row, d, k_l, real, D, BLOCK_D)
    v = load_rows(V + b * v_b + h // GROUP * v_h, row, d, v_l, real, D, BLOCK_D)
    dk = load_rows(DK, row, d, dk_l, live, D, BLOCK_D).to(tl.float32) / logit_scale
    dv = load_rows(DV, row, d, dv_l, live, D, BLOCK_D).to(tl.float32)

    q = load_rows(QBAR, row, d, D, live, D, BLOCK_D)
    dvbar = load_rows(DVBAR, row, d, D, live, D, BLOCK_D)
    delta = tl.sum(dvbar.to(tl.float32) * load_rows(VBAR, row, d, D, live, D, BLOCK_D).to(tl.float32), 1)
    local = tl.load(LOCAL + row, mask=live, other=0.0)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale - local[:, None]
    w = tl.where(tokens_of_spans(T) & real[None, :] & live[:, None], tl.exp2(s), 0.0)
    dv = tl.dot(tl.trans(w.to(dvbar.dtype)), dvbar, dv, input_precision=PRECISION)
    ds = (w * (tl.dot(dvbar, tl.trans(v), input_precision=PRECISION) - delta[:, None])).to(q.dtype)
    dk = tl.dot(tl.trans(ds), q, dk, input_precision=PRECISION)
    dq = tl.dot(ds, k, input_precision=PRECISION) * logit_scale
    store_rows(DQBAR + at * D, dq, row, d, D, live, D, BLOCK_D)

    far, exist = spans_around(tile, L, T, U, REVERSE)
    q = load_rows(QBAR, far, d, D, exist, D, BLOCK_D)
    dvbar = load_rows(DVBAR, far, d, D, exist, D, BLOCK_D)
    delta = tl.sum(dvbar.to(tl.float32) * load_rows(VBAR, far, d, D, exist, D, BLOCK_D).to(tl.float32), 1)
    local = tl.load(LOCAL + far, mask=exist, other=0.0)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale - local[:, None]
    w = tl.where(exist[:, None] & real[None, :], tl.exp2(s), 0.0)
    dv = tl.dot(tl.trans(w.to(dvbar.dtype)), dvbar, dv, input_precision=PRECISION)
    ds = (w * (tl.dot(dvbar, tl.trans(v), input_precision=PRECISION) - delta[:, None])).to(q.dtype)
    dk = tl.dot(tl.trans(ds), q, dk, input_precision=PRECISION)
    dq = tl.dot(ds, k, input_precision=PRECISION) * logit_scale
    PARTS += (bh.to(tl.int64) * n + tile) * levels * D
    store_rows(PARTS, dq, tl.arange(0, U), d, D, exist, D, BLOCK_D)
    store_rows(DK, dk * logit_scale, row, d, dk_l, live, D, BLOCK_D)
    store_rows(DV, dv, row, d, dv_l, live, D, BLOCK_D)


@triton.jit
def collect_queries(
    PARTS, DQBAR,
    BH, L, n, levels,
    D: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr, U: tl.constexpr, ROWS: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """The gradient of the pooled query of the span that ends with a tile."""
    bh, tile = (tl.program_id(0) % BH).to(tl.int64), tl.program_id(0) // BH
    end = tile * T + T - 1
    if end >= L:
        return
    first, level = span_of_tiles(tile, U)
    d, r = tl.arange(0, BLOCK_D), tl.arange(0, ROWS)
    PARTS += (bh * n * levels + level) * D
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(first, tile + 1, ROWS):
        t = start + r
        acc += tl.sum(load_rows(PARTS, t, d, levels * D, t <= tile, D, BLOCK_D), 0)
    DQBAR += (bh * L + rows_of(end, L, REVERSE)) * D
    tl.store(DQBAR + d, acc.to(DQBAR.dtype.element_ty), mask=d < D)


@triton.jit
def pool_gradients(
    Q, K, MASK, COUNT, TREE, DQBAR, DKBAR, DQ, DK,
    q_b, q_h, q_l, k_b, k_h, k_l, dq_b, dq_h, dq_l, dk_b, dk_h, dk_l,
    BH, H, L, n, nodes, levels,
    D: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr, LEVELS: tl.constexpr, POOL: tl.constexpr,
    REVERSE: tl.constexpr, HAS_MASK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Add to DQ and DK. Programs of the second axis: queries, keys."""
    bh, tile = tl.program_id(0) % BH, tl.program_id(0) // BH
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    second = tl.program_id(1)
    if second == 0:
        X, x_l, DBAR = Q + b * q_b + h * q_h, tl.cast(q_l, tl.int64), DQBAR + bh.to(tl.int64) * L * D
        DX, dx_l = DQ + b * dq_b + h * dq_h, tl.cast(dq_l, tl.int64)
    else:
        X, x_l, DBAR = K + b * k_b + h // GROUP * k_h, tl.cast(k_l, tl.int64), DKBAR + bh.to(tl.int64) * L * D
        DX, dx_l = DK + b * dk_b + h * dk_h, tl.cast(dk_l, tl.int64)
    COUNT += b * L
    TREE += (second * BH + bh).to(tl.int64) * nodes * D
    d = tl.arange(0, BLOCK_D)

    # From the largest block that contains the tile to the tile itself.
    flow = tl.zeros([BLOCK_D], tl.float32)
    start = nodes
    for up in range(levels):
        level = levels - 1 - up
        count = n >> level
        start -= count
        block = tile >> level
        if POOL == "max":
            mine = tl.load(TREE + (start + block) * D + d, mask=d < tl.where(block < count, D, 0), other=0.0)
            sibling = block ^ 1
            other = tl.load(TREE + (start + sibling) * D + d, mask=d < tl.where(sibling < count, D, 0), other=0.0)
            flow *= share(mine, other)
        end = ((block + 1) << level) * T - 1
        keep = (block % 2 == 0) & (end < L)
        at = rows_of(tl.where(keep, end, 0), L, REVERSE)
        own = tl.load(DBAR + at * D + d, mask=d < tl.where(keep, D, 0), other=0.0).to(tl.float32)
        if POOL == "mean":
            own /= tl.maximum(tl.load(COUNT + at), 1.0)
        flow += own

    p = tile * T + tl.arange(0, T)
    row = rows_of(p, L, REVERSE)
    real = valid_rows(MASK + b * L, row, p < L, HAS_MASK)
    xs = ()
    if POOL == "max":
        x = load_rows(X, row, d, x_l, real, D, BLOCK_D).to(tl.float32)
        x = tl.where(real[:, None], x, float("-inf"))
        for level in tl.static_range(LEVELS):
            xs = xs + (x,)
            x = halves(x, T >> level, BLOCK_D, POOL)
    grad = flow[None, :]
    for level in tl.static_range(LEVELS - 1, -1, -1):
        weight = tl.full([T >> (level + 1), 2, BLOCK_D], 1.0, tl.float32)
        if POOL == "max":
            pair = tl.reshape(xs[level], [T >> (level + 1), 2, BLOCK_D])
            equal = (pair == tl.max(pair, 1)[:, None, :]).to(tl.float32)
            weight = equal / tl.sum(equal, 1)[:, None, :]
        grad = tl.reshape(grad[:, None, :] * weight, [T >> level, BLOCK_D])
        end, keep = ends_in_tile(tile, L, level, T >> level)
        at = rows_of(tl.where(keep, end, 0), L, REVERSE)
        own = load_rows(DBAR, at, d, D, keep, D, BLOCK_D).to(tl.float32)
        if POOL == "mean":
            own /= tl.maximum(tl.load(COUNT + at), 1.0)[:, None]
        grad += own
    grad = tl.where(real[:, None], grad, 0.0) + load_rows(DX, row, d, dx_l, p < L, D, BLOCK_D).to(tl.float32)
    store_rows(DX, grad, row, d, dx_l, p < L, D, BLOCK_D)
