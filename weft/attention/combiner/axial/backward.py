"""Triton kernels: backward pass of the rows of `combiner-axial`. See `forward.py` for s, α and the summaries.

    da_ij   = α_ij (dvbar_i · v_j + dkbar_i · k_j - Δ_i)     Δ_i = dvbar_i · vbar_i + dkbar_i · kbar_i
    ds_ij   = p_ij (f_ij dout_i · v_j - delta_i) + da_ij     p only for j ≤ i; f: the factor of dropout
    dq_i   += Σ_j ds_ij k_j
    dk_j    = Σ_i ds_ij q_i + α_ij dkbar_i       dv_j = Σ_i p_ij f_ij dout_i + α_ij dvbar_i

The column kernel runs first. It computes the first part of dq, and delta, dkbar, dvbar and Δ (PRODUCTS).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....kernels.lines.forward import place
from ....kernels.random import kept, row_words
from ....kernels.rows import load_rows, store_rows, valid_rows


@triton.jit
def row_query_gradients(
    Q, K, V, MASK, KEY, DOUT, DKBAR, DVBAR, LOCAL, PRODUCTS, LSE, DELTA, DQ,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, g_b, g_h, g_l, s_b, s_h, s_l, dq_b, dq_h, dq_l,
    BH, H, L, n, m, threshold, scale, logit_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
    DROPOUT: tl.constexpr,
):  # fmt: skip
    """Adds to DQ, which the column kernel has written."""
    bh, b, h, row, q_first = place(BH, H, m, BQ)
    first = row * m
    Q += b * q_b + h * q_h + first.to(tl.int64) * q_l
    K += b * k_b + h // GROUP * k_h + first.to(tl.int64) * k_l
    V += b * v_b + h // GROUP * v_h + first.to(tl.int64) * v_l
    DOUT += b * g_b + h * g_h + first.to(tl.int64) * g_l
    DKBAR += b * s_b + h * s_h + first.to(tl.int64) * s_l
    DVBAR += b * s_b + h * s_h + first.to(tl.int64) * s_l
    DQ += b * dq_b + h * dq_h + first.to(tl.int64) * dq_l
    MASK += b * L + first
    end = tl.minimum(m, L - first)
    d = tl.arange(0, BLOCK_D)
    i = q_first + tl.arange(0, BQ)
    live = i < end
    q = load_rows(Q, i, d, q_l, live, D, BLOCK_D)
    dout = load_rows(DOUT, i, d, g_l, live, D, BLOCK_D)
    dkbar = load_rows(DKBAR, i, d, s_l, live, D, BLOCK_D)
    dvbar = load_rows(DVBAR, i, d, s_l, live, D, BLOCK_D)
    lse = tl.load(LSE + bh * L + first + i, mask=live, other=0.0)
    delta = tl.load(DELTA + bh * L + first + i, mask=live, other=0.0)
    local = tl.load(LOCAL + bh * n * m + first + i, mask=live, other=0.0)
    products = tl.load(PRODUCTS + bh * n * m + first + i, mask=live, other=0.0)
    word = row_words(KEY, bh, first + i, DROPOUT)
    dq = tl.zeros([BQ, BLOCK_D], tl.float32)
    for begin in range(0, end, BK):
        j = begin + tl.arange(0, BK)
        real = valid_rows(MASK, j, j < end, HAS_MASK)
        k = load_rows(K, j, d, k_l, real, D, BLOCK_D)
        v = load_rows(V, j, d, v_l, real, D, BLOCK_D)
        logit = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        dalpha = tl.dot(dvbar, tl.trans(v), input_precision=PRECISION)
        dalpha = tl.dot(dkbar, tl.trans(k), dalpha, input_precision=PRECISION)
        ds = tl.where(real[None, :], tl.exp2(logit - local[:, None]) * (dalpha - products[:, None]), 0.0)
        allowed = real[None, :]
        if CAUSAL:
            allowed = allowed & (j[None, :] <= i[:, None])
        dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
        dp *= kept(word[:, None], (first + j)[None, :], threshold, DROPOUT)
        ds += tl.where(allowed, tl.exp2(logit - lse[:, None]) * (dp - delta[:, None]), 0.0)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    dq = dq * logit_scale + load_rows(DQ, i, d, dq_l, live, D, BLOCK_D).to(tl.float32)
    store_rows(DQ, dq, i, d, dq_l, live, D, BLOCK_D)


@triton.jit
def row_key_gradients(
    Q, K, V, MASK, KEY, DOUT, DKBAR, DVBAR, LOCAL, PRODUCTS, LSE, DELTA, DK, DV,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, g_b, g_h, g_l, s_b, s_h, s_l, dk_b, dk_h, dk_l, dv_b, dv_h, dv_l,
    BH, H, L, n, m, threshold, scale, logit_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
    DROPOUT: tl.constexpr,
):  # fmt: skip
    bh, b, h, row, k_first = place(BH, H, m, BK)
    first = row * m
    Q += b * q_b + h * q_h + first.to(tl.int64) * q_l
    K += b * k_b + h // GROUP * k_h + first.to(tl.int64) * k_l
    V += b * v_b + h // GROUP * v_h + first.to(tl.int64) * v_l
    DOUT += b * g_b + h * g_h + first.to(tl.int64) * g_l
    DKBAR += b * s_b + h * s_h + first.to(tl.int64) * s_l
    DVBAR += b * s_b + h * s_h + first.to(tl.int64) * s_l
    DK += b * dk_b + h * dk_h + first.to(tl.int64) * dk_l
    DV += b * dv_b + h * dv_h + first.to(tl.int64) * dv_l
    MASK += b * L + first
    LSE += bh * L + first
    DELTA += bh * L + first
    LOCAL += bh * n * m + first
    PRODUCTS += bh * n * m + first
    end = tl.minimum(m, L - first)
    d = tl.arange(0, BLOCK_D)
    j = k_first + tl.arange(0, BK)
    real = valid_rows(MASK, j, j < end, HAS_MASK)
    k = load_rows(K, j, d, k_l, real, D, BLOCK_D)
    v = load_rows(V, j, d, v_l, real, D, BLOCK_D)
    dk = tl.zeros([BK, BLOCK_D], tl.float32)
    dv = tl.zeros([BK, BLOCK_D], tl.float32)
    root = 1.0 / logit_scale
    for begin in range(0, m, BQ):
        i = begin + tl.arange(0, BQ)
        live = i < end
        q = load_rows(Q, i, d, q_l, live, D, BLOCK_D)
        dout = load_rows(DOUT, i, d, g_l, live, D, BLOCK_D)
        dkbar = load_rows(DKBAR, i, d, s_l, i < m, D, BLOCK_D)
        dvbar = load_rows(DVBAR, i, d, s_l, i < m, D, BLOCK_D)
        lse = tl.load(LSE + i, mask=live, other=0.0)
        delta = tl.load(DELTA + i, mask=live, other=0.0)
        local = tl.load(LOCAL + i, mask=i < m, other=0.0)
        products = tl.load(PRODUCTS + i, mask=i < m, other=0.0)
        logit = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale
        alpha = tl.exp2(logit - local[None, :])
        p = tl.exp2(logit - lse[None, :])
        if CAUSAL:
            p = tl.where(j[:, None] <= i[None, :], p, 0.0)
        if HAS_MASK:  # nothing is written past the end of the row, so no other masking is needed
            alpha, p = tl.where(real[:, None], alpha, 0.0), tl.where(real[:, None], p, 0.0)
        dv = tl.dot(alpha.to(v.dtype), dvbar, dv, input_precision=PRECISION)
        dk = tl.dot((alpha * root).to(k.dtype), dkbar, dk, input_precision=PRECISION)
        dalpha = tl.dot(v, tl.trans(dvbar), input_precision=PRECISION)
        dalpha = tl.dot(k, tl.trans(dkbar), dalpha, input_precision=PRECISION)
        ds = alpha * (dalpha - products[None, :])
        factor = kept(row_words(KEY, bh, first + i, DROPOUT)[None, :], (first + j)[:, None], threshold, DROPOUT)
        dv = tl.dot((p * factor).to(dout.dtype), dout, dv, input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION) * factor
        ds += p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    # α dkbar is not the gradient of a logit; it was multiplied by √D to cancel this scale
    store_rows(DK, dk * logit_scale, j, d, dk_l, j < end, D, BLOCK_D)
    store_rows(DV, dv, j, d, dv_l, j < end, D, BLOCK_D)
