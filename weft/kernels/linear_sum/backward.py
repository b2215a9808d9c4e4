"""Triton kernels: backward pass. No atomics: sums have a fixed order, so results are bitwise reproducible.

With w_i = 1 / denominator and delta_i = Σ_d dout_id out_id:

    dφ(q_i) = w_i (S dout_i - delta_i z)                                                       `query_gradients`
    A = Σ_i w_i φ(q_i) dout_iᵀ,  a = -Σ_i w_i delta_i φ(q_i)                                   per chunk of queries
    dφ(k_j) = A v_j + a,  dv_j = Aᵀ φ(k_j)                                                     `key_gradients`

With SCALED, φ(k_j) and dφ(k_j) are multiplied by e^{m_j - G}; drest_i = w_i (dout_i · Σ_j v_j - delta_i Σ_j 1), and
one more row of A and a holds the same sums with rest_i for φ(q_i). One more number holds Σ_i rest_i drest_i, the
gradient of G.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..linear_scan.forward import empty_part, fade, feature_map, operand
from ..rows import load_rows, place, store_rows, valid_rows
from .forward import own_sums, product_operand


@triton.jit
def through_map(dphi, x, FEATURES: tl.constexpr):
    """Gradient of x from the gradient of φ(x)."""
    x = x.to(tl.float32)
    if FEATURES == "elu":
        dphi *= tl.exp(tl.minimum(x, 0.0))
    elif FEATURES == "relu":
        dphi = tl.where(x > 0, dphi, 0.0)
    return dphi


@triton.jit
def query_gradients(
    Q, OUT, DOUT, TABLE, REST, WEIGHT, SUMS, DQ, DREST, PARTS,
    q_b, q_h, q_l, o_b, o_h, o_l, g_b, g_h, g_l, dq_b, dq_h, dq_l,
    BH, H, L, n, CHUNK,
    F: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BF: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr,
    FEATURES: tl.constexpr, SCALED: tl.constexpr, BF16: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """dq of one chunk for one tile of features, and the chunk's part of A and a, in the layout of PARTS."""
    TILES: tl.constexpr = (F + BF - 1) // BF
    WHOLE: tl.constexpr = F // BF * BF
    R: tl.constexpr = F + 1 if SCALED else F
    bh, work = tl.program_id(0) % BH, tl.program_id(0) // BH
    f0, c = work % TILES * BF, work // TILES
    PARTS += (bh.to(tl.int64) * n + c) * PART
    SUMS += own_sums(TABLE, bh // GROUP, c, n, PACKED) * PART
    b, h, bh, first, end = place(TABLE, bh, c, H, L, CHUNK, PACKED)
    f, d = f0 + tl.arange(0, BF), tl.arange(0, BLOCK_D)
    Q += b * q_b + h * q_h + first.to(tl.int64) * q_l
    OUT += b * o_b + h * o_h + first.to(tl.int64) * o_l
    DOUT += b * g_b + h * g_h + first.to(tl.int64) * g_l
    DQ += b * dq_b + h * dq_h + first.to(tl.int64) * dq_l
    at = bh * L + first
    sums = product_operand(load_rows(SUMS, f, d, D, f < F, D, BLOCK_D), FEATURES, BF16)
    z = tl.load(SUMS + R * D + f, mask=f < F, other=0.0)

    state, norm, rest_state, rest_norm = empty_part(BF, BLOCK_D, ROWS)
    dtop = rest_norm
    for start in range(0, end, ROWS):
        i = start + tl.arange(0, ROWS)
        live = i < end
        x = load_rows(Q, i, f, q_l, live, F, WHOLE)
        dout = load_rows(DOUT, i, d, g_l, live, D, BLOCK_D)
        out = load_rows(OUT, i, d, o_l, live, D, BLOCK_D).to(tl.float32)
        weight = tl.load(WEIGHT + at + i, mask=live, other=0.0)
        delta = tl.sum(out * dout.to(tl.float32), 1)
        dphi = tl.dot(product_operand(dout, FEATURES, BF16), tl.trans(sums), input_precision=PRECISION)
        dphi = (dphi - delta[:, None] * z[None, :]) * weight[:, None]
        store_rows(DQ, through_map(dphi, x, FEATURES), i, f, dq_l, live, F, WHOLE)
        if SCALED:
            v_sum = tl.load(SUMS + F * D + d, mask=d < D, other=0.0)
            drest = tl.sum(dout.to(tl.float32) * v_sum[None, :], 1) - delta * tl.load(SUMS + R * D + F)
            rest = tl.load(REST + at + i, mask=live, other=0.0) * weight
            dtop += tl.sum(rest * drest, 0)
            if f0 == 0:
                tl.store(DREST + at + i, drest * weight, mask=live)
            rest_state += tl.sum(rest[:, None] * dout.to(tl.float32), 0)
            rest_norm -= tl.sum(rest * delta, 0)
        q = operand(feature_map(x, live, f < F, FEATURES) * weight[:, None], BF16)
        state = tl.dot(tl.trans(q), operand(dout, BF16), state, input_precision=PRECISION)
        norm -= tl.sum(q.to(tl.float32) * delta[:, None], 0)

    store_rows(PARTS, state, f, d, D, f < F, D, BLOCK_D)
    tl.store(PARTS + R * D + f, norm, mask=f < F)
    if SCALED:
        if f0 == 0:
            tl.store(PARTS + F * D + d, rest_state, mask=d < D)
            tl.store(PARTS + R * D + F, rest_norm)
            tl.store(PARTS + R * D + R, dtop)


@triton.jit
def key_gradients(
    K, V, MASK, TABLE, KEY_SCALE, TOP, SUMS, DK, DV, DTOP,
    k_b, k_h, k_l, v_b, v_h, v_l, dk_b, dk_h, dk_l, dv_b, dv_h, dv_l,
    BH, H, L, n,
    F: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BF: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr,
    FEATURES: tl.constexpr, SCALED: tl.constexpr, HAS_MASK: tl.constexpr, BF16: tl.constexpr, PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    WHOLE: tl.constexpr = F // BF * BF
    R: tl.constexpr = F + 1 if SCALED else F
    TILES: tl.constexpr = PACKED // ROWS if PACKED else 1
    bh, tile = tl.program_id(0) % BH, tl.program_id(0) // BH
    SUMS += own_sums(TABLE, bh, tile // TILES, n, PACKED > 0) * PART
    b, h, bh, first, end = place(TABLE, bh, tile // TILES, H, L, ROWS, PACKED > 0)
    j, d = tile % TILES * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    inside = j < end
    live = valid_rows(MASK + b * L + first, j, inside, HAS_MASK)
    K += b * k_b + h * k_h + first.to(tl.int64) * k_l
    DK += b * dk_b + h * dk_h + first.to(tl.int64) * dk_l
    v = load_rows(V + b * v_b + h * v_h + first.to(tl.int64) * v_l, j, d, v_l, live, D, BLOCK_D)
    v = product_operand(v, FEATURES, BF16)
    dv = tl.zeros([ROWS, BLOCK_D], tl.float32)
    scale = live.to(tl.float32)
    if SCALED:
        at = bh * L
        key_scale = tl.load(KEY_SCALE + at + first + j, mask=live, other=0.0)
        scale = tl.where(live, fade(key_scale - tl.load(TOP + at + L - 1)), 0.0)
        tl.store(DTOP + at + first + j, tl.where(first + j == L - 1, tl.load(SUMS + R * D + R), 0.0), mask=inside)
        dv += tl.where(live[:, None], tl.load(SUMS + F * D + d, mask=d < D, other=0.0)[None, :], 0.0)
    for f0 in range(0, F, BF):
        f = f0 + tl.arange(0, BF)
        x = load_rows(K, j, f, k_l, live, F, WHOLE)
        state = product_operand(load_rows(SUMS, f, d, D, f < F, D, BLOCK_D), FEATURES, BF16)
        norm = tl.load(SUMS + R * D + f, mask=f < F, other=0.0)
        dphi = (tl.dot(v, tl.trans(state), input_precision=PRECISION) + norm[None, :]) * scale[:, None]
        store_rows(DK, through_map(dphi, x, FEATURES), j, f, dk_l, inside, F, WHOLE)
        k = feature_map(x, live, f < F, FEATURES)
        if SCALED:
            k *= scale[:, None]
        dv = tl.dot(product_operand(k, FEATURES, BF16), state, dv, input_precision=PRECISION)
    store_rows(DV + b * dv_b + h * dv_h + first.to(tl.int64) * dv_l, dv, j, d, dv_l, inside, D, BLOCK_D)
