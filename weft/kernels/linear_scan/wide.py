"""Triton kernels: outputs and gradients of the scaled form with many features.

`forward.py` and `backward.py` hold a tile of features and loop over the keys of the chunk. With few features this reads
everything once. With many, the products with v, the scales and the masks would be recomputed for every tile of
features. Here a program holds all pairs of its rows with the chunk and loops over the features. The formulas are the
same.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..rows import load_rows, store_rows, valid_rows
from .forward import chunk_end, fade, operand


@triton.jit
def outputs(
    Q, K, V, MASK, KEY_SCALE, TOP, REST, BEFORE, BEFORE_NORM, OUT, WEIGHT,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, o_b, o_h, o_l,
    BH, H, L, n, epsilon,
    F: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BF: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, CARRIED: tl.constexpr, HAS_MASK: tl.constexpr, BF16: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Outputs of ROWS queries from the sums of earlier chunks and the keys of their chunk, ROWS at a time."""
    WHOLE: tl.constexpr = F // BF * BF
    bh = tl.program_id(0) % BH
    tile = (L + ROWS - 1) // ROWS - 1 - tl.program_id(0) // BH  # last first: `chunk_states` has just read those keys
    c = tile * ROWS // CHUNK
    first = c * CHUNK
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    Q += b * q_b + h * q_h + first.to(tl.int64) * q_l
    K += b * k_b + h // GROUP * k_h + first.to(tl.int64) * k_l
    V += b * v_b + h // GROUP * v_h + first.to(tl.int64) * v_l
    OUT += b * o_b + h * o_h + first.to(tl.int64) * o_l
    row_at = bh.to(tl.int64) * L + first
    key_at = (bh // GROUP).to(tl.int64) * L + first
    at = (bh // GROUP).to(tl.int64) * n + c
    BEFORE += at * (F + 1) * D
    BEFORE_NORM += at * (F + 1)
    end = tl.minimum(CHUNK, L - first)

    q_first = tile * ROWS - first
    i = q_first + tl.arange(0, ROWS)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.load(TOP + key_at + i, mask=i < end, other=0.0)
    rest = tl.load(REST + row_at + i, mask=i < end, other=0.0)
    if CARRIED:
        for f0 in range(0, F, BF):
            f = f0 + tl.arange(0, BF)
            q = operand(load_rows(Q, i, f, q_l, i < end, F, WHOLE), BF16)
            acc = tl.dot(q, load_rows(BEFORE, f, d, D, f < F, D, BLOCK_D), acc, input_precision=PRECISION)
            norm = tl.load(BEFORE_NORM + f, mask=f < F, other=0.0)
            total += tl.sum(q.to(tl.float32) * norm[None, :], 1)
        past = fade(chunk_end(TOP + (bh // GROUP).to(tl.int64) * L, c - 1, L, CHUNK) - top)
        v_sum = tl.load(BEFORE + F * D + d, mask=d < D, other=0.0).to(tl.float32)
        acc = acc * past[:, None] + rest[:, None] * v_sum[None, :]
        total = total * past + rest * tl.load(BEFORE_NORM + F)
    for start in range(0, q_first + ROWS, ROWS):
        j = start + tl.arange(0, ROWS)
        live = valid_rows(MASK + b * L + first, j, j < end, HAS_MASK)
        p = tl.zeros([ROWS, ROWS], tl.float32)
        for f0 in range(0, F, BF):
            f = f0 + tl.arange(0, BF)
            q = operand(load_rows(Q, i, f, q_l, i < end, F, WHOLE), BF16)
            k = operand(load_rows(K, j, f, k_l, live, F, WHOLE), BF16)
            p = tl.dot(q, tl.trans(k), p, input_precision=PRECISION)
        scale = tl.load(KEY_SCALE + key_at + j, mask=live, other=0.0)
        p = p * fade(scale[None, :] - top[:, None]) + rest[:, None]
        p = tl.where((j[None, :] <= i[:, None]) & live[None, :], p, 0.0)
        total += tl.sum(p, 1)
        v = operand(load_rows(V, j, d, v_l, live, D, BLOCK_D), BF16)
        acc = tl.dot(operand(p, BF16), v, acc, input_precision=PRECISION)
    weight = tl.where(total > 0, 1.0 / (total + epsilon), 0.0)
    store_rows(OUT, acc * weight[:, None], i, d, o_l, i < end, D, BLOCK_D)
    tl.store(WEIGHT + row_at + i, weight, mask=i < end)


@triton.jit
def query_gradients(
    K, V, MASK, KEY_SCALE, TOP, REST, BEFORE, BEFORE_NORM, DOUT, WEIGHT, DELTA, DQ, DTOP, DREST,
    k_b, k_h, k_l, v_b, v_h, v_l, g_b, g_h, g_l, dq_b, dq_h, dq_l,
    BH, H, L, n,
    F: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BF: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, CARRIED: tl.constexpr, HAS_MASK: tl.constexpr, BF16: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Gradients of ROWS queries from the keys of their chunk and the sums of earlier chunks."""
    WHOLE: tl.constexpr = F // BF * BF
    bh, tile = tl.program_id(0) % BH, tl.program_id(0) // BH
    c = tile * ROWS // CHUNK
    first = c * CHUNK
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    K += b * k_b + h // GROUP * k_h + first.to(tl.int64) * k_l
    V += b * v_b + h // GROUP * v_h + first.to(tl.int64) * v_l
    DOUT += b * g_b + h * g_h + first.to(tl.int64) * g_l
    DQ += b * dq_b + h * dq_h + first.to(tl.int64) * dq_l
    row_at = bh.to(tl.int64) * L + first
    key_at = (bh // GROUP).to(tl.int64) * L + first
    at = (bh // GROUP).to(tl.int64) * n + c
    BEFORE += at * (F + 1) * D
    BEFORE_NORM += at * (F + 1)
    end = tl.minimum(CHUNK, L - first)

    i, j = tile * ROWS - first + tl.arange(0, ROWS), tl.arange(0, CHUNK)
    live = valid_rows(MASK + b * L + first, j, j < tl.minimum(tile * ROWS - first + ROWS, end), HAS_MASK)
    dout = operand(load_rows(DOUT, i, d, g_l, i < end, D, BLOCK_D), BF16)
    delta = tl.load(DELTA + row_at + i, mask=i < end, other=0.0)
    weight = tl.load(WEIGHT + row_at + i, mask=i < end, other=0.0)
    top = tl.load(TOP + key_at + i, mask=i < end, other=0.0)
    v = operand(load_rows(V, j, d, v_l, live, D, BLOCK_D), BF16)
    e = tl.dot(dout, tl.trans(v), input_precision=PRECISION) - delta[:, None]
    e = tl.where((j[None, :] <= i[:, None]) & live[None, :], e * weight[:, None], 0.0)
    drest = tl.sum(e, 1)
    scale = tl.load(KEY_SCALE + key_at + j, mask=live, other=0.0)
    e = operand(e * fade(scale[None, :] - top[:, None]), BF16)
    if CARRIED:
        v_sum = tl.load(BEFORE + F * D + d, mask=d < D, other=0.0).to(tl.float32)
        far = tl.sum(dout.to(tl.float32) * v_sum[None, :], 1) - delta * tl.load(BEFORE_NORM + F)
        drest += far * weight
        weight *= fade(chunk_end(TOP + (bh // GROUP).to(tl.int64) * L, c - 1, L, CHUNK) - top)
    tl.store(DREST + row_at + i, drest, mask=i < end)
    tl.store(DTOP + row_at + i, drest * tl.load(REST + row_at + i, mask=i < end, other=0.0), mask=i < end)
    for f0 in range(0, F, BF):
        f = f0 + tl.arange(0, BF)
        dq = tl.zeros([ROWS, BF], tl.float32)
        if CARRIED:
            before = load_rows(BEFORE, f, d, D, f < F, D, BLOCK_D)
            norm = tl.load(BEFORE_NORM + f, mask=f < F, other=0.0)
            dq = tl.dot(dout, tl.trans(before), dq, input_precision=PRECISION) - delta[:, None] * norm[None, :]
            dq *= weight[:, None]
        k = operand(load_rows(K, j, f, k_l, live, F, WHOLE), BF16)
        dq = tl.dot(e, k, dq, input_precision=PRECISION)
        store_rows(DQ, dq, i, f, dq_l, i < end, F, WHOLE)


@triton.jit
def shares(scale, TOP, WEIGHT, i, j, asks, live):
    """For queries i and keys j: e^{m_j - G_i}, and 1 / denominator for allowed pairs."""
    top = tl.load(TOP + i, mask=asks, other=0.0)
    weight = tl.load(WEIGHT + i, mask=asks, other=0.0)
    counts = (j[None, :] <= i[:, None]) & live[None, :]
    return fade(scale[None, :] - top[:, None]), tl.where(counts, weight[:, None], 0.0)


@triton.jit
def key_gradients(
    Q, V, MASK, KEY_SCALE, TOP, AFTER, AFTER_NORM, DOUT, WEIGHT, DELTA, DK,
    q_b, q_h, q_l, v_b, v_h, v_l, g_b, g_h, g_l, dk_b, dk_h, dk_l,
    BH, H, L, n,
    F: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BF: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, CARRIED: tl.constexpr, HAS_MASK: tl.constexpr, BF16: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """dk of ROWS keys from the queries of their chunk and from later chunks."""
    WHOLE: tl.constexpr = F // BF * BF
    bh = tl.program_id(0) % BH
    tile = (L + ROWS - 1) // ROWS - 1 - tl.program_id(0) // BH  # last first: `query_gradients` has just read those rows
    c = tile * ROWS // CHUNK
    first = c * CHUNK
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    Q += b * q_b + h * q_h + first.to(tl.int64) * q_l
    V += b * v_b + h // GROUP * v_h + first.to(tl.int64) * v_l
    DOUT += b * g_b + h * g_h + first.to(tl.int64) * g_l
    DK += b * dk_b + h * dk_h + first.to(tl.int64) * dk_l
    row_at = bh.to(tl.int64) * L + first
    key_at = (bh // GROUP).to(tl.int64) * L + first
    at = bh.to(tl.int64) * n + c
    AFTER += at * (F + 1) * D
    AFTER_NORM += at * (F + 1)
    end = tl.minimum(CHUNK, L - first)

    j, i = tile * ROWS - first + tl.arange(0, ROWS), tl.arange(0, CHUNK)
    asks = (i >= tile * ROWS - first) & (i < end)
    live = valid_rows(MASK + b * L + first, j, j < end, HAS_MASK)
    v = operand(load_rows(V, j, d, v_l, live, D, BLOCK_D), BF16)
    dout = operand(load_rows(DOUT, i, d, g_l, asks, D, BLOCK_D), BF16)
    delta = tl.load(DELTA + row_at + i, mask=asks, other=0.0)
    scale = tl.load(KEY_SCALE + key_at + j, mask=live, other=0.0)
    share, weight = shares(scale, TOP + key_at, WEIGHT + row_at, i, j, asks, live)
    e = tl.dot(dout, tl.trans(v), input_precision=PRECISION) - delta[:, None]
    e = tl.trans(operand(e * share * weight, BF16))
    to_end = tl.where(live, fade(scale - chunk_end(TOP + (bh // GROUP).to(tl.int64) * L, c, L, CHUNK)), 0.0)
    for f0 in range(0, F, BF):
        f = f0 + tl.arange(0, BF)
        dk = tl.zeros([ROWS, BF], tl.float32)
        if CARRIED:
            after = load_rows(AFTER, f, d, D, f < F, D, BLOCK_D)
            norm = tl.load(AFTER_NORM + f, mask=f < F, other=0.0)
            dk = tl.dot(v, tl.trans(after), dk, input_precision=PRECISION) + norm[None, :]
            dk *= to_end[:, None]
        q = operand(load_rows(Q, i, f, q_l, asks, F, WHOLE), BF16)
        dk = tl.dot(e, q, dk, input_precision=PRECISION)
        store_rows(DK, dk, j, f, dk_l, j < end, F, WHOLE)


@triton.jit
def value_gradients(
    Q, K, MASK, KEY_SCALE, TOP, REST, AFTER, DOUT, WEIGHT, DV,
    q_b, q_h, q_l, k_b, k_h, k_l, g_b, g_h, g_l, dv_b, dv_h, dv_l,
    BH, H, L, n,
    F: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BF: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, CARRIED: tl.constexpr, HAS_MASK: tl.constexpr, BF16: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """dv of ROWS keys: `outputs` with queries and keys exchanged."""
    WHOLE: tl.constexpr = F // BF * BF
    bh, tile = tl.program_id(0) % BH, tl.program_id(0) // BH  # first first: `key_gradients` ended there
    c = tile * ROWS // CHUNK
    first = c * CHUNK
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    Q += b * q_b + h * q_h + first.to(tl.int64) * q_l
    K += b * k_b + h // GROUP * k_h + first.to(tl.int64) * k_l
    DOUT += b * g_b + h * g_h + first.to(tl.int64) * g_l
    DV += b * dv_b + h * dv_h + first.to(tl.int64) * dv_l
    row_at = bh.to(tl.int64) * L + first
    key_at = (bh // GROUP).to(tl.int64) * L + first
    AFTER += (bh.to(tl.int64) * n + c) * (F + 1) * D
    end = tl.minimum(CHUNK, L - first)

    k_first = tile * ROWS - first
    j = k_first + tl.arange(0, ROWS)
    live = valid_rows(MASK + b * L + first, j, j < end, HAS_MASK)
    scale = tl.load(KEY_SCALE + key_at + j, mask=live, other=0.0)
    dv = tl.zeros([ROWS, BLOCK_D], tl.float32)
    if CARRIED:
        for f0 in range(0, F, BF):
            f = f0 + tl.arange(0, BF)
            k = operand(load_rows(K, j, f, k_l, live, F, WHOLE), BF16)
            dv = tl.dot(k, load_rows(AFTER, f, d, D, f < F, D, BLOCK_D), dv, input_precision=PRECISION)
        sent = tl.load(AFTER + F * D + d, mask=d < D, other=0.0).to(tl.float32)
        dv = dv * fade(scale - chunk_end(TOP + (bh // GROUP).to(tl.int64) * L, c, L, CHUNK))[:, None] + sent[None, :]
    for start in range(k_first, end, ROWS):
        i = start + tl.arange(0, ROWS)
        asks = i < end
        p = tl.zeros([ROWS, ROWS], tl.float32)
        for f0 in range(0, F, BF):
            f = f0 + tl.arange(0, BF)
            k = operand(load_rows(K, j, f, k_l, live, F, WHOLE), BF16)
            q = operand(load_rows(Q, i, f, q_l, asks, F, WHOLE), BF16)
            p = tl.dot(q, tl.trans(k), p, input_precision=PRECISION)
        share, weight = shares(scale, TOP + key_at, WEIGHT + row_at, i, j, asks, live)
        rest = tl.load(REST + row_at + i, mask=asks, other=0.0)
        p = operand((p * share + rest[:, None]) * weight, BF16)
        dout = operand(load_rows(DOUT, i, d, g_l, asks, D, BLOCK_D), BF16)
        dv = tl.dot(tl.trans(p), dout, dv, input_precision=PRECISION)
    store_rows(DV, tl.where(live[:, None], dv, 0.0), j, d, dv_l, j < end, D, BLOCK_D)
