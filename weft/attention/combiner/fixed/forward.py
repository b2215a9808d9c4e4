"""Triton kernels: forward pass. Block summaries, then attention to the own block and the summaries in one softmax.

`summarise` reads q, k and v once and writes one row per block: the summary key and value, the normaliser of the local
softmax, and for the backward STATS: the pooled query, the mean key of the local softmax, and the number of tokens that
share each pooled entry. `attend` loops over the keys of the block and then over the summaries for a tile of queries,
with the running maximum and sum of FlashAttention. Logarithms are to base 2: `scale` includes log2(e)/√D.

Program ids run over heads first, so concurrent programs read whole rows of (B, L, H, D) memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....kernels.random import kept, row_words
from ....kernels.rows import load_rows, place, store_rows, valid_rows
from ....kernels.softmax import add_keys, no_keys


@triton.jit
def pool_rows(pooled, shared, x, live, POOL: tl.constexpr, KEEP: tl.constexpr):
    """Pool the live rows of x into `pooled`, row by row; for max, `shared` counts the tokens equal to it so far."""
    x = x.to(tl.float32)
    if POOL == "max":
        x = tl.where(live[:, None], x, float("-inf"))
        if KEEP:
            shared = tl.where(x > pooled, 0.0, shared) + tl.where((x >= pooled) & live[:, None], 1.0, 0.0)
        x = tl.maximum(pooled, x)
    else:
        x = pooled + x
    return x, shared


@triton.jit
def pool_columns(pooled, shared, tokens, POOL: tl.constexpr):
    """Join the pools of the rows, and count the tokens that share its gradient; zeros for a block without tokens."""
    if POOL == "max":
        top = tl.max(pooled, 0)
        shared = tl.sum(tl.where(pooled == top[None, :], shared, 0.0), 0)
    else:
        top = tl.sum(pooled, 0)
        shared = tl.zeros_like(top) + 1.0
        if POOL == "mean":
            shared = tl.zeros_like(top) + tl.maximum(tokens, 1.0)
            top = top / shared
    return tl.where(tokens > 0, top, 0.0), tl.maximum(shared, 1.0)


@triton.jit
def summarise(
    Q, K, V, MASK, TABLE, KBAR, VBAR, LOCAL, STATS,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l,
    BH, H, L, n, scale,
    m: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    POOL: tl.constexpr, HAS_MASK: tl.constexpr, KEEP: tl.constexpr, STAGES: tl.constexpr,
    GROUP: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    bh, block = tl.program_id(0) % BH, tl.program_id(0) // BH
    at = bh.to(tl.int64) * n + block
    b, h, bh, first, end = place(TABLE, bh, block, H, L, m, PACKED)
    d = tl.arange(0, BLOCK_D)
    rows = tl.arange(0, ROWS)
    Q += b * q_b + h * q_h + first.to(tl.int64) * q_l
    K += b * k_b + h // GROUP * k_h + first.to(tl.int64) * k_l
    V += b * v_b + h // GROUP * v_h + first.to(tl.int64) * v_l
    MASK += b * L + first

    # Every row of the tile has its own sums, so nothing crosses rows (and warps) before the end.
    none = tl.zeros([ROWS, BLOCK_D], tl.float32)
    empty = tl.full([ROWS, BLOCK_D], float("-inf") if POOL == "max" else 0.0, tl.float32)
    pooled, shared = empty, none
    seen = tl.zeros([ROWS], tl.float32)
    for start in tl.range(0, m, ROWS, num_stages=STAGES):
        live = valid_rows(MASK, start + rows, start + rows < end, HAS_MASK)
        q = load_rows(Q, start + rows, d, q_l, live, D, BLOCK_D)
        pooled, shared = pool_rows(pooled, shared, q, live, POOL, KEEP)
        seen += live.to(tl.float32)
    tokens = tl.sum(seen, 0)
    qbar, q_share = pool_columns(pooled, shared, tokens, POOL)

    pooled, shared, keys, values = empty, none, none, none
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in tl.range(0, m, ROWS, num_stages=STAGES):
        live = valid_rows(MASK, start + rows, start + rows < end, HAS_MASK)
        k = load_rows(K, start + rows, d, k_l, live, D, BLOCK_D)
        v = load_rows(V, start + rows, d, v_l, live, D, BLOCK_D)
        pooled, shared = pool_rows(pooled, shared, k, live, POOL, KEEP)
        logit = tl.where(live, tl.sum(k.to(tl.float32) * qbar[None, :], 1) * scale, float("-inf"))
        new_top = tl.maximum(top, logit)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        old = tl.exp2(top - shift)
        p = tl.exp2(logit - shift)
        total = total * old + p
        if KEEP:
            keys = keys * old[:, None] + p[:, None] * k.to(tl.float32)
        values = values * old[:, None] + p[:, None] * v.to(tl.float32)
        top = new_top
    kbar, k_share = pool_columns(pooled, shared, tokens, POOL)
    highest = tl.max(top, 0)
    weight = tl.exp2(top - tl.where(tokens > 0, highest, 0.0))
    total = tl.where(tokens > 0, tl.sum(total * weight, 0), 1.0)
    vbar = tl.sum(values * weight[:, None], 0) / total

    tl.store(KBAR + at * D + d, kbar.to(KBAR.dtype.element_ty), mask=d < D)
    tl.store(VBAR + at * D + d, vbar.to(VBAR.dtype.element_ty), mask=d < D)
    # log2 of the local normaliser; -inf marks a block without tokens, which is never attended to
    tl.store(LOCAL + at, tl.where(tokens > 0, highest + tl.log2(total), float("-inf")))
    if KEEP:
        STATS += at * 4 * D
        tl.store(STATS + d, qbar, mask=d < D)
        tl.store(STATS + D + d, tl.sum(keys * weight[:, None], 0) / total, mask=d < D)
        tl.store(STATS + 2 * D + d, q_share, mask=d < D)
        tl.store(STATS + 3 * D + d, k_share, mask=d < D)


@triton.jit
def own_summaries(TABLE, bh, block, n, PACKED: tl.constexpr):
    """The summaries of the block's sequence or document: the first of all of them, their number, and which of these
    belongs to the block."""
    start, count = bh.to(tl.int64) * n, n
    if PACKED:
        first = tl.load(TABLE + 8 * block + 4)
        start, count, block = start + first, tl.load(TABLE + 8 * block + 5), block - first
    return start, count, block


@triton.jit
def seen_tiles(q_first, end, block, n, BQ: tl.constexpr, BK: tl.constexpr, SPANS: tl.constexpr, CAUSAL: tl.constexpr):
    """For one tile of queries: the number of own key tiles, the total number of tiles, and the number of allowed
    summaries, `spans`."""
    own = (tl.minimum(end, q_first + BQ) if CAUSAL else end) + BK - 1
    spans = block if CAUSAL else n
    if not SPANS:  # only one block: there are no summaries
        spans = 0
    return own // BK, own // BK + (spans + BK - 1) // BK, spans


@triton.jit
def seen_tile(t, own_tiles, i, end, block, spans, MASK, LOCAL, BK: tl.constexpr, CAUSAL: tl.constexpr,
              HAS_MASK: tl.constexpr):  # fmt: skip
    """Tile t: whether its keys are own keys, their rows, which exist, and which pairs (i, key) are allowed."""
    own = t < own_tiles
    row = (t - tl.where(own, 0, own_tiles)) * BK + tl.arange(0, BK)
    live = row < tl.where(own, end, spans)
    if CAUSAL:  # own keys up to i; summaries up to the previous block
        allowed = row[None, :] <= tl.where(own, i, spans - 1)[:, None]
    else:
        allowed = (live & (row != tl.where(own, -1, block)))[None, :]
    if HAS_MASK:
        token = tl.load(MASK + row, mask=row < tl.where(own, end, 0), other=0) != 0
        span = tl.load(LOCAL + row, mask=row < tl.where(own, 0, spans), other=float("-inf")) > float("-inf")
        live = token | span
        allowed = allowed & live[None, :]
    return own, row, live, allowed


@triton.jit
def attend(
    Q, K, V, MASK, TABLE, KBAR, VBAR, LOCAL, KEY, OUT, LSE,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, o_b, o_h, o_l,
    BH, H, L, n, threshold, scale,
    m: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    SPANS: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr, DROPOUT: tl.constexpr,
    GROUP: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (m + BQ - 1) // BQ  # tiles of queries in a block
    bh = tl.program_id(0) % BH
    tile = n * TILES - 1 - tl.program_id(0) // BH  # the last blocks have the most summaries: start them first
    block = tile // TILES
    summaries, count, mine = own_summaries(TABLE, bh, block, n, PACKED)
    b, h, bh, first, end = place(TABLE, bh, block, H, L, m, PACKED)
    d = tl.arange(0, BLOCK_D)
    Q += b * q_b + h * q_h + first.to(tl.int64) * q_l
    K += b * k_b + h // GROUP * k_h + first.to(tl.int64) * k_l
    V += b * v_b + h // GROUP * v_h + first.to(tl.int64) * v_l
    OUT += b * o_b + h * o_h + first.to(tl.int64) * o_l
    MASK += b * L + first
    KBAR += summaries * D
    VBAR += summaries * D
    LOCAL += summaries

    q_first = (tile % TILES) * BQ
    if q_first >= end:
        return
    i = q_first + tl.arange(0, BQ)
    q = load_rows(Q, i, d, q_l, i < end, D, BLOCK_D)
    acc, top, total = no_keys(BQ, BLOCK_D)
    word = row_words(KEY, bh, first + i, DROPOUT)
    own_tiles, tiles, spans = seen_tiles(q_first, end, mine, count, BQ, BK, SPANS, CAUSAL)
    own_whole, span_whole = 0, 0
    if CAUSAL and not HAS_MASK:  # first the tiles in which all pairs are allowed, without checks
        own_whole, span_whole = q_first // BK, spans // BK
        for t in range(0, own_whole + span_whole):
            own = t < own_whole
            row = (t - tl.where(own, 0, own_whole)) * BK + tl.arange(0, BK)
            k = load_rows(tl.where(own, K, KBAR), row, d, tl.where(own, k_l, D), None, D, BLOCK_D)
            v = load_rows(tl.where(own, V, VBAR), row, d, tl.where(own, v_l, D), None, D, BLOCK_D)
            factor = kept(word[:, None], (row + tl.where(own, first, L))[None, :], threshold, DROPOUT)
            acc, top, total = add_keys(acc, top, total, q, k, v, None, factor, scale, False, PRECISION)
    edge = own_tiles - own_whole
    for t in range(0, tiles - own_whole - span_whole):
        t += tl.where(t < edge, own_whole, own_whole + span_whole)
        own, row, live, allowed = seen_tile(t, own_tiles, i, end, mine, spans, MASK, LOCAL, BK, CAUSAL, HAS_MASK)
        k = load_rows(tl.where(own, K, KBAR), row, d, tl.where(own, k_l, D), live, D, BLOCK_D)
        v = load_rows(tl.where(own, V, VBAR), row, d, tl.where(own, v_l, D), live, D, BLOCK_D)
        factor = kept(word[:, None], (row + tl.where(own, first, L))[None, :], threshold, DROPOUT)
        acc, top, total = add_keys(acc, top, total, q, k, v, allowed, factor, scale, HAS_MASK, PRECISION)

    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    store_rows(OUT, acc * (1.0 / total)[:, None], i, d, o_l, i < end, D, BLOCK_D)
    # 0 for a row without keys, so that the backward gets exp2(-inf - 0) = 0 everywhere
    lse = tl.where(empty, 0.0, top + tl.log2(total))
    tl.store(LSE + bh * L + first + i, lse, mask=i < end)
