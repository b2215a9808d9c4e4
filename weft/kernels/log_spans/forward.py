"""Triton kernels: forward pass of attention to the token itself and to the dyadic spans before it.

The spans before position i end before the numbers that remain of i when its last set bits are cleared one by one, as in
a Fenwick tree: 22 = 10110₂ has spans that end before 22, 20 and 16. The span that ends before x has as many tokens as
the last set bit of x, so every position is the last of exactly one span. The key and value of a span are those of its
last token, or a summary stored in its place.

A tile of T positions attends to rows of its own tile, and to the spans that end at the edges of earlier tiles, at most
U, which are the same for the whole tile. With REVERSE, positions count from the end of the sequence. `attend` continues
the softmax stored in OUT and LSE (MORE). Logarithms are to base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..random import kept, row_words
from ..rows import load_rows, store_rows, valid_rows
from ..softmax import log_normaliser, mean, weigh


@triton.jit
def rows_of(position, L, REVERSE: tl.constexpr):
    return L - 1 - position if REVERSE else position


@triton.jit
def near_spans(T: tl.constexpr):
    """(T, T): which rows j of its own tile a position i attends to: i is in the block after the span that ends with j,
    and as long. Triton 3.6 compiles the same condition as `i & -(end & -end) == end` wrongly for 64 rows."""
    i, j = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]
    return (j < i) & (i <= (j | (j + 1)))


@triton.jit
def far_spans(tile, L, T: tl.constexpr, U: tl.constexpr, REVERSE: tl.constexpr):
    """Rows of the spans in earlier tiles, and which of the U exist: one for each set bit of the number of the tile."""
    u = tl.arange(0, U)
    exist = ((tile >> u) & 1) == 1
    return rows_of(tl.where(exist, (tile >> u << u) * T - 1, 0), L, REVERSE), exist


@triton.jit
def attend(
    Q, K, V, MASK, KBAR, VBAR, SOME, KEY, OUT, LSE,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, n_b, n_h, n_l, m_b, m_h, m_l, o_b, o_h, o_l,
    BH, H, L, threshold, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr, U: tl.constexpr, REVERSE: tl.constexpr,
    HAS_MASK: tl.constexpr, MORE: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
    SPAN_GROUP: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """KBAR, VBAR and SOME: keys and values of the spans, and which have any token. Unless MORE, start with the token
    itself."""
    bh, tile = tl.program_id(0) % BH, tl.program_id(0) // BH
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    KBAR += b * n_b + h // SPAN_GROUP * n_h
    VBAR += b * m_b + h // SPAN_GROUP * m_h
    OUT += b * o_b + h * o_h
    SOME += b * L
    LSE += bh.to(tl.int64) * L
    d = tl.arange(0, BLOCK_D)
    p = tile * T + tl.arange(0, T)
    live = p < L
    row = rows_of(p, L, REVERSE)
    word = row_words(KEY, bh, row, DROPOUT)
    q = load_rows(Q + b * q_b + h * q_h, row, d, q_l, live, D, BLOCK_D)
    if MORE:
        top = tl.load(LSE + row, mask=live, other=float("-inf"))
        total = tl.where(top == float("-inf"), 0.0, 1.0)
        acc = load_rows(OUT, row, d, o_l, live, D, BLOCK_D).to(tl.float32)
    else:
        real = valid_rows(MASK + b * L, row, live, HAS_MASK)
        k = load_rows(K + b * k_b + h // GROUP * k_h, row, d, k_l, real, D, BLOCK_D)
        acc = load_rows(V + b * v_b + h // GROUP * v_h, row, d, v_l, real, D, BLOCK_D).to(tl.float32)
        acc *= kept(word[:, None], row[:, None], threshold, DROPOUT)
        top = tl.where(real, tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * scale, float("-inf"))
        total = tl.where(real, 1.0, 0.0)

    real = valid_rows(SOME, row, live, HAS_MASK)
    k = load_rows(KBAR, row, d, n_l, real, D, BLOCK_D)
    v = load_rows(VBAR, row, d, m_l, real, D, BLOCK_D)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    w, old, top, total = weigh(s, near_spans(T) & real[None, :], top, total, scale)
    w *= kept(word[:, None], row[None, :], threshold, DROPOUT)
    acc = tl.dot(w.to(v.dtype), v, acc * old[:, None], input_precision=PRECISION)

    far, exist = far_spans(tile, L, T, U, REVERSE)
    real = valid_rows(SOME, far, exist, HAS_MASK)
    k = load_rows(KBAR, far, d, n_l, real, D, BLOCK_D)
    v = load_rows(VBAR, far, d, m_l, real, D, BLOCK_D)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    w, old, top, total = weigh(s, real[None, :], top, total, scale)
    w *= kept(word[:, None], far[None, :], threshold, DROPOUT)
    acc = tl.dot(w.to(v.dtype), v, acc * old[:, None], input_precision=PRECISION)
    store_rows(OUT, mean(acc, total), row, d, o_l, live, D, BLOCK_D)
    tl.store(LSE + row, log_normaliser(top, total), mask=live)
