"""Triton kernels: backward pass. No atomics: sums have a fixed order, so results are bitwise reproducible.

With w_i = 1 / denominator and delta_i = Σ_d dout_id out_id, a pair (i, j ≤ i) has e_ij = w_i (dout_i·v_j - delta_i):

    dφ(q_i) = Σ_{j ≤ i} e_ij φ(k_j)                                 dφ(k_j) = Σ_{i ≥ j} e_ij φ(q_i)
    dv_j = Σ_{i ≥ j} w_i (φ(q_i)·φ(k_j)) dout_i                     drest_i = Σ_{j ≤ i} e_ij

Within a chunk, all pairs are computed. Keys of earlier chunks contribute through `before` of the forward. Queries of
later chunks contribute through A_c = Σ_{i in chunk c} w_i φ(q_i) dout_iᵀ (`gradient_states`), summed from the end
(`running_sums`, reversed). With SCALED, each product is multiplied by e^{m_j - G_i} as in the forward.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..rows import load_rows, place, store_rows, valid_rows
from .forward import chunk_end, empty_part, fade, feature_map, operand, store_part


@triton.jit
def gradient_states(
    Q, OUT, DOUT, TABLE, TOP, REST, WEIGHT, DELTA, PARTS,
    q_b, q_h, q_l, o_b, o_h, o_l, g_b, g_h, g_l,
    BH, H, L, n,
    F: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BF: tl.constexpr, ROWS: tl.constexpr,
    PART: tl.constexpr, CHUNK: tl.constexpr, FEATURES: tl.constexpr, SCALED: tl.constexpr, BF16: tl.constexpr,
    PRECISION: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Contribution of one chunk of queries to earlier keys for one tile of features, in the layout of PARTS in the
    forward; and DELTA."""
    TILES: tl.constexpr = (F + BF - 1) // BF
    WHOLE: tl.constexpr = F // BF * BF
    bh, work = tl.program_id(0) % BH, tl.program_id(0) // BH
    f0, c = work % TILES * BF, work // TILES
    PARTS += (bh.to(tl.int64) * n + c) * PART
    b, h, bh, first, end = place(TABLE, bh, c, H, L, CHUNK, PACKED)
    f, d = f0 + tl.arange(0, BF), tl.arange(0, BLOCK_D)
    Q += b * q_b + h * q_h + first.to(tl.int64) * q_l
    OUT += b * o_b + h * o_h + first.to(tl.int64) * o_l
    DOUT += b * g_b + h * g_h + first.to(tl.int64) * g_l
    row_at = bh * L + first
    TOP += bh // GROUP * L

    state, norm, rest_state, rest_norm = empty_part(BF, BLOCK_D, ROWS)
    for start in range(0, end, ROWS):
        i = start + tl.arange(0, ROWS)
        live = i < end
        q = feature_map(load_rows(Q, i, f, q_l, live, F, WHOLE), live, f < F, FEATURES)
        dout = load_rows(DOUT, i, d, g_l, live, D, BLOCK_D)
        out = load_rows(OUT, i, d, o_l, live, D, BLOCK_D)
        weight = tl.load(WEIGHT + row_at + i, mask=live, other=0.0)
        delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
        if f0 == 0:
            tl.store(DELTA + row_at + i, delta, mask=live)
        if SCALED:
            rest = tl.load(REST + row_at + i, mask=live, other=0.0) * weight
            rest_state += tl.sum(rest[:, None] * dout.to(tl.float32), 0)
            rest_norm -= tl.sum(rest * delta, 0)
            weight *= fade(chunk_end(TOP, c - 1, L, CHUNK) - tl.load(TOP + first + i, mask=live, other=0.0))
        q = operand(q * weight[:, None], BF16)
        state = tl.dot(tl.trans(q), operand(dout, BF16), state, input_precision=PRECISION)
        norm -= tl.sum(q.to(tl.float32) * delta[:, None], 0)

    store_part(PARTS, state, norm, rest_state, rest_norm, f0, f, d, F, D, BLOCK_D, SCALED)


@triton.jit
def query_gradients(
    Q, K, V, MASK, TABLE, KEY_SCALE, TOP, REST, BEFORE, BEFORE_NORM, DOUT, WEIGHT, DELTA, DQ, DTOP, DREST,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, g_b, g_h, g_l, dq_b, dq_h, dq_l,
    BH, H, L, n,
    F: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BF: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    CHUNK: tl.constexpr, CARRIED: tl.constexpr, FEATURES: tl.constexpr, SCALED: tl.constexpr, HAS_MASK: tl.constexpr,
    BF16: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    WHOLE: tl.constexpr = F // BF * BF
    R: tl.constexpr = F + 1 if SCALED else F
    bh, tile = tl.program_id(0) % BH, tl.program_id(0) // BH
    c = tile * BQ // CHUNK
    at = (bh // GROUP).to(tl.int64) * n + c
    b, h, bh, first, end = place(TABLE, bh, c, H, L, CHUNK, PACKED)
    d = tl.arange(0, BLOCK_D)
    Q += b * q_b + h * q_h + first.to(tl.int64) * q_l
    K += b * k_b + h // GROUP * k_h + first.to(tl.int64) * k_l
    V += b * v_b + h // GROUP * v_h + first.to(tl.int64) * v_l
    DOUT += b * g_b + h * g_h + first.to(tl.int64) * g_l
    DQ += b * dq_b + h * dq_h + first.to(tl.int64) * dq_l
    MASK += b * L + first
    BEFORE += at * R * D
    BEFORE_NORM += at * R
    row_at = bh * L + first

    q_first = tile * BQ - c * CHUNK
    i = q_first + tl.arange(0, BQ)
    dout = operand(load_rows(DOUT, i, d, g_l, i < end, D, BLOCK_D), BF16)
    delta = tl.load(DELTA + row_at + i, mask=i < end, other=0.0)
    weight = tl.load(WEIGHT + row_at + i, mask=i < end, other=0.0)
    drest = tl.zeros([BQ], tl.float32)
    if SCALED:
        KEY_SCALE += bh // GROUP * L + first
        TOP += bh // GROUP * L
        top = tl.load(TOP + first + i, mask=i < end, other=0.0)
        if CARRIED:
            v_sum = tl.load(BEFORE + F * D + d, mask=d < D, other=0.0).to(tl.float32)
            drest += tl.sum(dout.to(tl.float32) * v_sum[None, :], 1) - delta * tl.load(BEFORE_NORM + F)
    for f0 in range(0, F, BF):
        f = f0 + tl.arange(0, BF)
        dq = tl.zeros([BQ, BF], tl.float32)
        if CARRIED:
            before = load_rows(BEFORE, f, d, D, f < F, D, BLOCK_D)
            norm = tl.load(BEFORE_NORM + f, mask=f < F, other=0.0)
            dq += tl.dot(dout, tl.trans(before), input_precision=PRECISION) - delta[:, None] * norm[None, :]
            if SCALED:
                dq *= fade(chunk_end(TOP, c - 1, L, CHUNK) - top)[:, None]
        for start in range(0, tl.minimum(q_first + BQ, end), BK):
            j = start + tl.arange(0, BK)
            live = valid_rows(MASK, j, j < end, HAS_MASK)
            k = operand(feature_map(load_rows(K, j, f, k_l, live, F, WHOLE), live, f < F, FEATURES), BF16)
            v = operand(load_rows(V, j, d, v_l, live, D, BLOCK_D), BF16)
            e = tl.dot(dout, tl.trans(v), input_precision=PRECISION) - delta[:, None]
            e = tl.where(j[None, :] <= i[:, None], e, 0.0)
            if SCALED:
                drest += tl.where(f0 == 0, tl.sum(tl.where(live[None, :], e, 0.0), 1), 0.0)
                e = e * fade(tl.load(KEY_SCALE + j, mask=live, other=0.0)[None, :] - top[:, None])
            dq = tl.dot(operand(e, BF16), k, dq, input_precision=PRECISION)
        dq *= weight[:, None]
        if FEATURES != "given":
            q = load_rows(Q, i, f, q_l, i < end, F, WHOLE)
            if FEATURES == "elu":
                dq *= tl.minimum(feature_map(q, i < end, f < F, FEATURES), 1.0)  # φ' = min(φ, 1)
            else:
                dq = tl.where(q > 0, dq, 0.0)
        store_rows(DQ, dq, i, f, dq_l, i < end, F, WHOLE)
    if SCALED:
        drest *= weight
        tl.store(DREST + row_at + i, drest, mask=i < end)
        tl.store(DTOP + row_at + i, drest * tl.load(REST + row_at + i, mask=i < end, other=0.0), mask=i < end)


@triton.jit
def key_gradients(
    Q, K, V, MASK, TABLE, KEY_SCALE, TOP, REST, AFTER, AFTER_NORM, DOUT, WEIGHT, DELTA, DK, DV,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, g_b, g_h, g_l, dk_b, dk_h, dk_l, dv_b, dv_h, dv_l,
    BH, H, L, n,
    F: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BF: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    CHUNK: tl.constexpr, CARRIED: tl.constexpr, FEATURES: tl.constexpr, SCALED: tl.constexpr, HAS_MASK: tl.constexpr,
    BF16: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys from the later queries of its chunk, and from the later chunks, of one head of q."""
    WHOLE: tl.constexpr = F // BF * BF
    R: tl.constexpr = F + 1 if SCALED else F
    bh = tl.program_id(0) % BH
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // BH  # last first: `query_gradients` has just read these rows
    c = tile * BK // CHUNK
    at = bh.to(tl.int64) * n + c
    b, h, bh, first, end = place(TABLE, bh, c, H, L, CHUNK, PACKED)
    d = tl.arange(0, BLOCK_D)
    Q += b * q_b + h * q_h + first.to(tl.int64) * q_l
    K += b * k_b + h // GROUP * k_h + first.to(tl.int64) * k_l
    V += b * v_b + h // GROUP * v_h + first.to(tl.int64) * v_l
    DOUT += b * g_b + h * g_h + first.to(tl.int64) * g_l
    DK += b * dk_b + h * dk_h + first.to(tl.int64) * dk_l
    DV += b * dv_b + h * dv_h + first.to(tl.int64) * dv_l
    MASK += b * L + first
    AFTER += at * R * D
    AFTER_NORM += at * R
    row_at = bh * L + first

    k_first = tile * BK - c * CHUNK
    j = k_first + tl.arange(0, BK)
    live = valid_rows(MASK, j, j < end, HAS_MASK)
    v = operand(load_rows(V, j, d, v_l, live, D, BLOCK_D), BF16)
    dv = tl.zeros([BK, BLOCK_D], tl.float32)
    if SCALED:
        TOP += bh // GROUP * L
        scale = tl.load(KEY_SCALE + (bh // GROUP * L + first) + j, mask=live, other=0.0)
        to_end = fade(scale - chunk_end(TOP, c, L, CHUNK))
        if CARRIED:
            dv += tl.load(AFTER + F * D + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    for f0 in range(0, F, BF):
        f = f0 + tl.arange(0, BF)
        k = operand(feature_map(load_rows(K, j, f, k_l, live, F, WHOLE), live, f < F, FEATURES), BF16)
        dk = tl.zeros([BK, BF], tl.float32)
        if CARRIED:
            after = load_rows(AFTER, f, d, D, f < F, D, BLOCK_D)
            norm = tl.load(AFTER_NORM + f, mask=f < F, other=0.0)
            dk += tl.dot(v, tl.trans(after), input_precision=PRECISION) + norm[None, :]
            far = k
            if SCALED:
                dk *= to_end[:, None]
                far = operand(k.to(tl.float32) * to_end[:, None], BF16)
            dv = tl.dot(far, after, dv, input_precision=PRECISION)
        for start in range(k_first // BQ * BQ, end, BQ):
            i = start + tl.arange(0, BQ)
            q = operand(feature_map(load_rows(Q, i, f, q_l, i < end, F, WHOLE), i < end, f < F, FEATURES), BF16)
            dout = operand(load_rows(DOUT, i, d, g_l, i < end, D, BLOCK_D), BF16)
            delta = tl.load(DELTA + row_at + i, mask=i < end, other=0.0)
            weight = tl.load(WEIGHT + row_at + i, mask=i < end, other=0.0)
            allowed = j[:, None] <= i[None, :]
            p = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            e = tl.dot(v, tl.trans(dout), input_precision=PRECISION) - delta[None, :]
            if SCALED:
                share = fade(scale[:, None] - tl.load(TOP + first + i, mask=i < end, other=0.0)[None, :])
                rest = tl.load(REST + row_at + i, mask=i < end, other=0.0)
                p = p * share + tl.where(f0 == 0, rest, 0.0)[None, :]
                e = e * share
            p = tl.where(allowed, p * weight[None, :], 0.0)
            e = tl.where(allowed, e * weight[None, :], 0.0)
            dv = tl.dot(operand(p, BF16), dout, dv, input_precision=PRECISION)
            dk = tl.dot(operand(e, BF16), q, dk, input_precision=PRECISION)
        dk = tl.where(live[:, None], dk, 0.0)
        if FEATURES == "elu":
            dk *= tl.minimum(k.to(tl.float32), 1.0)  # φ' = min(φ, 1)
        elif FEATURES == "relu":
            dk = tl.where(load_rows(K, j, f, k_l, live, F, WHOLE) > 0, dk, 0.0)
        store_rows(DK, dk, j, f, dk_l, j < end, F, WHOLE)
    store_rows(DV, tl.where(live[:, None], dv, 0.0), j, d, dv_l, j < end, D, BLOCK_D)
