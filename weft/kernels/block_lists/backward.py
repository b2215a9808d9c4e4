"""Triton kernels: backward pass. No atomics: sums have a fixed order, so results are bitwise reproducible.

    delta_i = Σ_d dout_id out_id        p_ij = exp2(s_ij − lse_i)        ds_ij = p_ij (dout_i · v_j − delta_i)
    dq_i = Σ_j ds_ij k_j / √D           dk_j = Σ_i ds_ij q_i / √D        dv_j = Σ_i p_ij dout_i

`key_gradients` reads the transposed lists: for each block of keys, the query blocks that attend to it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..random import kept, row_words
from ..rows import load_rows, store_rows, valid_rows
from ..softmax import add_to_dk_dv, probabilities
from .forward import list_of, listed, place


@triton.jit
def query_gradients(
    Q, K, V, MASK, TABLE, KEY, OUT, DOUT, LSE, DELTA, DQ,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, o_b, o_h, o_l, g_b, g_h, g_l, dq_b, dq_h, dq_l,
    BH, H, L, n, m, entries, threshold, scale, logit_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, HAS_MASK: tl.constexpr,
    PRECISION: tl.constexpr, GROUP: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """dq and DELTA."""
    bh, b, h, block, first = place(BH, H, n, m, BQ)
    K += b * k_b + h // GROUP * k_h
    V += b * v_b + h // GROUP * v_h
    MASK += b * L
    d = tl.arange(0, BLOCK_D)
    i = first + tl.arange(0, BQ)
    live = (i < m) & (block * m + i < L)
    i += block * m
    q = load_rows(Q + b * q_b + h * q_h, i, d, q_l, live, D, BLOCK_D)
    dout = load_rows(DOUT + b * g_b + h * g_h, i, d, g_l, live, D, BLOCK_D)
    out = load_rows(OUT + b * o_b + h * o_h, i, d, o_l, live, D, BLOCK_D)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    tl.store(DELTA + bh * L + i, delta, mask=live)
    lse = tl.load(LSE + bh * L + i, mask=live, other=0.0)
    word = row_words(KEY, bh, i, DROPOUT)
    dq = tl.zeros([BQ, BLOCK_D], tl.float32)
    start, stop = list_of(TABLE, h, block, m, entries, BK)
    for t in range(start, stop):
        j, real = listed(t, TABLE, h, n, m, entries, L, BK)
        real = valid_rows(MASK, j, real, HAS_MASK)
        k = load_rows(K, j, d, k_l, real, D, BLOCK_D)
        v = load_rows(V, j, d, v_l, real, D, BLOCK_D)
        p = probabilities(q, k, lse[:, None], real[None, :], scale, PRECISION)
        dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
        dp *= kept(word[:, None], j[None, :], threshold, DROPOUT)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_rows(DQ + b * dq_b + h * dq_h, dq * logit_scale, i, d, dq_l, live, D, BLOCK_D)


@triton.jit
def key_gradients(
    Q, K, V, MASK, TABLE, KEY, DOUT, LSE, DELTA, DK, DV,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, g_b, g_h, g_l, dk_b, dk_h, dk_l, dv_b, dv_h, dv_l,
    BH, H, L, n, m, entries, threshold, scale, logit_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, HAS_MASK: tl.constexpr,
    PRECISION: tl.constexpr, GROUP: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    bh, b, h, block, first = place(BH, H, n, m, BK)
    Q += b * q_b + h * q_h
    DOUT += b * g_b + h * g_h
    LSE += bh * L
    DELTA += bh * L
    d = tl.arange(0, BLOCK_D)
    j = first + tl.arange(0, BK)
    inside = (j < m) & (block * m + j < L)
    j += block * m
    real = valid_rows(MASK + b * L, j, inside, HAS_MASK)
    k = load_rows(K + b * k_b + h // GROUP * k_h, j, d, k_l, real, D, BLOCK_D)
    v = load_rows(V + b * v_b + h // GROUP * v_h, j, d, v_l, real, D, BLOCK_D)
    dk = tl.zeros([BK, BLOCK_D], tl.float32)
    dv = tl.zeros([BK, BLOCK_D], tl.float32)
    start, stop = list_of(TABLE, h, block, m, entries, BQ)
    for t in range(start, stop):
        i, live = listed(t, TABLE, h, n, m, entries, L, BQ)
        q = load_rows(Q, i, d, q_l, live, D, BLOCK_D)
        dout = load_rows(DOUT, i, d, g_l, live, D, BLOCK_D)
        lse = tl.load(LSE + i, mask=live, other=float("inf"))  # no query: no probability
        delta = tl.load(DELTA + i, mask=live, other=0.0)
        p = probabilities(k, q, lse[None, :], real[:, None], scale, PRECISION)
        word = row_words(KEY, bh, i, DROPOUT)
        factor = kept(word[None, :], j[:, None], threshold, DROPOUT)
        dk, dv = add_to_dk_dv(dk, dv, p, factor, v, q, dout, delta, PRECISION)
    store_rows(DK + b * dk_b + h * dk_h, dk * logit_scale, j, d, dk_l, inside, D, BLOCK_D)
    store_rows(DV + b * dv_b + h * dv_h, dv, j, d, dv_l, inside, D, BLOCK_D)
