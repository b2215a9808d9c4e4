"""Triton kernels: forward pass of attention to the summaries of other runs.

A tile of T tokens, in order of position, attends to two kinds of summaries, which continue the softmax in OUT and LSE:

    open      causal only: a token j stands for its run, at position i, if j < i < until_j and its group is another one;
              the tile needs its own tokens, and for every group the last token before the tile
    whole     runs as a whole, at their last token, FROM a position on; not the own run

For DROPOUT, the key index of a summary is its token: no query attends to that token directly, or to another summary at
it. Logarithms are to base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..random import kept, row_words
from ..rows import load_rows, store_rows
from ..softmax import log_normaliser, mean, weigh


@triton.jit
def standing(i, group, j, of, until):
    """(queries, tokens): whether token j, of group `of`, stands for its run at position i of `group`."""
    return (j[None, :] <= i[:, None]) & (i[:, None] < until[None, :]) & (of[None, :] != group[:, None])


@triton.jit
def earlier_tokens(BEFORE, ABOUT, g, groups):
    """For groups g: the last token before the tile, whether there is one, and until when it stands."""
    j = tl.load(BEFORE + g, mask=g < groups, other=-1)
    exist = j >= 0
    return tl.where(exist, j, 0), exist, tl.load(ABOUT + j, mask=exist, other=0)


@triton.jit
def whole_runs(FROM, LAST, c, R, L, i, about, CAUSAL: tl.constexpr):
    """For runs c: the last token, whether the tile may read it, and which pairs (queries, runs) are allowed."""
    start = tl.load(FROM + c, mask=c < R, other=L)
    last = tl.load(LAST + c, mask=c < R, other=0)
    allowed = start[None, :] <= i[:, None]
    if not CAUSAL:
        allowed = allowed & (last[None, :] != about[:, None])
    return last, start <= tl.minimum(tl.max(i, 0), L - 1), allowed


@triton.jit
def add_summaries(acc, top, total, q, word, KBAR, VBAR, j, exist, allowed, d, threshold, scale, D: tl.constexpr,
                  BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, DROPOUT: tl.constexpr):  # fmt: skip
    """Add the summaries at tokens j to the running softmax."""
    k = load_rows(KBAR, j, d, D, exist, D, BLOCK_D)
    v = load_rows(VBAR, j, d, D, exist, D, BLOCK_D)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    p, old, top, total = weigh(s, allowed, top, total, scale)
    p *= kept(word[:, None], j[None, :], threshold, DROPOUT)
    return tl.dot(p.to(v.dtype), v, acc * old[:, None], input_precision=PRECISION), top, total


@triton.jit
def attend(
    Q, KBAR, VBAR, OF, ABOUT, BEFORE, LAST, FROM, KEY, OUT, LSE,
    q_b, q_h, q_l, o_b, o_h, o_l,
    BH, H, L, n, groups, R, threshold, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr, BG: tl.constexpr, BR: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """KBAR and VBAR are (B·H, L, D)."""
    bh, tile = (tl.program_id(0) % BH).to(tl.int64), tl.program_id(0) // BH
    b, h = bh // H, bh % H
    OUT += b * o_b + h * o_h
    LSE += bh * L
    KBAR += bh * L * D
    VBAR += bh * L * D
    OF += bh * L
    ABOUT += bh * L
    BEFORE += (bh * n + tile) * groups
    LAST += bh * R
    FROM += bh * R
    d = tl.arange(0, BLOCK_D)
    i = tile * T + tl.arange(0, T)
    live = i < L
    group = tl.load(OF + i, mask=live, other=groups)
    about = tl.load(ABOUT + i, mask=live, other=0)
    word = row_words(KEY, bh, i, DROPOUT)
    q = load_rows(Q + b * q_b + h * q_h, i, d, q_l, live, D, BLOCK_D)
    top = tl.load(LSE + i, mask=live, other=float("-inf"))
    total = tl.where(top == float("-inf"), 0.0, 1.0)
    acc = load_rows(OUT, i, d, o_l, live, D, BLOCK_D).to(tl.float32)
    if CAUSAL:
        near = standing(i, group, i, group, about)
        acc, top, total = add_summaries(
            acc, top, total, q, word, KBAR, VBAR, i, about > 0, near, d, threshold, scale, D, BLOCK_D, PRECISION,
            DROPOUT,
        )  # fmt: skip
        for start in range(0, groups, BG):
            g = start + tl.arange(0, BG)
            j, exist, until = earlier_tokens(BEFORE, ABOUT, g, groups)
            far = standing(i, group, j, g, until)
            acc, top, total = add_summaries(
                acc, top, total, q, word, KBAR, VBAR, j, exist, far, d, threshold, scale, D, BLOCK_D, PRECISION,
                DROPOUT,
            )  # fmt: skip
    for start in range(0, R, BR):
        last, readable, allowed = whole_runs(FROM, LAST, start + tl.arange(0, BR), R, L, i, about, CAUSAL)
        acc, top, total = add_summaries(
            acc, top, total, q, word, KBAR, VBAR, last, readable, allowed, d, threshold, scale, D, BLOCK_D, PRECISION,
            DROPOUT,
        )  # fmt: skip
    store_rows(OUT, mean(acc, total), i, d, o_l, live, D, BLOCK_D)
    tl.store(LSE + i, log_normaliser(top, total), mask=live)
