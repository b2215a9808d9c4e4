"""Triton kernel: backward pass of attention within blocks that fit into one tile. One pass computes all gradients.

    delta_i = Σ_d dout_id out_id        p_ij = exp2(s_ij − lse_i)        ds_ij = p_ij (dout_i · v_j − delta_i)
    dq = ds k / √D                      dk = dsᵀ q / √D                  dv = pᵀ dout

Each tensor is read once and written once. `backward.py`, for longer blocks, reads them twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..random import kept, row_words
from ..rows import load_rows, place, store_rows, valid_rows


@triton.jit
def block_gradients(
    Q, K, V, MASK, TABLE, KEY, OUT, DOUT, LSE, DQ, DK, DV,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, g_b, g_h, g_l, o_b, o_h, o_l,
    dq_b, dq_h, dq_l, dk_b, dk_h, dk_l, dv_b, dv_h, dv_l,
    BH, H, L, m, threshold, scale, logit_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
    PRECISION: tl.constexpr, DROPOUT: tl.constexpr, GROUP: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    b, h, bh, first, end = place(TABLE, tl.program_id(0) % BH, tl.program_id(0) // BH, H, L, m, PACKED)
    at = first.to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    row = tl.arange(0, ROWS)
    live = row < end
    real = valid_rows(MASK + b * L + first, row, live, HAS_MASK)
    q = load_rows(Q + b * q_b + h * q_h + at * q_l, row, d, q_l, live, D, BLOCK_D)
    k = load_rows(K + b * k_b + h // GROUP * k_h + at * k_l, row, d, k_l, real, D, BLOCK_D)
    v = load_rows(V + b * v_b + h // GROUP * v_h + at * v_l, row, d, v_l, real, D, BLOCK_D)
    dout = load_rows(DOUT + b * g_b + h * g_h + at * g_l, row, d, g_l, live, D, BLOCK_D)
    out = load_rows(OUT + b * o_b + h * o_h + at * o_l, row, d, o_l, live, D, BLOCK_D)
    lse = tl.load(LSE + bh * L + first + row, mask=live, other=float("inf"))  # no query: no probability
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    allowed = real[None, :]
    if CAUSAL:
        allowed = allowed & (row[None, :] <= row[:, None])
    p = tl.where(allowed, tl.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale - lse[:, None]), 0.0)
    factor = kept(row_words(KEY, bh, first + row, DROPOUT)[:, None], (first + row)[None, :], threshold, DROPOUT)
    dv = tl.dot(tl.trans((p * factor).to(dout.dtype)), dout, input_precision=PRECISION)
    store_rows(DV + b * dv_b + h * dv_h + at * dv_l, dv, row, d, dv_l, live, D, BLOCK_D)
    dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION) * factor
    ds = (p * (dp - delta[:, None])).to(q.dtype)
    dq = tl.dot(ds, k, input_precision=PRECISION) * logit_scale
    store_rows(DQ + b * dq_b + h * dq_h + at * dq_l, dq, row, d, dq_l, live, D, BLOCK_D)
    dk = tl.dot(tl.trans(ds), q, input_precision=PRECISION) * logit_scale
    store_rows(DK + b * dk_b + h * dk_h + at * dk_l, dk, row, d, dk_l, live, D, BLOCK_D)
