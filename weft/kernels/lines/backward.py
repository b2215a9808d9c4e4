"""Triton kernels: backward pass of attention along the lines of a grid. See `forward.py` for lines, cells and rules.

    ds_ij = p_ij (dout_i · v_j - delta_i)      dq_i = Σ_j ds_ij k_j
    dk_j  = Σ_i ds_ij q_i                      dv_j = Σ_i p_ij dout_i

Every part needs only the final LSE and delta_i = dout_i · out_i, and adds to the gradients of earlier parts (MORE). No
atomics: sums have a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..random import kept, row_words
from ..rows import load_rows, store_rows, valid_rows
from ..softmax import add_to_dk_dv, probabilities
from .forward import cells_before, place, sees


@triton.jit
def query_gradients(
    Q, K, V, FLAGS, KEY, OUT, DOUT, LSE, DELTA, DQ,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, o_b, o_h, o_l, g_b, g_h, g_l, dq_b, dq_h, dq_l, f_b,
    BH, H, queries, keys, cells, line_step, cell_step, threshold, scale, logit_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    RULE: tl.constexpr, HAS_FLAGS: tl.constexpr, MORE: tl.constexpr, KNOWN: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr, DROPOUT: tl.constexpr, SOURCE: tl.constexpr,
):  # fmt: skip
    """Unless KNOWN, it also computes delta."""
    bh, b, h, line, q_first = place(BH, H, cells, BQ)
    first = line * line_step
    Q += b * q_b + h * q_h + first.to(tl.int64) * q_l
    K += b * k_b + h // GROUP * k_h + first.to(tl.int64) * k_l
    V += b * v_b + h // GROUP * v_h + first.to(tl.int64) * v_l
    DOUT += b * g_b + h * g_h + first.to(tl.int64) * g_l
    DQ += b * dq_b + h * dq_h + first.to(tl.int64) * dq_l
    LSE += bh * queries + first
    DELTA += bh * queries + first
    FLAGS += b * f_b + first
    end = cells_before(keys, first, cells, cell_step)
    d = tl.arange(0, BLOCK_D)
    i = q_first + tl.arange(0, BQ)
    live = i < cells_before(queries, first, cells, cell_step)
    q = load_rows(Q, i, d, cell_step * q_l, live, D, BLOCK_D)
    dout = load_rows(DOUT, i, d, cell_step * g_l, live, D, BLOCK_D)
    lse = tl.load(LSE + i * cell_step, mask=live, other=0.0)
    word = row_words(KEY, bh, first + i * cell_step, DROPOUT)
    if KNOWN:
        delta = tl.load(DELTA + i * cell_step, mask=live, other=0.0)
    else:
        OUT += b * o_b + h * o_h + first.to(tl.int64) * o_l
        out = load_rows(OUT, i, d, cell_step * o_l, live, D, BLOCK_D)
        delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
        tl.store(DELTA + i * cell_step, delta, mask=live)
    dq = tl.zeros([BQ, BLOCK_D], tl.float32)
    LOOKS_BACK: tl.constexpr = RULE == "up_to" or RULE == "before" or RULE == "well_before"
    start = q_first // BK * BK if RULE == "after" else 0
    if LOOKS_BACK:
        end = tl.minimum(end, q_first + BQ)
    for begin in range(start, end, BK):
        j = begin + tl.arange(0, BK)
        real = valid_rows(FLAGS, j * cell_step, j < end, HAS_FLAGS)
        k = load_rows(K, j, d, cell_step * k_l, real, D, BLOCK_D)
        v = load_rows(V, j, d, cell_step * v_l, real, D, BLOCK_D)
        allowed = sees(i[:, None], j[None, :], RULE) & real[None, :]
        p = probabilities(q, k, lse[:, None], allowed, scale, PRECISION)
        dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
        dp *= kept(word[:, None], (SOURCE * keys + first + j * cell_step)[None, :], threshold, DROPOUT)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    dq *= logit_scale
    if MORE:
        dq += load_rows(DQ, i, d, cell_step * dq_l, live, D, BLOCK_D).to(tl.float32)
    store_rows(DQ, dq, i, d, cell_step * dq_l, live, D, BLOCK_D)


@triton.jit
def key_gradients(
    Q, K, V, FLAGS, KEY, DOUT, LSE, DELTA, DK, DV, PRODUCTS,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, g_b, g_h, g_l, dk_b, dk_h, dk_l, dv_b, dv_h, dv_l, f_b,
    BH, H, queries, keys, cells, line_step, cell_step, threshold, scale, logit_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    RULE: tl.constexpr, HAS_FLAGS: tl.constexpr, MORE: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr, DROPOUT: tl.constexpr, SOURCE: tl.constexpr,
):  # fmt: skip
    """KEEP stores PRODUCTS_j = dk_j · k_j + dv_j · v_j, the delta of keys and values that are summaries."""
    bh, b, h, line, k_first = place(BH, H, cells, BK)
    first = line * line_step
    Q += b * q_b + h * q_h + first.to(tl.int64) * q_l
    K += b * k_b + h // GROUP * k_h + first.to(tl.int64) * k_l
    V += b * v_b + h // GROUP * v_h + first.to(tl.int64) * v_l
    DOUT += b * g_b + h * g_h + first.to(tl.int64) * g_l
    DK += b * dk_b + h * dk_h + first.to(tl.int64) * dk_l
    DV += b * dv_b + h * dv_h + first.to(tl.int64) * dv_l
    LSE += bh * queries + first
    DELTA += bh * queries + first
    FLAGS += b * f_b + first
    end = cells_before(queries, first, cells, cell_step)
    d = tl.arange(0, BLOCK_D)
    j = k_first + tl.arange(0, BK)
    inside = j < cells_before(keys, first, cells, cell_step)
    real = valid_rows(FLAGS, j * cell_step, inside, HAS_FLAGS)
    k = load_rows(K, j, d, cell_step * k_l, real, D, BLOCK_D)
    v = load_rows(V, j, d, cell_step * v_l, real, D, BLOCK_D)
    dk = tl.zeros([BK, BLOCK_D], tl.float32)
    dv = tl.zeros([BK, BLOCK_D], tl.float32)
    LOOKS_BACK: tl.constexpr = RULE == "up_to" or RULE == "before" or RULE == "well_before"
    start = k_first // BQ * BQ if LOOKS_BACK else 0
    if RULE == "after":
        end = tl.minimum(end, k_first + BK)
    for begin in range(start, end, BQ):
        i = begin + tl.arange(0, BQ)
        live = i < end
        q = load_rows(Q, i, d, cell_step * q_l, live, D, BLOCK_D)
        dout = load_rows(DOUT, i, d, cell_step * g_l, live, D, BLOCK_D)
        lse = tl.load(LSE + i * cell_step, mask=live, other=0.0)
        delta = tl.load(DELTA + i * cell_step, mask=live, other=0.0)
        allowed = sees(i[None, :], j[:, None], RULE)
        if HAS_FLAGS:  # nothing is written past the end of the line, so no other masking is needed
            allowed = allowed & real[:, None]
        p = probabilities(k, q, lse[None, :], allowed, scale, PRECISION)
        word = row_words(KEY, bh, first + i * cell_step, DROPOUT)
        factor = kept(word[None, :], (SOURCE * keys + first + j * cell_step)[:, None], threshold, DROPOUT)
        dk, dv = add_to_dk_dv(dk, dv, p, factor, v, q, dout, delta, PRECISION)
    dk *= logit_scale
    if KEEP:
        products = tl.sum(dk * k.to(tl.float32) + dv * v.to(tl.float32), 1)
        tl.store(PRODUCTS + bh * keys + first + j * cell_step, products, mask=inside)
    if MORE:
        dk += load_rows(DK, j, d, cell_step * dk_l, inside, D, BLOCK_D).to(tl.float32)
        dv += load_rows(DV, j, d, cell_step * dv_l, inside, D, BLOCK_D).to(tl.float32)
    store_rows(DK, dk, j, d, cell_step * dk_l, inside, D, BLOCK_D)
    store_rows(DV, dv, j, d, cell_step * dv_l, inside, D, BLOCK_D)
