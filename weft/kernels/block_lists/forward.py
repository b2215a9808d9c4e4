"""Triton kernels: forward pass of attention of query blocks to lists of key blocks.

A block has m tokens. TABLE (H, n + 1 + T) holds, for each head, where the list of each block starts, then the lists.
A few blocks may have much longer lists than the others. They are expected near both ends of the sequence, so programs
run from the ends to the middle. Logarithms are to base 2. Program ids run over heads first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..random import kept, row_words
from ..rows import load_rows, store_rows, valid_rows
from ..softmax import log_normaliser, mean, no_keys, weigh


@triton.jit
def place(BH, H, n, m, TILE: tl.constexpr):
    """Head, batch entry, block, and first place in the block of this program."""
    tiles = (m + TILE - 1) // TILE
    bh, work = tl.program_id(0) % BH, tl.program_id(0) // BH
    x = work // tiles
    block = tl.where(x % 2 == 0, x // 2, n - 1 - x // 2)
    return bh.to(tl.int64), (bh // H).to(tl.int64), (bh % H).to(tl.int64), block, work % tiles * TILE


@triton.jit
def list_of(TABLE, h, block, m, entries, TILE: tl.constexpr):
    """The tiles of the list of a block, from `start` to `stop`."""
    tiles = (m + TILE - 1) // TILE
    TABLE += h * entries + block
    return tl.load(TABLE) * tiles, tl.load(TABLE + 1) * tiles


@triton.jit
def listed(t, TABLE, h, n, m, entries, L, TILE: tl.constexpr):
    """Tokens of tile t of the lists, and which of them exist."""
    tiles = (m + TILE - 1) // TILE
    block = tl.load(TABLE + h * entries + n + 1 + t // tiles)
    place = t % tiles * TILE + tl.arange(0, TILE)
    return block * m + place, (place < m) & (block * m + place < L)


@triton.jit
def attend(
    Q, K, V, MASK, TABLE, KEY, OUT, LSE,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, o_b, o_h, o_l,
    BH, H, L, n, m, entries, threshold, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, HAS_MASK: tl.constexpr,
    PRECISION: tl.constexpr, GROUP: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    bh, b, h, block, first = place(BH, H, n, m, BQ)
    K += b * k_b + h // GROUP * k_h
    V += b * v_b + h // GROUP * v_h
    MASK += b * L
    d = tl.arange(0, BLOCK_D)
    i = first + tl.arange(0, BQ)
    live = (i < m) & (block * m + i < L)
    i += block * m
    word = row_words(KEY, bh, i, DROPOUT)
    q = load_rows(Q + b * q_b + h * q_h, i, d, q_l, live, D, BLOCK_D)
    acc, top, total = no_keys(BQ, BLOCK_D)
    start, stop = list_of(TABLE, h, block, m, entries, BK)
    for t in range(start, stop):
        j, real = listed(t, TABLE, h, n, m, entries, L, BK)
        real = valid_rows(MASK, j, real, HAS_MASK)
        k = load_rows(K, j, d, k_l, real, D, BLOCK_D)
        v = load_rows(V, j, d, v_l, real, D, BLOCK_D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        p, old, top, total = weigh(s, real[None, :], top, total, scale)
        p *= kept(word[:, None], j[None, :], threshold, DROPOUT)
        acc = tl.dot(p.to(v.dtype), v, acc * old[:, None], input_precision=PRECISION)
    out = mean(acc, total)
    store_rows(OUT + b * o_b + h * o_h, out, i, d, o_l, live, D, BLOCK_D)
    tl.store(LSE + bh * L + i, log_normaliser(top, total), mask=live)
