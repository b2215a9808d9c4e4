"""Triton kernels: forward pass of softmax attention to near keys and a few far keys.

A query i in a block of m tokens attends to the keys j of its block with i − left ≤ j ≤ i + right: the whole block, or a
window if the sequence is one block. EXTRAS defines the far keys:

    "none"       nothing
    "columns"    C tokens of every other block (of every earlier block if causal), at the same offsets in each
    "first"      the first C tokens, which are not in the windows and, unless causal, attend to all tokens

A tile of queries is inside one block. It first processes the key tiles in which all pairs are allowed, without checks,
then the others. The check is the same everywhere: missing and masked keys have position NOWHERE, and a key must be
between the two bounds of a row. Positions are relative to the first token of the block. Logarithms are to base 2:
`scale` includes log2(e)/√D. Program ids run over heads first, so concurrent programs read whole rows of (B, L, H, D)
memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..random import kept, row_words
from ..rows import load_rows, place, store_rows
from ..softmax import add_keys, no_keys

NOWHERE = tl.constexpr(1 << 30)


@triton.jit
def extra_position(e, m, C: tl.constexpr, EXTRAS: tl.constexpr, LEADING: tl.constexpr):
    """Position of extra e in the sequence: the last C offsets of each block; with LEADING, the first of them is moved
    to the first token of the block."""
    if EXTRAS == "first":
        return e
    place = m - C + e % C
    if LEADING:
        place = tl.where(e % C == 0, 0, place)
    return e // C * m + place


@triton.jit
def place_tile(TABLE, tile, ROWS: tl.constexpr, bh, H, L, m, PACKED: tl.constexpr):
    """Where a tile of ROWS tokens is: its block, the block's place (`rows.place`), and the tile's first token in the
    block. PACKED "documents": each document is one block, and TABLE lists its pieces of m tokens."""
    tiles = (m + ROWS - 1) // ROWS  # in a block
    block, start = tile // tiles, tile % tiles * ROWS
    b, h, bh, first, end = place(TABLE, bh, block, H, L, m, PACKED != "")
    if PACKED == "documents":
        piece = first
        first, end = tl.load(TABLE + 8 * block + 6), tl.load(TABLE + 8 * block + 7)
        start += piece - first
    return block, b, h, bh, first, end, start


@triton.jit
def seen_range(q_first, block, end, n, left, right,
               BQ: tl.constexpr, C: tl.constexpr, EXTRAS: tl.constexpr, CAUSAL: tl.constexpr):  # fmt: skip
    """For one tile of queries: its near keys [low, high), and the maximum number of extras."""
    low, high = tl.maximum(q_first - left, 0), tl.minimum(q_first + BQ + right, end)
    extras = 0
    if EXTRAS == "columns":
        extras = (block if CAUSAL else n) * C
    if EXTRAS == "first":
        extras = tl.minimum(q_first + BQ, C) if CAUSAL else C
        low = tl.maximum(low, C)
        if not CAUSAL:
            sees_all = q_first < C
            low, high = tl.where(sees_all, C, low), tl.where(sees_all, end, high)
    return low, tl.maximum(high, low), extras


@triton.jit
def row_bounds(i, end, left, right, C: tl.constexpr, EXTRAS: tl.constexpr, CAUSAL: tl.constexpr):
    """The first and last near key of each query."""
    low, high = i - left, tl.minimum(i + right, end - 1)
    if EXTRAS == "first" and not CAUSAL:
        low, high = tl.where(i < C, 0, low), tl.where(i < C, end - 1, high)
    return low, high


@triton.jit
def whole_tiles(q_first, end, left, right, low, near_tiles, extras,
                BQ: tl.constexpr, BK: tl.constexpr, EXTRAS: tl.constexpr, CAUSAL: tl.constexpr,
                HAS_MASK: tl.constexpr):  # fmt: skip
    """The tiles in which all pairs are allowed, so no check is needed: near tiles [start, stop), and the number of
    extra tiles."""
    start, stop, extra = 0, 0, 0
    if not HAS_MASK:
        start = tl.maximum(q_first + BQ - 1 - left - low + BK - 1, 0) // BK
        start = tl.minimum(start, near_tiles)
        stop = tl.maximum(tl.minimum(q_first + right + 1, end) - low, 0) // BK
        stop = tl.maximum(tl.minimum(stop, near_tiles), start)
        if EXTRAS == "columns" and CAUSAL:
            extra = extras // BK
    return start, stop, extra


@triton.jit
def whole_tile(t, start, near, low, first, m,
               BK: tl.constexpr, C: tl.constexpr, EXTRAS: tl.constexpr, LEADING: tl.constexpr):  # fmt: skip
    """The positions of the keys of whole tile t: `near` of them, then extras."""
    j = low + (start + t) * BK + tl.arange(0, BK)
    if EXTRAS == "columns":
        e = (t - near) * BK + tl.arange(0, BK)
        j = tl.where(t < near, j, extra_position(tl.maximum(e, 0), m, C, EXTRAS, LEADING) - first)
    return j


@triton.jit
def other_tile(t, start, stop, near_tiles, extra):
    """The t-th of the tiles that are not whole."""
    t += tl.where(t < start, 0, stop - start)
    return t + tl.where(t < near_tiles, 0, extra)


@triton.jit
def seen_tile(t, near_tiles, low, high, extras, i, row_low, row_high, block, first, m, L, MASK,
              BK: tl.constexpr, C: tl.constexpr, EXTRAS: tl.constexpr, LEADING: tl.constexpr, CAUSAL: tl.constexpr,
              HAS_MASK: tl.constexpr):  # fmt: skip
    """Tile t of the keys: their positions, which of them exist, and which pairs (i, key) are allowed."""
    step = t * BK + tl.arange(0, BK)
    j = low + step
    live = j < high
    if EXTRAS != "none":
        near = t < near_tiles
        e = step - near_tiles * BK
        x = extra_position(e, m, C, EXTRAS, LEADING)
        exists = (e >= 0) & (e < extras)
        if EXTRAS == "columns" and not CAUSAL:
            exists = exists & (e // C != block) & (x < L)
        live = tl.where(near, live, exists)
        j = tl.where(near, j, x - first)
        row_low = tl.where(near, row_low, -NOWHERE)
        if EXTRAS == "first" and CAUSAL:
            row_high = tl.where(near, row_high, i)
        else:
            row_high = tl.where(near, row_high, NOWHERE - 1)
    if HAS_MASK:
        live = live & (tl.load(MASK + j, mask=live, other=0) != 0)
    at = tl.where(live, j, NOWHERE)
    return j, live, (at[None, :] >= row_low[:, None]) & (at[None, :] <= row_high[:, None])


@triton.jit
def attend(
    Q, K, V, MASK, TABLE, KEY, OUT, LSE,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, o_b, o_h, o_l,
    BH, H, L, m, n, left, right, threshold, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    EXTRAS: tl.constexpr, LEADING: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
    PRECISION: tl.constexpr, DROPOUT: tl.constexpr, GROUP: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(0) % BH
    tile = tl.program_id(0) // BH
    if CAUSAL and EXTRAS == "columns":
        tile = n * ((m + BQ - 1) // BQ) - 1 - tile  # the last blocks have the most keys: start them first
    block, b, h, bh, first, end, q_first = place_tile(TABLE, tile, BQ, bh, H, L, m, PACKED)
    d = tl.arange(0, BLOCK_D)
    Q += b * q_b + h * q_h + first.to(tl.int64) * q_l
    K += b * k_b + h // GROUP * k_h + first.to(tl.int64) * k_l
    V += b * v_b + h // GROUP * v_h + first.to(tl.int64) * v_l
    OUT += b * o_b + h * o_h + first.to(tl.int64) * o_l
    MASK += b * L + first

    i = q_first + tl.arange(0, BQ)
    q = load_rows(Q, i, d, q_l, i < end, D, BLOCK_D)
    acc, top, total = no_keys(BQ, BLOCK_D)
    word = row_words(KEY, bh, first + i, DROPOUT)
    low, high, extras = seen_range(q_first, block, end, n, left, right, BQ, C, EXTRAS, CAUSAL)
    row_low, row_high = row_bounds(i, end, left, right, C, EXTRAS, CAUSAL)
    near_tiles = (high - low + BK - 1) // BK
    start, stop, extra = whole_tiles(
        q_first, end, left, right, low, near_tiles, extras, BQ, BK, EXTRAS, CAUSAL, HAS_MASK
    )
    whole = stop - start + extra
    if not HAS_MASK:
        for t in range(0, whole):
            j = whole_tile(t, start, stop - start, low, first, m, BK, C, EXTRAS, LEADING)
            k = load_rows(K, j, d, k_l, None, D, BLOCK_D)
            v = load_rows(V, j, d, v_l, None, D, BLOCK_D)
            factor = kept(word[:, None], (first + j)[None, :], threshold, DROPOUT)
            acc, top, total = add_keys(acc, top, total, q, k, v, None, factor, scale, False, PRECISION)
    for u in range(0, near_tiles + (extras + BK - 1) // BK - whole):
        t = other_tile(u, start, stop, near_tiles, extra)
        j, live, allowed = seen_tile(t, near_tiles, low, high, extras, i, row_low, row_high, block, first, m, L, MASK,
                                     BK, C, EXTRAS, LEADING, CAUSAL, HAS_MASK)  # fmt: skip
        k = load_rows(K, j, d, k_l, live, D, BLOCK_D)
        v = load_rows(V, j, d, v_l, live, D, BLOCK_D)
        factor = kept(word[:, None], (first + j)[None, :], threshold, DROPOUT)
        acc, top, total = add_keys(acc, top, total, q, k, v, allowed, factor, scale, True, PRECISION)

    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    store_rows(OUT, acc * (1.0 / total)[:, None], i, d, o_l, i < end, D, BLOCK_D)
    lse = tl.where(empty, float("-inf"), top + tl.log2(total))  # the backward masks rows without keys
    tl.store(LSE + bh * L + first + i, lse, mask=i < end)
