"""Triton kernels: forward pass. The contribution of each chunk to the running sums, the sums before each chunk, and
the outputs.

    S_c = Σ_{j in chunk c} φ(k_j) v_jᵀ          z_c = Σ_{j in chunk c} φ(k_j)                       `chunk_states`
    before_c = Σ_{c' < c} S_c', z likewise                                                          `running_sums`
    out_i = (Σ_{j ≤ i in the chunk} (φ(q_i)·φ(k_j)) v_j + φ(q_i)·before_c) / (the same with v = 1)  `outputs`

With SCALED, key j is weighted by e^{m_j - G_i} with non-decreasing G, and rest_i is added to the product φ(q_i)·φ(k_j)
of every pair (i, j) (see `kernel.py`). The state of a chunk is relative to e^{G at the end of the chunk}. The plain
sums of v, which `rest` needs, are one more row of the state and do not decay.

The sums are linear in the features, so features are processed in tiles of BF, and any number fits. bfloat16 tensors are
multiplied in bfloat16. float16 tensors are multiplied as tf32, which is as accurate and has range for long sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..rows import load_rows, place, store_rows, valid_rows


@triton.jit
def feature_map(x, live, real, FEATURES: tl.constexpr):
    """φ in float32; zero for rows that are not live and columns that are not real."""
    x = x.to(tl.float32)
    if FEATURES != "given":
        if FEATURES == "elu":
            x = tl.where(x > 0, x + 1.0, tl.exp(tl.minimum(x, 0.0)))
        else:
            x = tl.maximum(x, 0.0) + 1e-3
        x = tl.where(live[:, None] & real[None, :], x, 0.0)  # φ(0) is not 0
    return x


@triton.jit
def operand(x, BF16: tl.constexpr):
    """Cast to the dtype for the matrix units."""
    return x.to(tl.bfloat16 if BF16 else tl.float32)


@triton.jit
def fade(x):
    """e^x for a difference of scales. x is positive only if there is nothing to scale."""
    return tl.exp(tl.minimum(x, 0.0))


@triton.jit
def chunk_end(TOP, c, L, CHUNK: tl.constexpr):
    """The scale G at the end of chunk c; 0 before the first."""
    at = tl.minimum((c + 1) * CHUNK, L) - 1
    return tl.load(TOP + tl.maximum(at, 0), mask=c >= 0, other=0.0)


@triton.jit
def empty_part(BF: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr):
    """A tile of S and of z, and the sums of v and of 1, before the first key."""
    tokens = tl.sum(tl.zeros([ROWS], tl.float32), 0)
    return tl.zeros([BF, BLOCK_D], tl.float32), tl.zeros([BF], tl.float32), tl.zeros([BLOCK_D], tl.float32), tokens


@triton.jit
def store_part(
    PARTS, state, norm, v_sum, tokens, f0, f, d,
    F: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Features f of a part: the R = F (+1) rows of S, then z. The last row and number are the sums of v and of 1."""
    R: tl.constexpr = F + 1 if SCALED else F
    store_rows(PARTS, state, f, d, D, f < F, D, BLOCK_D)
    tl.store(PARTS + R * D + f, norm, mask=f < F)
    if SCALED:
        if f0 == 0:
            tl.store(PARTS + F * D + d, v_sum, mask=d < D)
            tl.store(PARTS + R * D + F, tokens)


@triton.jit
def chunk_states(
    K, V, MASK, TABLE, KEY_SCALE, TOP, PARTS,
    k_b, k_h, k_l, v_b, v_h, v_l,
    BH, H, L, n,
    F: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BF: tl.constexpr, ROWS: tl.constexpr,
    PART: tl.constexpr, CHUNK: tl.constexpr, FEATURES: tl.constexpr, SCALED: tl.constexpr, HAS_MASK: tl.constexpr,
    BF16: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr,
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
    TOP += bh * L
    KEY_SCALE += bh * L + first

    state, norm, v_sum, tokens = empty_part(BF, BLOCK_D, ROWS)
    for start in range(0, end, ROWS):
        j = start + tl.arange(0, ROWS)
        live = valid_rows(MASK, j, j < end, HAS_MASK)
        k = feature_map(load_rows(K, j, f, k_l, live, F, WHOLE), live, f < F, FEATURES)
        v = load_rows(V, j, d, v_l, live, D, BLOCK_D)
        if SCALED:
            scale = tl.load(KEY_SCALE + j, mask=live, other=0.0)
            k *= fade(scale - chunk_end(TOP, c, L, CHUNK))[:, None]
            v_sum += tl.sum(v.to(tl.float32), 0)
            tokens += tl.sum(live.to(tl.float32), 0)
        k = operand(k, BF16)
        state = tl.dot(tl.trans(k), operand(v, BF16), state, input_precision=PRECISION)
        norm += tl.sum(k.to(tl.float32), 0)

    store_part(PARTS, state, norm, v_sum, tokens, f0, f, d, F, D, BLOCK_D, SCALED)


@triton.jit
def running_sums(
    PARTS, TABLE, SUMS, NORMS,
    BH, n,
    F: tl.constexpr, D: tl.constexpr, PART: tl.constexpr, COLUMNS: tl.constexpr, REVERSE: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """For every chunk, the sum of the PARTS before it (REVERSE: after it), for COLUMNS elements of the state at a time:
    SUMS (B·H, n, F, D) in the dtype of the matrix units, and NORMS (B·H, n, F), float32. It processes 16 chunks at
    once, as a triangular matrix times the parts: a small state has too few columns to fill the GPU one by one. PACKED:
    the sums are those of each document."""
    bh = (tl.program_id(0) % BH).to(tl.int64)
    e = tl.program_id(0) // BH * COLUMNS + tl.arange(0, COLUMNS)
    u = tl.arange(0, 16)
    earlier = tl.where(u[None, :] < u[:, None], 1.0, 0.0)
    PARTS += bh * n * PART
    carry = tl.zeros([COLUMNS], tl.float32)
    document = tl.sum(tl.zeros([16], tl.int32), 0) - 2  # whose parts are carried
    for start in range(0, n, 16):
        t = start + u
        c = (n - 1 - t if REVERSE else t).to(tl.int64)
        x = tl.load(
            PARTS + c[:, None] * PART + e[None, :],
            mask=(t < n - 1)[:, None] & (e < PART)[None, :],  # no chunk follows the last
            other=0.0,
        )
        if PACKED:
            own = tl.load(TABLE + 8 * c + 3, mask=t < n, other=-1)
            before = tl.where(own[None, :] == own[:, None], earlier, 0.0)
            total = tl.dot(before, x, input_precision="ieee")
            total += tl.where((own == document)[:, None], carry[None, :], 0.0)
            last = tl.sum(tl.where(u == 15, own, 0), 0)
            carry = tl.where(last == document, carry, 0.0) + tl.sum(tl.where((own == last)[:, None], x, 0.0), 0)
            document = last
        else:
            total = tl.dot(earlier, x, input_precision="ieee") + carry[None, :]
            carry += tl.sum(x, 0)
        store_sums(SUMS, NORMS, total, (bh * n + c)[:, None], e[None, :], (t < n)[:, None], F, D)


@triton.jit
def store_sums(SUMS, NORMS, x, row, e, live, R: tl.constexpr, D: tl.constexpr):
    """Elements e of the states of chunks `row`: R rows of the state, then its norms."""
    tl.store(SUMS + row * R * D + e, x.to(SUMS.dtype.element_ty), mask=live & (e < R * D))
    tl.store(NORMS + row * R + (e - R * D), x, mask=live & (e >= R * D) & (e < R * (D + 1)))


@triton.jit
def scale_gap(TOP, c, L, CHUNK: tl.constexpr):
    """Increase of the scale within chunk c, as the logarithm of the decay."""
    return chunk_end(TOP, c - 1, L, CHUNK) - chunk_end(TOP, c, L, CHUNK)


@triton.jit
def scaled_running_sums(
    PARTS, TOP, SUMS, NORMS,
    BH, L, n,
    F: tl.constexpr, D: tl.constexpr, PART: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, REVERSE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """`running_sums` of the scaled form, one chunk after the other. A part is relative to the scale at the end of its
    chunk where the next sum starts, so only the sum decays. GROUP heads share TOP."""
    R: tl.constexpr = F + 1
    bh = (tl.program_id(0) % BH).to(tl.int64)
    e = tl.program_id(0) // BH * COLUMNS + tl.arange(0, COLUMNS)
    fades = (e // D != F) & (e != R * D + F)
    TOP += bh // GROUP * L
    PARTS += bh * n * PART
    carry = tl.zeros([COLUMNS], tl.float32)
    gap = scale_gap(TOP, n - 1 if REVERSE else 0, L, CHUNK)
    for t in tl.range(0, n - 1, num_stages=STAGES):
        c = n - 1 - t if REVERSE else t
        ahead = scale_gap(TOP, c - 1 if REVERSE else c + 1, L, CHUNK)  # prefetch
        x = tl.load(PARTS + c.to(tl.int64) * PART + e, mask=e < PART, other=0.0)
        store_sums(SUMS, NORMS, carry, bh * n + c, e, e < PART, R, D)
        carry = carry * tl.where(fades, fade(gap), 1.0) + x
        gap = ahead
    store_sums(SUMS, NORMS, carry, bh * n + (0 if REVERSE else n - 1), e, e < PART, R, D)


@triton.jit
def outputs(
    Q, K, V, MASK, TABLE, KEY_SCALE, TOP, REST, BEFORE, BEFORE_NORM, OUT, WEIGHT,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, o_b, o_h, o_l,
    BH, H, L, n, epsilon,
    F: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BF: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    CHUNK: tl.constexpr, CARRIED: tl.constexpr, FEATURES: tl.constexpr, SCALED: tl.constexpr, HAS_MASK: tl.constexpr,
    BF16: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Outputs of a tile of queries from the earlier keys of its chunk and the sums of earlier chunks. WEIGHT is 1 /
    denominator, 0 for queries without keys."""
    WHOLE: tl.constexpr = F // BF * BF
    R: tl.constexpr = F + 1 if SCALED else F
    bh = tl.program_id(0) % BH
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // BH  # last first: `chunk_states` has just read these keys
    c = tile * BQ // CHUNK
    at = (bh // GROUP).to(tl.int64) * n + c
    b, h, bh, first, end = place(TABLE, bh, c, H, L, CHUNK, PACKED)
    d = tl.arange(0, BLOCK_D)
    Q += b * q_b + h * q_h + first.to(tl.int64) * q_l
    K += b * k_b + h // GROUP * k_h + first.to(tl.int64) * k_l
    V += b * v_b + h // GROUP * v_h + first.to(tl.int64) * v_l
    OUT += b * o_b + h * o_h + first.to(tl.int64) * o_l
    MASK += b * L + first
    BEFORE += at * R * D
    BEFORE_NORM += at * R

    q_first = tile * BQ - c * CHUNK
    i = q_first + tl.arange(0, BQ)
    acc = tl.zeros([BQ, BLOCK_D], tl.float32)
    total = tl.zeros([BQ], tl.float32)
    if SCALED:
        KEY_SCALE += bh // GROUP * L + first
        TOP += bh // GROUP * L
        top = tl.load(TOP + first + i, mask=i < end, other=0.0)
        rest = tl.load(REST + bh * L + first + i, mask=i < end, other=0.0)
        if CARRIED:
            acc += rest[:, None] * tl.load(BEFORE + F * D + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
            total += rest * tl.load(BEFORE_NORM + F)
    for f0 in range(0, F, BF):
        f = f0 + tl.arange(0, BF)
        q = operand(feature_map(load_rows(Q, i, f, q_l, i < end, F, WHOLE), i < end, f < F, FEATURES), BF16)
        if CARRIED:
            far = q
            if SCALED:
                far = operand(q.to(tl.float32) * fade(chunk_end(TOP, c - 1, L, CHUNK) - top)[:, None], BF16)
            acc = tl.dot(far, load_rows(BEFORE, f, d, D, f < F, D, BLOCK_D), acc, input_precision=PRECISION)
            norm = tl.load(BEFORE_NORM + f, mask=f < F, other=0.0)
            total += tl.sum(far.to(tl.float32) * norm[None, :], 1)
        for start in range(0, tl.minimum(q_first + BQ, end), BK):
            j = start + tl.arange(0, BK)
            live = valid_rows(MASK, j, j < end, HAS_MASK)
            k = operand(feature_map(load_rows(K, j, f, k_l, live, F, WHOLE), live, f < F, FEATURES), BF16)
            v = operand(load_rows(V, j, d, v_l, live, D, BLOCK_D), BF16)
            p = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if SCALED:
                scale = tl.load(KEY_SCALE + j, mask=live, other=0.0)
                p = p * fade(scale[None, :] - top[:, None])
                p += tl.where(live[None, :], tl.where(f0 == 0, rest, 0.0)[:, None], 0.0)
            p = tl.where(j[None, :] <= i[:, None], p, 0.0)
            total += tl.sum(p, 1)
            acc = tl.dot(operand(p, BF16), v, acc, input_precision=PRECISION)
    weight = tl.where(total > 0, 1.0 / (total + epsilon), 0.0)
    store_rows(OUT, acc * weight[:, None], i, d, o_l, i < end, D, BLOCK_D)
    tl.store(WEIGHT + bh * L + first + i, weight, mask=i < end)
