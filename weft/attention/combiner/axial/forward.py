"""Triton kernels: forward pass of the rows of `combiner-axial`. Direct attention and row summaries share the logits.

    s_ij   = q_i · k_j       i, j in one row
    out_i  = Σ_{j ≤ i} softmax_j(s_ij) v_j       the direct part; the column kernel adds the rest
    vbar_i = Σ_j α_ij v_j       kbar_i = Σ_j α_ij k_j       α_i = softmax over the whole row

`summarise` first processes the keys up to i and stores the direct part. It then continues the same running softmax with
the keys after i. An empty cell of the last row has query 0, which gives the mean over the row. Dropout applies to the
direct part, which then needs its own sum, and to whole summaries, but not to α.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....kernels.lines.forward import place
from ....kernels.random import kept, row_words
from ....kernels.rows import load_rows, store_rows, valid_rows
from ....kernels.softmax import log_normaliser, mean, no_keys, weigh


@triton.jit
def summarise_tile(
    q, k, v, allowed, kbar, vbar, direct, factor, top, total, scale, PRECISION: tl.constexpr, DROPOUT: tl.constexpr
):  # fmt: skip
    """With DROPOUT, adds to `direct`, the sum of the values with the weights times `factor`."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    p, old, top, total = weigh(s, allowed, top, total, scale)
    if DROPOUT:
        direct = tl.dot((p * factor).to(v.dtype), v, direct * old[:, None], input_precision=PRECISION)
    vbar = tl.dot(p.to(v.dtype), v, vbar * old[:, None], input_precision=PRECISION)
    kbar = tl.dot(p.to(k.dtype), k, kbar * old[:, None], input_precision=PRECISION)
    return kbar, vbar, direct, top, total


@triton.jit
def summarise(
    Q, K, V, MASK, KEY, KBAR, VBAR, LOCAL, OUT, LSE,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, s_b, s_h, s_l, o_b, o_h, o_l,
    BH, H, L, n, m, threshold, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
    DROPOUT: tl.constexpr,
):  # fmt: skip
    bh, b, h, row, q_first = place(BH, H, m, BQ)
    first = row * m
    Q += b * q_b + h * q_h + first.to(tl.int64) * q_l
    K += b * k_b + h // GROUP * k_h + first.to(tl.int64) * k_l
    V += b * v_b + h // GROUP * v_h + first.to(tl.int64) * v_l
    KBAR += b * s_b + h * s_h + first.to(tl.int64) * s_l
    VBAR += b * s_b + h * s_h + first.to(tl.int64) * s_l
    OUT += b * o_b + h * o_h + first.to(tl.int64) * o_l
    MASK += b * L + first
    end = tl.minimum(m, L - first)
    d = tl.arange(0, BLOCK_D)
    i = q_first + tl.arange(0, BQ)
    live = i < end
    word = row_words(KEY, bh, first + i, DROPOUT)
    q = load_rows(Q, i, d, q_l, live, D, BLOCK_D)
    vbar, top, total = no_keys(BQ, BLOCK_D)
    kbar, direct = vbar, vbar
    direct_end = tl.minimum(end, q_first + BQ) if CAUSAL else end
    for begin in range(0, direct_end, BK):
        j = begin + tl.arange(0, BK)
        real = valid_rows(MASK, j, j < end, HAS_MASK)
        k = load_rows(K, j, d, k_l, real, D, BLOCK_D)
        v = load_rows(V, j, d, v_l, real, D, BLOCK_D)
        allowed = real[None, :]
        if CAUSAL:
            allowed = allowed & (j[None, :] <= i[:, None])
        factor = kept(word[:, None], (first + j)[None, :], threshold, DROPOUT)
        kbar, vbar, direct, top, total = summarise_tile(
            q, k, v, allowed, kbar, vbar, direct, factor, top, total, scale, PRECISION, DROPOUT
        )
    store_rows(OUT, mean(direct if DROPOUT else vbar, total), i, d, o_l, live, D, BLOCK_D)
    tl.store(LSE + bh * L + first + i, log_normaliser(top, total), mask=live)
    if CAUSAL:
        for begin in range(q_first // BK * BK, end, BK):
            j = begin + tl.arange(0, BK)
            real = valid_rows(MASK, j, j < end, HAS_MASK)
            k = load_rows(K, j, d, k_l, real, D, BLOCK_D)
            v = load_rows(V, j, d, v_l, real, D, BLOCK_D)
            allowed = real[None, :] & (j[None, :] > i[:, None])
            kbar, vbar, _, top, total = summarise_tile(
                q, k, v, allowed, kbar, vbar, direct, 1.0, top, total, scale, PRECISION, False
            )
    store_rows(KBAR, mean(kbar, total), i, d, s_l, i < m, D, BLOCK_D)
    store_rows(VBAR, mean(vbar, total), i, d, s_l, i < m, D, BLOCK_D)
    tl.store(LOCAL + bh * n * m + first + i, log_normaliser(top, total), mask=i < m)
