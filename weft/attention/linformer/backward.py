"""Triton kernels: backward pass. No atomics: sums have a fixed order, so results are bitwise reproducible.

ds_ir = p_ir (dout_i · v'_r - Σ_s p_is dout_i · v'_s) / √D
dq_i = Σ_r ds_ir k'_r,  dk'_r = Σ_i ds_ir q_i,  dv'_r = Σ_i p_ir dout_i          `query_gradients`
dk_j = Σ_r F_jr dk'_r,  dv_j = Σ_r F_jr dv'_r,  dF_jr = k_j · dk'_r + v_j · dv'_r   `key_gradients`
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.random import kept, row_words
from ...kernels.rows import load_rows, store_rows
from .forward import probabilities


@triton.jit
def query_gradients(
    Q, SLOTS, KEY, DOUT, DQ, PARTS,
    q_b, q_h, q_l, g_b, g_h, g_l, dq_b, dq_h, dq_l,
    BH, H, L, n, CHUNK, threshold, scale,
    R: tl.constexpr, BLOCK_R: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    PART: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """dq of one chunk of queries, and the chunk's part of the gradients of the slots, in the layout of SLOTS."""
    bh, c = tl.program_id(0) % BH, tl.program_id(0) // BH
    b, h, first = (bh // H).to(tl.int64), (bh % H).to(tl.int64), (c * CHUNK).to(tl.int64)
    r, d = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    Q += b * q_b + h * q_h + first * q_l
    DOUT += b * g_b + h * g_h + first * g_l
    DQ += b * dq_b + h * dq_h + first * dq_l
    SLOTS += (bh // GROUP).to(tl.int64) * PART
    PARTS += (bh.to(tl.int64) * n + c) * PART
    slots_k = load_rows(SLOTS, r, d, D, r < R, D, BLOCK_D).to(Q.dtype.element_ty)
    slots_v = load_rows(SLOTS + R * D, r, d, D, r < R, D, BLOCK_D).to(Q.dtype.element_ty)
    end = tl.minimum(CHUNK, L - c * CHUNK)
    dslots_k = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    dslots_v = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for start in range(0, end, ROWS):
        i = start + tl.arange(0, ROWS)
        live = i < end
        q = load_rows(Q, i, d, q_l, live, D, BLOCK_D)
        dout = load_rows(DOUT, i, d, g_l, live, D, BLOCK_D)
        p = probabilities(q, slots_k, r, scale, R, PRECISION)
        factor = kept(row_words(KEY, bh, c * CHUNK + i, DROPOUT)[:, None], r[None, :], threshold, DROPOUT)
        dp = tl.dot(dout, tl.trans(slots_v), input_precision=PRECISION) * factor
        ds = (p * (dp - tl.sum(p * dp, 1)[:, None]) * scale).to(q.dtype)
        store_rows(DQ, tl.dot(ds, slots_k, input_precision=PRECISION), i, d, dq_l, live, D, BLOCK_D)
        dslots_k = tl.dot(tl.trans(ds), q, dslots_k, input_precision=PRECISION)
        dslots_v = tl.dot(tl.trans((p * factor).to(q.dtype)), dout, dslots_v, input_precision=PRECISION)
    store_rows(PARTS, dslots_k, r, d, D, r < R, D, BLOCK_D)
    store_rows(PARTS + R * D, dslots_v, r, d, D, r < R, D, BLOCK_D)


@triton.jit
def key_gradients(
    K, V, F, DSLOTS, DK, DV, PARTS,
    k_b, k_h, k_l, v_b, v_h, v_l, f_l, dk_b, dk_h, dk_l, dv_b, dv_h, dv_l,
    BH, H, L, S, LONGEST,
    R: tl.constexpr, BLOCK_R: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    PART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of positions for every S-th head. PARTS is (S, LONGEST, R), float32: the parts of dF, 0 from L on."""
    s, first = tl.program_id(0) % S, (tl.program_id(0) // S * ROWS).to(tl.int64)
    j, r, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    live = first + j < L
    f = load_rows(F + first * f_l, j, r, f_l, live, R, BLOCK_R).to(K.dtype.element_ty)
    df = tl.zeros([ROWS, BLOCK_R], tl.float32)
    heads = tl.where(first < L, BH, 0)
    bh = s.to(tl.int64)
    for _ in range(s, heads, S):
        b, h = bh // H, bh % H
        k = load_rows(K + b * k_b + h * k_h + first * k_l, j, d, k_l, live, D, BLOCK_D)
        v = load_rows(V + b * v_b + h * v_h + first * v_l, j, d, v_l, live, D, BLOCK_D)
        at = DSLOTS + bh * PART
        dslots_k = load_rows(at, r, d, D, r < R, D, BLOCK_D).to(k.dtype)
        dslots_v = load_rows(at + R * D, r, d, D, r < R, D, BLOCK_D).to(k.dtype)
        dk = tl.dot(f, dslots_k, input_precision=PRECISION)
        dv = tl.dot(f, dslots_v, input_precision=PRECISION)
        store_rows(DK + b * dk_b + h * dk_h + first * dk_l, dk, j, d, dk_l, live, D, BLOCK_D)
        store_rows(DV + b * dv_b + h * dv_h + first * dv_l, dv, j, d, dv_l, live, D, BLOCK_D)
        df = tl.dot(k, tl.trans(dslots_k), df, input_precision=PRECISION)
        df = tl.dot(v, tl.trans(dslots_v), df, input_precision=PRECISION)
        bh += S
    PARTS += (s.to(tl.int64) * LONGEST + first) * R
    store_rows(PARTS, df, j, r, R, first + j < LONGEST, R, BLOCK_R)
