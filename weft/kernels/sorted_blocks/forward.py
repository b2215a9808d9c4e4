"""Triton kernels: forward pass of attention to the own block and to a mixture of all blocks. `kernel.py` has the
formulas.

R is (B·H, n, width): rows of a multiple of 16 elements, zero from n on, so that loads of any length are aligned. A tile
of attention holds several whole blocks, side by side.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..random import kept, row_words
from ..rows import load_rows, store_rows, valid_rows
from ..softmax import log_normaliser, weigh


@triton.jit
def sum_blocks(
    K, SUMS,
    k_b, k_h, k_l,
    BH, H, L, n, m,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """SUMS (B·H, n, D), float32: the sum of the keys of each block."""
    bh, block = (tl.program_id(0) % BH).to(tl.int64), tl.program_id(0) // BH * ROWS + tl.arange(0, ROWS)
    K += bh // H * k_b + bh % H * k_h
    d = tl.arange(0, BLOCK_D)
    total = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for slot in range(m):
        token = block * m + slot
        total += load_rows(K, token, d, k_l, token < L, D, BLOCK_D).to(tl.float32)
    store_rows(SUMS + bh * n * D, total, block, d, D, block < n, D, BLOCK_D)


@triton.jit
def sort_columns(SORT, d, j, n, w_d, D: tl.constexpr):
    """Columns j of SORT (D, n or more), in float32."""
    return tl.load(SORT + d[:, None] * w_d + j[None, :], mask=(d < D)[:, None] & (j < n)[None, :], other=0.0).to(
        tl.float32
    )


@triton.jit
def place_blocks(
    SUMS, SORT, SOURCES, R,
    w_d, BH, H, n, width, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HAS_SOURCES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """R = softmax(SUMS @ SORT), over the blocks in SOURCES (B, n)."""
    bh, i = (tl.program_id(0) % BH).to(tl.int64), tl.program_id(0) // BH * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    SOURCES += bh // H * n
    R += bh * n * width
    sums = load_rows(SUMS + bh * n * D, i, d, D, i < n, D, BLOCK_D)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, n, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        source = valid_rows(SOURCES, j, j < n, HAS_SOURCES)
        s = tl.dot(sums, sort_columns(SORT, d, j, n, w_d, D), input_precision=PRECISION)
        _, _, top, total = weigh(s, source[None, :], top, total, scale)
    lse = log_normaliser(top, total)
    for start in range(0, width, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        source = valid_rows(SOURCES, j, j < n, HAS_SOURCES)
        s = tl.dot(sums, sort_columns(SORT, d, j, n, w_d, D), input_precision=PRECISION)
        r = tl.where(source[None, :], tl.exp2(s * scale - lse[:, None]), 0.0)
        at = R + i[:, None].to(tl.int64) * width + j[None, :]
        tl.store(at, r.to(R.dtype.element_ty), mask=(i < n)[:, None] & (j < width)[None, :])


@triton.jit
def mix_blocks(
    R, X, Y, OUT_X, OUT_Y, EACH,
    x_b, x_h, x_l, y_b, y_h, y_l, ox_b, ox_h, ox_l, oy_b, oy_h, oy_l,
    H, n, width, m, tokens, tokens_out,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, BACK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Mixtures of blocks, slot by slot: OUT_X = R X, OUT_Y = R Y. BACK adds to the outputs: Rᵀ X + EACH and Rᵀ Y;
    EACH (B·H, n, D), float32, is added at each slot of a block."""
    tiles = (n + ROWS - 1) // ROWS
    rest, bh = tl.program_id(0) // tiles, (tl.program_id(0) // tiles // m).to(tl.int64)
    b, h, slot = bh // H, bh % H, rest % m
    i = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    R += bh * n * width
    X += b * x_b + h * x_h
    Y += b * y_b + h * y_h
    OUT_X += b * ox_b + h * ox_h
    OUT_Y += b * oy_b + h * oy_h
    mixed_x = tl.zeros([ROWS, BLOCK_D], tl.float32)
    mixed_y = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in range(0, n, BLOCKS):
        j = start + tl.arange(0, BLOCKS)
        token = j * m + slot
        if BACK:
            at = R + j[:, None].to(tl.int64) * width + i[None, :]
            r = tl.trans(tl.load(at, mask=(j < n)[:, None] & (i < width)[None, :], other=0.0))
        else:
            at = R + i[:, None].to(tl.int64) * width + j[None, :]
            r = tl.load(at, mask=(i < n)[:, None] & (j < width)[None, :], other=0.0)
        x = load_rows(X, token, d, x_l, token < tokens, D, BLOCK_D)
        mixed_x = tl.dot(r, x, mixed_x, input_precision=PRECISION)
        y = load_rows(Y, token, d, y_l, token < tokens, D, BLOCK_D)
        mixed_y = tl.dot(r, y, mixed_y, input_precision=PRECISION)
    token = i * m + slot
    live = token < tokens_out
    if BACK:
        mixed_x += load_rows(EACH + bh * n * D, i, d, D, live, D, BLOCK_D)
        mixed_x += load_rows(OUT_X, token, d, ox_l, live, D, BLOCK_D).to(tl.float32)
        mixed_y += load_rows(OUT_Y, token, d, oy_l, live, D, BLOCK_D).to(tl.float32)
    store_rows(OUT_X, mixed_x, token, d, ox_l, live, D, BLOCK_D)
    store_rows(OUT_Y, mixed_y, token, d, oy_l, live, D, BLOCK_D)


@triton.jit
def tile_of_blocks(MASK, SLOTS, BH, H, L, n, m, ROWS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_SLOTS: tl.constexpr):
    """Batch entry, head, tokens of the tile, which are queries, which exist in a sorted block, and which pairs (query,
    key) are allowed in the own and in the sorted block."""
    bh, row = (tl.program_id(0) % BH).to(tl.int64), tl.arange(0, ROWS)
    b, h = bh // H, bh % H
    first = tl.program_id(0) // BH * (ROWS // m * m)
    token = first + row
    exist = (row < ROWS // m * m) & (token < n * m)
    live = exist & (token < L)
    together = (row // m)[:, None] == (row // m)[None, :]
    own = together & valid_rows(MASK + b * L, token, live, HAS_MASK)[None, :]
    others = together & valid_rows(SLOTS + b * m, row % m, exist, HAS_SLOTS)[None, :]
    return b, h, token, live, exist, own, others


@triton.jit
def dropped(KEY, bh, i, slots, threshold, DROPOUT: tl.constexpr):
    """Dropout's factors in the own and in the sorted block, whose keys count from `slots` on."""
    word = row_words(KEY, bh, i, DROPOUT)[:, None]
    return kept(word, i[None, :], threshold, DROPOUT), kept(word, slots + i[None, :], threshold, DROPOUT)


@triton.jit
def block_weights(q, k, allowed, scale, PRECISION: tl.constexpr):
    s = tl.where(allowed, tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale, float("-inf"))
    top = tl.max(s, 1)
    p = tl.exp2(s - tl.where(top == float("-inf"), 0.0, top)[:, None])
    total = tl.sum(p, 1)
    return p * (1.0 / tl.where(total > 0.0, total, 1.0))[:, None]


@triton.jit
def attend(
    Q, K, V, SORTED_K, SORTED_V, MASK, SLOTS, KEY, OUT,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, s_b, s_h, s_l, o_b, o_h, o_l,
    BH, H, L, n, m, threshold, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_SLOTS: tl.constexpr,
    PRECISION: tl.constexpr, GROUP: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    b, h, i, live, exist, own, others = tile_of_blocks(MASK, SLOTS, BH, H, L, n, m, ROWS, HAS_MASK, HAS_SLOTS)
    factor, others_factor = dropped(KEY, b * H + h, i, n * m, threshold, DROPOUT)
    d = tl.arange(0, BLOCK_D)
    q = load_rows(Q + b * q_b + h * q_h, i, d, q_l, live, D, BLOCK_D)
    k = load_rows(K + b * k_b + h // GROUP * k_h, i, d, k_l, live, D, BLOCK_D)
    v = load_rows(V + b * v_b + h // GROUP * v_h, i, d, v_l, live, D, BLOCK_D)
    p = block_weights(q, k, own, scale, PRECISION) * factor
    out = tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
    k = load_rows(SORTED_K + b * s_b + h // GROUP * s_h, i, d, s_l, exist, D, BLOCK_D)
    v = load_rows(SORTED_V + b * s_b + h // GROUP * s_h, i, d, s_l, exist, D, BLOCK_D)
    p = block_weights(q, k, others, scale, PRECISION) * others_factor
    out = tl.dot(p.to(v.dtype), v, out, input_precision=PRECISION)
    store_rows(OUT + b * o_b + h * o_h, out, i, d, o_l, live, D, BLOCK_D)
