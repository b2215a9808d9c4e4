"""Triton kernels: forward pass of attention with feature maps over all keys.

    S = Σ_j φ(k_j) v_jᵀ,  z = Σ_j φ(k_j)                `key_sums` per chunk of keys, `collect` over the chunks
    out_i = φ(q_i)·S / (φ(q_i)·z + ε)                   `outputs`

With SCALED, key j is weighted by e^{m_j - G}, and rest_i is added to φ(q_i)·φ(k_j) for every pair (see `kernel.py`).
The sums of v and of 1 over the keys, which `rest` needs, are one more row of S and of z.

Sums are float32. Products with S use tf32 if the features are computed here: rounding S to bfloat16 would lose the
part in which long sequences differ. Features are processed in tiles of BF.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..linear_scan.forward import empty_part, fade, feature_map, operand, store_part
from ..rows import load_rows, place, store_rows, valid_rows


@triton.jit
def key_sums(
    K, V, MASK, TABLE, KEY_SCALE, TOP, PARTS,
    k_b, k_h, k_l, v_b, v_h, v_l,
    BH, H, L, n, CHUNK,
    F: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BF: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr,
    FEATURES: tl.constexpr, SCALED: tl.constexpr, HAS_MASK: tl.constexpr, BF16: tl.constexpr, PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """One tile of features of one chunk. PARTS is (B·H, n, PART), float32, written by `store_part`."""
    TILES: tl.constexpr = (F + BF - 1) // BF
    WHOLE: tl.constexpr = F // BF * BF  # equals F if no tile has columns past F
    bh, work = tl.program_id(0) % BH, tl.program_id(0) // BH
    f0, c = work % TILES * BF, work // TILES
    PARTS += (bh.to(tl.int64) * n + c) * PART
    b, h, bh, first, end = place(TABLE, bh, c, H, L, CHUNK, PACKED)
    f, d = f0 + tl.arange(0, BF), tl.arange(0, BLOCK_D)
    K += b * k_b + h * k_h + first.to(tl.int64) * k_l
    V += b * v_b + h * v_h + first.to(tl.int64) * v_l
    MASK += b * L + first
    if SCALED:
        KEY_SCALE += bh * L + first
        top = tl.load(TOP + bh * L + L - 1)

    state, norm, v_sum, tokens = empty_part(BF, BLOCK_D, ROWS)
    for start in range(0, end, ROWS):
        j = start + tl.arange(0, ROWS)
        live = valid_rows(MASK, j, j < end, HAS_MASK)
        k = feature_map(load_rows(K, j, f, k_l, live, F, WHOLE), live, f < F, FEATURES)
        v = load_rows(V, j, d, v_l, live, D, BLOCK_D)
        if SCALED:
            k *= fade(tl.load(KEY_SCALE + j, mask=live, other=0.0) - top)[:, None]
            v_sum += tl.sum(v.to(tl.float32), 0)
            tokens += tl.sum(live.to(tl.float32), 0)
        k = operand(k, BF16)
        state = tl.dot(tl.trans(k), operand(v, BF16), state, input_precision=PRECISION)
        norm += tl.sum(k.to(tl.float32), 0)

    store_part(PARTS, state, norm, v_sum, tokens, f0, f, d, F, D, BLOCK_D, SCALED)


@triton.jit
def collect(
    PARTS, TABLE, SUMS, BH, n, PART: tl.constexpr, COLUMNS: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr
):
    """The sum of the n parts of GROUP heads, in order. PACKED: of the parts of each document, at its first chunk."""
    TILES: tl.constexpr = (PART + COLUMNS - 1) // COLUMNS
    bh, work = (tl.program_id(0) % BH).to(tl.int64), tl.program_id(0) // BH
    e = work % TILES * COLUMNS + tl.arange(0, COLUMNS)
    first, count, at = 0, n, bh
    if PACKED:
        first = work // TILES
        if tl.load(TABLE + 8 * first + 4) != first:
            return
        count, at = tl.load(TABLE + 8 * first + 5), bh * n + first
    PARTS += (bh * GROUP * n + first) * PART
    total = tl.zeros([COLUMNS], tl.float32)
    for _ in range(GROUP):
        for c in tl.range(0, count, num_stages=4):
            total += tl.load(PARTS + c * PART + e, mask=e < PART, other=0.0)
        PARTS += n * PART
    tl.store(SUMS + at * PART + e, total, mask=e < PART)


@triton.jit
def own_sums(TABLE, bh, c, n, PACKED: tl.constexpr):
    """The number of the sums for chunk c: those of its head, or those of its document."""
    at = bh.to(tl.int64)
    if PACKED:
        at = at * n + tl.load(TABLE + 8 * c + 4)
    return at


@triton.jit
def product_operand(x, FEATURES: tl.constexpr, BF16: tl.constexpr):
    """Operand of a product with sums over the sequence."""
    return operand(x, BF16 and FEATURES == "given")


@triton.jit
def outputs(
    Q, TABLE, REST, SUMS, OUT, WEIGHT,
    q_b, q_h, q_l, o_b, o_h, o_l,
    BH, H, L, n, epsilon,
    F: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BF: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr,
    FEATURES: tl.constexpr, SCALED: tl.constexpr, BF16: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """WEIGHT is 1 / denominator, 0 without keys. PACKED: tokens in a chunk of packed documents, or 0. GROUP heads share
    SUMS."""
    WHOLE: tl.constexpr = F // BF * BF
    R: tl.constexpr = F + 1 if SCALED else F
    TILES: tl.constexpr = PACKED // ROWS if PACKED else 1
    bh, tile = tl.program_id(0) % BH, tl.program_id(0) // BH
    SUMS += own_sums(TABLE, bh // GROUP, tile // TILES, n, PACKED > 0) * PART
    b, h, bh, first, end = place(TABLE, bh, tile // TILES, H, L, ROWS, PACKED > 0)
    i, d = tile % TILES * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    live = i < end
    Q += b * q_b + h * q_h + first.to(tl.int64) * q_l
    OUT += b * o_b + h * o_h + first.to(tl.int64) * o_l
    at = bh * L + first
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SCALED:
        rest = tl.load(REST + at + i, mask=live, other=0.0)
        acc += rest[:, None] * tl.load(SUMS + F * D + d, mask=d < D, other=0.0)[None, :]
        total += rest * tl.load(SUMS + R * D + F)
    for f0 in range(0, F, BF):
        f = f0 + tl.arange(0, BF)
        q = feature_map(load_rows(Q, i, f, q_l, live, F, WHOLE), live, f < F, FEATURES)
        state = product_operand(load_rows(SUMS, f, d, D, f < F, D, BLOCK_D), FEATURES, BF16)
        acc = tl.dot(product_operand(q, FEATURES, BF16), state, acc, input_precision=PRECISION)
        total += tl.sum(q * tl.load(SUMS + R * D + f, mask=f < F, other=0.0)[None, :], 1)
    weight = tl.where(total > 0, 1.0 / (total + epsilon), 0.0)
    store_rows(OUT, acc * weight[:, None], i, d, o_l, live, D, BLOCK_D)
    tl.store(WEIGHT + at + i, weight, mask=live)
