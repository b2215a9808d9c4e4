"""Triton kernels: backward pass. No atomics: sums have a fixed order, so results are bitwise reproducible.

    dR_ij = Σ_slots (dk~_i · k_j + dv~_i · v_j)        dlogits_ij = R_ij (dR_ij − Σ_j' R_ij' dR_ij')
    dsums = dlogits sortᵀ                              dsort = Σ_heads sumsᵀ dlogits

`mix_blocks` adds Rᵀ dk~ + dsums to dk, and Rᵀ dv~ to dv.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..rows import load_rows, store_rows
from .forward import block_weights, dropped, sort_columns, tile_of_blocks


@triton.jit
def softmax_gradients(q, k, v, dout, allowed, factor, scale, logit_scale, PRECISION: tl.constexpr):
    """dq, dk and dv of (softmax(q kᵀ / √D) · factor) v."""
    p = block_weights(q, k, allowed, scale, PRECISION)
    dv = tl.dot(tl.trans((p * factor).to(dout.dtype)), dout, input_precision=PRECISION)
    dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION) * factor
    ds = (p * (dp - tl.sum(p * dp, 1)[:, None])).to(q.dtype)
    dk = tl.dot(tl.trans(ds), q, input_precision=PRECISION) * logit_scale
    return tl.dot(ds, k, input_precision=PRECISION) * logit_scale, dk, dv


@triton.jit
def block_gradients(
    Q, K, V, SORTED_K, SORTED_V, MASK, SLOTS, KEY, DOUT, DQ, DK, DV, DSORTED_K, DSORTED_V,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, s_b, s_h, s_l, g_b, g_h, g_l,
    dq_b, dq_h, dq_l, dk_b, dk_h, dk_l, dv_b, dv_h, dv_l, ds_b, ds_h, ds_l,
    BH, H, L, n, m, threshold, scale, logit_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_SLOTS: tl.constexpr,
    PRECISION: tl.constexpr, GROUP: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """dk and dv of the own block only; dk~ and dv~; all for each head of q."""
    b, h, i, live, exist, own, others = tile_of_blocks(MASK, SLOTS, BH, H, L, n, m, ROWS, HAS_MASK, HAS_SLOTS)
    factor, others_factor = dropped(KEY, b * H + h, i, n * m, threshold, DROPOUT)
    d = tl.arange(0, BLOCK_D)
    q = load_rows(Q + b * q_b + h * q_h, i, d, q_l, live, D, BLOCK_D)
    dout = load_rows(DOUT + b * g_b + h * g_h, i, d, g_l, live, D, BLOCK_D)
    k = load_rows(K + b * k_b + h // GROUP * k_h, i, d, k_l, live, D, BLOCK_D)
    v = load_rows(V + b * v_b + h // GROUP * v_h, i, d, v_l, live, D, BLOCK_D)
    dq, dk, dv = softmax_gradients(q, k, v, dout, own, factor, scale, logit_scale, PRECISION)
    store_rows(DK + b * dk_b + h * dk_h, dk, i, d, dk_l, live, D, BLOCK_D)
    store_rows(DV + b * dv_b + h * dv_h, dv, i, d, dv_l, live, D, BLOCK_D)
    k = load_rows(SORTED_K + b * s_b + h // GROUP * s_h, i, d, s_l, exist, D, BLOCK_D)
    v = load_rows(SORTED_V + b * s_b + h // GROUP * s_h, i, d, s_l, exist, D, BLOCK_D)
    more, dk, dv = softmax_gradients(q, k, v, dout, others, others_factor, scale, logit_scale, PRECISION)
    store_rows(DQ + b * dq_b + h * dq_h, dq + more, i, d, dq_l, live, D, BLOCK_D)
    store_rows(DSORTED_K + b * ds_b + h * ds_h, dk, i, d, ds_l, exist, D, BLOCK_D)
    store_rows(DSORTED_V + b * ds_b + h * ds_h, dv, i, d, ds_l, exist, D, BLOCK_D)


@triton.jit
def mixture_gradients(
    DSORTED_K, DSORTED_V, K, V, DR,
    s_b, s_h, s_l, k_b, k_h, k_l, v_b, v_h, v_l,
    H, L, n, width, m,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """DR has the shape of R."""
    rows, columns = (n + ROWS - 1) // ROWS, (n + COLUMNS - 1) // COLUMNS
    bh, tile = (tl.program_id(0) // (rows * columns)).to(tl.int64), tl.program_id(0) % (rows * columns)
    b, h = bh // H, bh % H
    i, j = tile // columns * ROWS + tl.arange(0, ROWS), tile % columns * COLUMNS + tl.arange(0, COLUMNS)
    d = tl.arange(0, BLOCK_D)
    DSORTED_K += b * s_b + h * s_h
    DSORTED_V += b * s_b + h * s_h
    K += b * k_b + h * k_h
    V += b * v_b + h * v_h
    dr = tl.zeros([ROWS, COLUMNS], tl.float32)
    for slot in range(m):
        here, there = i * m + slot, j * m + slot
        dx = load_rows(DSORTED_K, here, d, s_l, i < n, D, BLOCK_D)
        x = load_rows(K, there, d, k_l, there < L, D, BLOCK_D)
        dr = tl.dot(dx, tl.trans(x), dr, input_precision=PRECISION)
        dx = load_rows(DSORTED_V, here, d, s_l, i < n, D, BLOCK_D)
        x = load_rows(V, there, d, v_l, there < L, D, BLOCK_D)
        dr = tl.dot(dx, tl.trans(x), dr, input_precision=PRECISION)
    at = DR + bh * n * width + i[:, None].to(tl.int64) * width + j[None, :]
    tl.store(at, dr.to(DR.dtype.element_ty), mask=(i < n)[:, None] & (j < width)[None, :])


@triton.jit
def load_tile(X, i, j, n, width):
    """Rows i and columns j of X (n, width), in float32."""
    at = X + i[:, None].to(tl.int64) * width + j[None, :]
    return tl.load(at, mask=(i < n)[:, None] & (j < width)[None, :], other=0.0).to(tl.float32)


@triton.jit
def sum_gradients(
    R, DR, SORT, DSUMS,
    w_d, BH, n, width,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """DSUMS; the gradients of the logits replace DR."""
    bh, i = (tl.program_id(0) % BH).to(tl.int64), tl.program_id(0) // BH * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    R += bh * n * width
    DR += bh * n * width
    delta = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS], tl.float32)  # 1 up to the rounding of R, which would shift all gradients of a row
    for start in range(0, n, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        r = load_tile(R, i, j, n, width)
        delta += tl.sum(r * load_tile(DR, i, j, n, width), 1)
        total += tl.sum(r, 1)
    delta /= tl.where(total > 0.0, total, 1.0)
    dsums = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in range(0, n, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        dlogits = load_tile(R, i, j, n, width) * (load_tile(DR, i, j, n, width) - delta[:, None])
        dsums = tl.dot(dlogits, tl.trans(sort_columns(SORT, d, j, n, w_d, D)), dsums, input_precision=PRECISION)
        at = DR + i[:, None].to(tl.int64) * width + j[None, :]
        tl.store(at, dlogits.to(DR.dtype.element_ty), mask=(i < n)[:, None] & (j < width)[None, :])
    store_rows(DSUMS + bh * n * D, dsums, i, d, D, i < n, D, BLOCK_D)


@triton.jit
def sort_gradients(
    DLOGITS, SUMS, PARTS,
    BH, n, width, each,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """PARTS (parts, n, D), float32: the transposed gradient of SORT from `each` heads."""
    part, j = tl.program_id(1), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    d = tl.arange(0, BLOCK_D)
    total = tl.zeros([COLUMNS, BLOCK_D], tl.float32)
    for bh in range(part * each, tl.minimum((part + 1) * each, BH)):
        at = tl.cast(bh, tl.int64) * n
        for start in range(0, n, ROWS):
            i = start + tl.arange(0, ROWS)
            dlogits = load_tile(DLOGITS + at * width, i, j, n, width)
            sums = load_rows(SUMS + at * D, i, d, D, i < n, D, BLOCK_D)
            total = tl.dot(tl.trans(dlogits), sums, total, input_precision=PRECISION)
    store_rows(PARTS + tl.cast(part, tl.int64) * n * D, total, j, d, D, j < n, D, BLOCK_D)


@triton.jit
def collect_sort(
    PARTS, DSORT,
    w_d, parts, n, columns,
    D: tl.constexpr, BLOCK_D: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """DSORT (D, columns): the sum of all parts, zero from column n on."""
    j, d = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, BLOCK_D)
    total = tl.zeros([COLUMNS, BLOCK_D], tl.float32)
    for part in range(parts):
        total += load_rows(PARTS + tl.cast(part, tl.int64) * n * D, j, d, D, j < n, D, BLOCK_D)
    inside = (j < columns)[:, None] & (d < D)[None, :]
    tl.store(DSORT + d[None, :] * w_d + j[:, None], total.to(DSORT.dtype.element_ty), mask=inside)
