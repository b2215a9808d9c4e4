"""Triton kernels: forward pass of Linformer.

    k'_r = Σ_j F_jr k_j,  v'_r = Σ_j F_jr v_j           `slot_sums` per chunk of keys; `linear_sum` adds the chunks
    out_i = Σ_r softmax_r(q_i · k'_r / √D) v'_r         `attend`

Slots are summed in float32 and multiplied in the dtype of the inputs, as in the plain version.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.random import kept, row_words
from ...kernels.rows import load_rows, store_rows


@triton.jit
def slot_sums(
    K, V, F, PARTS,
    k_b, k_h, k_l, v_b, v_h, v_l, f_l,
    BH, H, L, n, CHUNK,
    R: tl.constexpr, BLOCK_R: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    PART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk of keys and values. PARTS is (B·H, n, PART), float32: the slots of the keys, then of the values."""
    bh, c = tl.program_id(0) % BH, tl.program_id(0) // BH
    b, h, first = (bh // H).to(tl.int64), (bh % H).to(tl.int64), (c * CHUNK).to(tl.int64)
    r, d = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    K += b * k_b + h * k_h + first * k_l
    V += b * v_b + h * v_h + first * v_l
    F += first * f_l
    PARTS += (bh.to(tl.int64) * n + c) * PART
    end = tl.minimum(CHUNK, L - c * CHUNK)
    slots_k = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    slots_v = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for start in range(0, end, ROWS):
        j = start + tl.arange(0, ROWS)
        live = j < end
        k = load_rows(K, j, d, k_l, live, D, BLOCK_D)
        v = load_rows(V, j, d, v_l, live, D, BLOCK_D)
        f = tl.trans(load_rows(F, j, r, f_l, live, R, BLOCK_R).to(k.dtype))
        slots_k = tl.dot(f, k, slots_k, input_precision=PRECISION)
        slots_v = tl.dot(f, v, slots_v, input_precision=PRECISION)
    store_rows(PARTS, slots_k, r, d, D, r < R, D, BLOCK_D)
    store_rows(PARTS + R * D, slots_v, r, d, D, r < R, D, BLOCK_D)


@triton.jit
def probabilities(q, slots_k, r, scale, R: tl.constexpr, PRECISION: tl.constexpr):
    logits = tl.dot(q, tl.trans(slots_k), input_precision=PRECISION) * scale
    logits = tl.where((r < R)[None, :], logits, float("-inf"))
    p = tl.exp(logits - tl.max(logits, 1)[:, None])
    return p * (1.0 / tl.sum(p, 1))[:, None]


@triton.jit
def attend(
    Q, SLOTS, KEY, OUT,
    q_b, q_h, q_l, o_b, o_h, o_l,
    BH, H, L, threshold, scale,
    R: tl.constexpr, BLOCK_R: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    PART: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    bh, first = tl.program_id(0) % BH, tl.program_id(0) // BH * ROWS
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    i, r, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    live = i < L - first
    SLOTS += (bh // GROUP).to(tl.int64) * PART
    q = load_rows(Q + b * q_b + h * q_h + first.to(tl.int64) * q_l, i, d, q_l, live, D, BLOCK_D)
    slots_k = load_rows(SLOTS, r, d, D, r < R, D, BLOCK_D).to(q.dtype)
    slots_v = load_rows(SLOTS + R * D, r, d, D, r < R, D, BLOCK_D).to(q.dtype)
    p = probabilities(q, slots_k, r, scale, R, PRECISION)
    p *= kept(row_words(KEY, bh, first + i, DROPOUT)[:, None], r[None, :], threshold, DROPOUT)
    out = tl.dot(p.to(q.dtype), slots_v, input_precision=PRECISION)
    store_rows(OUT + b * o_b + h * o_h + first.to(tl.int64) * o_l, out, i, d, o_l, live, D, BLOCK_D)
