"""Triton: attention of one tensor z to itself. A tile of z that is loaded once serves as keys and as values.

    s_ij = z_i · z_j      p_ij = exp2(s_ij·scale − lse_i)      out_i = Σ_j p_ij z_j

s is symmetric, so one tile of it holds both what tile i asks of tile j, p_ij, and what j asks of i, p_ji: the same
logits under two normalisers. The gradient of z_i as query, key and value is then one sum over tiles j,

    ds_ij = p_ij (dout_i · z_j − delta_i)      dz_i = Σ_j (ds_ij + ds_ji) z_j / √D + Σ_j p_ji dout_j

taken by one program: no second pass, and nothing to add up between programs. When causal, the tiles before i hold only
p_ij and those after i only p_ji. All logarithms are to base 2: `scale` carries log2(e)/√D.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rows import load_rows, store_rows, valid_rows


@triton.jit
def attend_tile(
    acc, top, total, z, i, Z, MASK, start, L, z_l, d, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BK: tl.constexpr, EDGE: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The running softmax with the keys from `start` on. EDGE: the tile reaches past i or past the end."""
    row = tl.arange(0, BK)
    j = start + row
    live = valid_rows(MASK, j, j < L, HAS_MASK)  # what is masked reads as zero: it may hold anything
    keys = load_rows(Z + tl.cast(start, tl.int64) * z_l, row, d, z_l, live, D, BLOCK_D)
    s = tl.dot(z, tl.trans(keys), input_precision=PRECISION)
    if HAS_MASK or (EDGE and not CAUSAL):
        s = tl.where(live[None, :], s, float("-inf"))
    if EDGE and CAUSAL:
        s = tl.where(j[None, :] <= i[:, None], s, float("-inf"))
    new_top = tl.maximum(top, tl.max(s, 1) * scale)
    shift = new_top
    if HAS_MASK:  # a row that has seen no legal key yet: keep inf - inf out
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(s * scale - shift[:, None])
    old = tl.exp2(top - shift)
    acc = tl.dot(p.to(keys.dtype), keys, acc * old[:, None], input_precision=PRECISION)
    return acc, new_top, total * old + tl.sum(p, 1)


@triton.jit
def attend(
    Z, MASK, OUT, LSE,
    z_b, z_h, z_l, o_b, o_h, o_l,
    BH, H, L, tiles, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(0) % BH
    first = (tiles - 1 - tl.program_id(0) // BH) * BQ  # when causal the last tiles see the most: start them first
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    Z += b * z_b + h * z_h
    OUT += b * o_b + h * o_h
    MASK += b * L
    row = tl.arange(0, BQ)
    i = first + row
    z = load_rows(Z + first.to(tl.int64) * z_l, row, d, z_l, i < L, D, BLOCK_D)
    acc = tl.zeros([BQ, BLOCK_D], tl.float32)
    top = tl.full([BQ], float("-inf"), tl.float32)
    total = tl.zeros([BQ], tl.float32)
    whole = first if CAUSAL else L // BK * BK
    end = tl.minimum(first + BQ, L) if CAUSAL else L
    for start in range(0, whole, BK):
        acc, top, total = attend_tile(
            acc, top, total, z, i, Z, MASK, start, L, z_l, d, scale, D, BLOCK_D, BK, False, CAUSAL, HAS_MASK, PRECISION
        )
    for start in range(whole, end, BK):
        acc, top, total = attend_tile(
            acc, top, total, z, i, Z, MASK, start, L, z_l, d, scale, D, BLOCK_D, BK, True, CAUSAL, HAS_MASK, PRECISION
        )
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    store_rows(OUT + first.to(tl.int64) * o_l, acc / total[:, None], row, d, o_l, i < L, D, BLOCK_D)
    # 0 for a row without keys: it asks nothing of anyone, and the backward masks it out
    tl.store(LSE + bh.to(tl.int64) * L + i, tl.where(empty, 0.0, top + tl.log2(total)), mask=i < L)


@triton.jit
def gradient_tile(
    dz, z, dout, lse, delta, i, real, Z, MASK, DOUT, LSE, DELTA, start, L, z_l, g_l, d, scale, logit_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BK: tl.constexpr, ASKS: tl.constexpr, ASKED: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dz of tile i with what the tile from `start` on sends: ASKS for i as queries, ASKED for i as keys and values.

    Rows past the end hold zeros and an infinite normaliser: they send nothing, and need no condition.
    """
    row = tl.arange(0, BK)
    j = start + row
    at = tl.cast(start, tl.int64)
    other = load_rows(Z + at * z_l, row, d, z_l, j < L, D, BLOCK_D)
    logit = tl.dot(z, tl.trans(other), input_precision=PRECISION) * scale
    ds = tl.zeros([z.shape[0], BK], tl.float32)
    if ASKS:
        p = tl.exp2(logit - lse[:, None])
        if HAS_MASK:
            p = tl.where(valid_rows(MASK, j, j < L, True)[None, :], p, 0.0)
        if CAUSAL and ASKED:  # the diagonal
            p = tl.where(j[None, :] <= i[:, None], p, 0.0)
        ds += p * (tl.dot(dout, tl.trans(other), input_precision=PRECISION) - delta[:, None])
    if ASKED:
        p = tl.exp2(logit - tl.load(LSE + j, mask=j < L, other=float("inf"))[None, :])
        if HAS_MASK:
            p = tl.where(real[:, None], p, 0.0)
        if CAUSAL and ASKS:
            p = tl.where(j[None, :] >= i[:, None], p, 0.0)
        other_dout = load_rows(DOUT + at * g_l, row, d, g_l, j < L, D, BLOCK_D)
        dz = tl.dot(p.to(other_dout.dtype), other_dout, dz, input_precision=PRECISION)
        other_delta = tl.load(DELTA + j, mask=j < L, other=0.0)
        ds += p * (tl.dot(z, tl.trans(other_dout), input_precision=PRECISION) - other_delta[None, :])
    return tl.dot((ds * logit_scale).to(other.dtype), other, dz, input_precision=PRECISION)


@triton.jit
def gradients(
    Z, MASK, DOUT, LSE, DELTA, DZ,
    z_b, z_h, z_l, g_b, g_h, g_l, dz_b, dz_h, dz_l,
    BH, H, L, scale, logit_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(0) % BH
    first = tl.program_id(0) // BH * BQ
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    Z += b * z_b + h * z_h
    DOUT += b * g_b + h * g_h
    DZ += b * dz_b + h * dz_h
    MASK += b * L
    LSE += bh.to(tl.int64) * L
    DELTA += bh.to(tl.int64) * L
    row = tl.arange(0, BQ)
    i = first + row
    z = load_rows(Z + first.to(tl.int64) * z_l, row, d, z_l, i < L, D, BLOCK_D)
    dout = load_rows(DOUT + first.to(tl.int64) * g_l, row, d, g_l, i < L, D, BLOCK_D)
    lse = tl.load(LSE + i, mask=i < L, other=float("inf"))
    delta = tl.load(DELTA + i, mask=i < L, other=0.0)
    real = valid_rows(MASK, i, i < L, HAS_MASK)
    dz = tl.zeros([BQ, BLOCK_D], tl.float32)
    if CAUSAL:
        for start in range(0, first, BK):
            dz = gradient_tile(
                dz, z, dout, lse, delta, i, real, Z, MASK, DOUT, LSE, DELTA, start, L, z_l, g_l, d, scale, logit_scale,
                D, BLOCK_D, BK, True, False, CAUSAL, HAS_MASK, PRECISION,
            )  # fmt: skip
        for start in range(first, tl.minimum(first + BQ, L), BK):
            dz = gradient_tile(
                dz, z, dout, lse, delta, i, real, Z, MASK, DOUT, LSE, DELTA, start, L, z_l, g_l, d, scale, logit_scale,
                D, BLOCK_D, BK, True, True, CAUSAL, HAS_MASK, PRECISION,
            )  # fmt: skip
        for start in range(first + BQ, L, BK):
            dz = gradient_tile(
                dz, z, dout, lse, delta, i, real, Z, MASK, DOUT, LSE, DELTA, start, L, z_l, g_l, d, scale, logit_scale,
                D, BLOCK_D, BK, False, True, CAUSAL, HAS_MASK, PRECISION,
            )  # fmt: skip
    else:
        for start in range(0, L, BK):
            dz = gradient_tile(
                dz, z, dout, lse, delta, i, real, Z, MASK, DOUT, LSE, DELTA, start, L, z_l, g_l, d, scale, logit_scale,
                D, BLOCK_D, BK, True, True, CAUSAL, HAS_MASK, PRECISION,
            )  # fmt: skip
    store_rows(DZ + first.to(tl.int64) * dz_l, dz, row, d, dz_l, i < L, D, BLOCK_D)
