"""Triton kernels: backward pass. No atomics: sums have a fixed order, so results are bitwise reproducible.

    delta_i = Σ_d dout_id out_id        p_ij = exp2(s_ij − lse_i)        ds_ij = p_ij (dout_i · v_j − delta_i)
    dq_i = Σ_j ds_ij k_j / √D           dk_j = Σ_i ds_ij q_i / √D        dv_j = Σ_i p_ij dout_i

With MORE, gradients are added to those of an earlier order. With SHARED, k_j = q_j / |q_j|, and the gradient of q_j as
a key is added to its gradient as a query:

    dq_j += (dk_j − k_j (k_j · dk_j)) / |q_j|
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..random import kept, row_words
from ..rows import load_rows, store_rows
from ..softmax import add_to_dk_dv
from .forward import asking_slots, bounds, seen_slots, sees


@triton.jit
def query_gradients(
    Q, K, V, INV, ORDER, GROUP, START, KEY, OUT, DOUT, LSE, DELTA, DQ,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, o_b, o_h, o_l, g_b, g_h, g_l, dq_b, dq_h, dq_l,
    H, L, groups, size, threshold, earlier, scale, logit_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    BACK: tl.constexpr, CAUSAL: tl.constexpr, OTHERS: tl.constexpr, SHARED: tl.constexpr, MORE: tl.constexpr,
    PRECISION: tl.constexpr, HEADS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """dq, and DELTA unless MORE."""
    tiles = (L + BQ - 1) // BQ
    bh = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = bh // H, bh % H
    K += b * k_b + (h if SHARED else h // HEADS) * k_h
    V += b * v_b + h // HEADS * v_h
    DQ += b * dq_b + h * dq_h
    ORDER += bh * L
    GROUP += bh * L
    START += bh * (groups + 1)
    d = tl.arange(0, BLOCK_D)
    s = tl.program_id(0) % tiles * BQ + tl.arange(0, BQ)
    live = s < L
    token = tl.load(ORDER + s, mask=live, other=0)
    low, high = seen_slots(s, live, GROUP, START, groups, size, BACK, CAUSAL)
    q = load_rows(Q + b * q_b + h * q_h, token, d, q_l, live, D, BLOCK_D)
    dout = load_rows(DOUT + b * g_b + h * g_h, token, d, g_l, live, D, BLOCK_D)
    lse = tl.load(LSE + bh * L + token, mask=live, other=0.0)
    word = row_words(KEY, earlier + bh, token, DROPOUT)
    if MORE:
        delta = tl.load(DELTA + bh * L + token, mask=live, other=0.0)
        dq = load_rows(DQ, token, d, dq_l, live, D, BLOCK_D).to(tl.float32) / logit_scale
    else:
        out = load_rows(OUT + b * o_b + h * o_h, token, d, o_l, live, D, BLOCK_D).to(tl.float32)
        delta = tl.sum(out * dout.to(tl.float32), 1)
        tl.store(DELTA + bh * L + token, delta, mask=live)
        dq = tl.zeros([BQ, BLOCK_D], tl.float32)
    start, stop = bounds(low, high)
    for begin in range(start, stop, BK):
        j = begin + tl.arange(0, BK)
        key = tl.load(ORDER + j, mask=j < stop, other=0)
        k = load_rows(K, key, d, k_l, j < stop, D, BLOCK_D)
        v = load_rows(V, key, d, v_l, j < stop, D, BLOCK_D)
        allowed = sees(s[:, None], low[:, None], high[:, None], j[None, :], OTHERS)
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SHARED:
            inv = tl.load(INV + bh * L + key, mask=j < stop, other=0.0)[None, :]
            x *= inv
        p = tl.where(allowed, tl.exp2(x * scale - lse[:, None]), 0.0)
        dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
        dp *= kept(word[:, None], key[None, :], threshold, DROPOUT)
        ds = p * (dp - delta[:, None])
        if SHARED:
            ds *= inv
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_rows(DQ, dq * logit_scale, token, d, dq_l, live, D, BLOCK_D)


@triton.jit
def key_gradients(
    Q, K, V, INV, ORDER, GROUP, START, KEY, DOUT, LSE, DELTA, DK, DV,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, g_b, g_h, g_l, dk_b, dk_h, dk_l, dv_b, dv_h, dv_l,
    H, L, groups, size, threshold, earlier, scale, logit_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    BACK: tl.constexpr, CAUSAL: tl.constexpr, OTHERS: tl.constexpr, SHARED: tl.constexpr, MORE: tl.constexpr,
    PRECISION: tl.constexpr, HEADS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    tiles = (L + BK - 1) // BK
    bh = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = bh // H, bh % H
    Q += b * q_b + h * q_h
    DOUT += b * g_b + h * g_h
    DK += b * dk_b + h * dk_h
    DV += b * dv_b + h * dv_h
    LSE += bh * L
    DELTA += bh * L
    ORDER += bh * L
    GROUP += bh * L
    START += bh * (groups + 1)
    d = tl.arange(0, BLOCK_D)
    j = tl.program_id(0) % tiles * BK + tl.arange(0, BK)
    live = j < L
    token = tl.load(ORDER + j, mask=live, other=0)
    first, last = asking_slots(j, live, GROUP, START, groups, size, BACK, CAUSAL)
    K += b * k_b + (h if SHARED else h // HEADS) * k_h
    k = load_rows(K, token, d, k_l, live, D, BLOCK_D)
    v = load_rows(V + b * v_b + h // HEADS * v_h, token, d, v_l, live, D, BLOCK_D)
    dk = tl.zeros([BK, BLOCK_D], tl.float32)
    dv = tl.zeros([BK, BLOCK_D], tl.float32)
    inv = tl.load(INV + bh * L + token, mask=live, other=0.0) if SHARED else tl.zeros([BK], tl.float32)
    start, stop = bounds(first, last)
    for begin in range(start, stop, BQ):
        s = begin + tl.arange(0, BQ)
        allowed = (first[:, None] <= s[None, :]) & (s[None, :] < last[:, None])
        if OTHERS:
            low, high = seen_slots(s, s < stop, GROUP, START, groups, size, BACK, CAUSAL)
            allowed = allowed & ((s[None, :] != j[:, None]) | (high - low == 1)[None, :])
        asking = tl.load(ORDER + s, mask=s < stop, other=0)
        q = load_rows(Q, asking, d, q_l, s < stop, D, BLOCK_D)
        dout = load_rows(DOUT, asking, d, g_l, s < stop, D, BLOCK_D)
        lse = tl.load(LSE + asking, mask=s < stop, other=0.0)
        delta = tl.load(DELTA + asking, mask=s < stop, other=0.0)
        x = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        if SHARED:
            x *= inv[:, None]
        p = tl.where(allowed, tl.exp2(x * scale - lse[None, :]), 0.0)
        word = row_words(KEY, earlier + bh, asking, DROPOUT)
        factor = kept(word[None, :], token[:, None], threshold, DROPOUT)
        dk, dv = add_to_dk_dv(dk, dv, p, factor, v, q, dout, delta, PRECISION)
    dk *= logit_scale
    if SHARED:
        unit = load_rows(K, token, d, k_l, live, D, BLOCK_D).to(tl.float32) * inv[:, None]
        dk = (dk - unit * tl.sum(unit * dk, 1)[:, None]) * inv[:, None]
    if SHARED or MORE:
        dk += load_rows(DK, token, d, dk_l, live, D, BLOCK_D).to(tl.float32)
    if MORE:
        dv += load_rows(DV, token, d, dv_l, live, D, BLOCK_D).to(tl.float32)
    store_rows(DK, dk, token, d, dk_l, live, D, BLOCK_D)
    store_rows(DV, dv, token, d, dv_l, live, D, BLOCK_D)
