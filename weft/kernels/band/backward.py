"""Triton kernels: backward pass. No atomics: sums have a fixed order, so results are bitwise reproducible.

    delta_i = Σ_d dout_id out_id        p_ij = exp2(s_ij − lse_i)        ds_ij = p_ij (dout_i · v_j − delta_i)
    dq_i = Σ_j ds_ij k_j / √D           dk_j = Σ_i ds_ij q_i / √D        dv_j = Σ_i p_ij dout_i

`query_gradients` loops over the keys of the forward for a tile of queries. `key_gradients` loops over the near queries
for a tile of keys, and starts from the result of `extra_gradients` for keys that are extras. `extra_gradients` loops
over the queries that attend to a tile of extras, in chunks, so that every multiprocessor has work.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..random import kept, row_words
from ..rows import load_rows, store_rows, valid_rows
from ..softmax import add_to_dk_dv, add_to_dq, probabilities
from .forward import (
    NOWHERE,
    extra_position,
    other_tile,
    place_tile,
    row_bounds,
    seen_range,
    seen_tile,
    whole_tile,
    whole_tiles,
)


@triton.jit
def query_gradients(
    Q, K, V, MASK, TABLE, KEY, OUT, DOUT, LSE, DELTA, DQ,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, g_b, g_h, g_l, o_b, o_h, o_l, dq_b, dq_h, dq_l,
    BH, H, L, m, n, left, right, threshold, scale, logit_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    EXTRAS: tl.constexpr, LEADING: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
    PRECISION: tl.constexpr, DROPOUT: tl.constexpr, GROUP: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """dq, and delta_i = Σ_d dout_id out_id for the other kernels."""
    bh = tl.program_id(0) % BH
    tile = tl.program_id(0) // BH
    if CAUSAL and EXTRAS == "columns":
        tile = n * ((m + BQ - 1) // BQ) - 1 - tile
    block, b, h, bh, first, end, q_first = place_tile(TABLE, tile, BQ, bh, H, L, m, PACKED)
    d = tl.arange(0, BLOCK_D)
    Q += b * q_b + h * q_h + first.to(tl.int64) * q_l
    K += b * k_b + h // GROUP * k_h + first.to(tl.int64) * k_l
    V += b * v_b + h // GROUP * v_h + first.to(tl.int64) * v_l
    DOUT += b * g_b + h * g_h + first.to(tl.int64) * g_l
    DQ += b * dq_b + h * dq_h + first.to(tl.int64) * dq_l
    MASK += b * L + first

    i = q_first + tl.arange(0, BQ)
    q = load_rows(Q, i, d, q_l, i < end, D, BLOCK_D)
    dout = load_rows(DOUT, i, d, g_l, i < end, D, BLOCK_D)
    lse = tl.load(LSE + bh * L + first + i, mask=i < end, other=0.0)
    OUT += b * o_b + h * o_h + first.to(tl.int64) * o_l
    delta = tl.sum(load_rows(OUT, i, d, o_l, i < end, D, BLOCK_D).to(tl.float32) * dout.to(tl.float32), 1)
    tl.store(DELTA + bh * L + first + i, delta, mask=i < end)
    dq = tl.zeros([BQ, BLOCK_D], tl.float32)
    word = row_words(KEY, bh, first + i, DROPOUT)
    low, high, extras = seen_range(q_first, block, end, n, left, right, BQ, C, EXTRAS, CAUSAL)
    row_low, row_high = row_bounds(i, end, left, right, C, EXTRAS, CAUSAL)
    near_tiles = (high - low + BK - 1) // BK
    start, stop, extra = whole_tiles(
        q_first, end, left, right, low, near_tiles, extras, BQ, BK, EXTRAS, CAUSAL, HAS_MASK
    )
    whole = stop - start + extra
    if not HAS_MASK:
        for t in range(0, whole):
            j = whole_tile(t, start, stop - start, low, first, m, BK, C, EXTRAS, LEADING)
            k = load_rows(K, j, d, k_l, None, D, BLOCK_D)
            v = load_rows(V, j, d, v_l, None, D, BLOCK_D)
            factor = kept(word[:, None], (first + j)[None, :], threshold, DROPOUT)
            p = probabilities(q, k, lse[:, None], None, scale, PRECISION)
            dq = add_to_dq(dq, p, factor, k, v, dout, delta, PRECISION)
    for u in range(0, near_tiles + (extras + BK - 1) // BK - whole):
        t = other_tile(u, start, stop, near_tiles, extra)
        j, live, allowed = seen_tile(t, near_tiles, low, high, extras, i, row_low, row_high, block, first, m, L, MASK,
                                     BK, C, EXTRAS, LEADING, CAUSAL, HAS_MASK)  # fmt: skip
        k = load_rows(K, j, d, k_l, live, D, BLOCK_D)
        v = load_rows(V, j, d, v_l, live, D, BLOCK_D)
        factor = kept(word[:, None], (first + j)[None, :], threshold, DROPOUT)
        p = probabilities(q, k, lse[:, None], allowed, scale, PRECISION)
        dq = add_to_dq(dq, p, factor, k, v, dout, delta, PRECISION)
    store_rows(DQ, dq * logit_scale, i, d, dq_l, i < end, D, BLOCK_D)


@triton.jit
def extra_gradients(
    Q, K, V, MASK, KEY, DOUT, LSE, DELTA, EXTRA_K, EXTRA_V,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, g_b, g_h, g_l,
    BH, H, L, m, count, chunk, threshold, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    EXTRAS: tl.constexpr, LEADING: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
    PRECISION: tl.constexpr, DROPOUT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Gradients of BK extras from the queries of one chunk; EXTRA_K, EXTRA_V are (B·H, chunks, count, D), float32."""
    bh = tl.program_id(0) % BH
    extra_tiles = (count + BK - 1) // BK
    rest = tl.program_id(0) // BH
    e_first, c = rest % extra_tiles * BK, rest // extra_tiles
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    Q += b * q_b + h * q_h
    K += b * k_b + h // GROUP * k_h
    V += b * v_b + h // GROUP * v_h
    DOUT += b * g_b + h * g_h
    LSE += bh.to(tl.int64) * L
    DELTA += bh.to(tl.int64) * L
    e = e_first + tl.arange(0, BK)
    x = extra_position(e, m, C, EXTRAS, LEADING)
    real = valid_rows(MASK + b * L, x, (e < count) & (x < L), HAS_MASK)
    k = load_rows(K, x, d, k_l, real, D, BLOCK_D)
    v = load_rows(V, x, d, v_l, real, D, BLOCK_D)
    dk = tl.zeros([BK, BLOCK_D], tl.float32)
    dv = tl.zeros([BK, BLOCK_D], tl.float32)
    start, stop = c * chunk, tl.minimum((c + 1) * chunk, L)
    if CAUSAL:  # no earlier query attends to the first of these extras
        start = tl.maximum(start, (e_first // C + 1) * m if EXTRAS == "columns" else e_first)
    for begin in range(start, stop, BQ):
        i = begin + tl.arange(0, BQ)
        live = i < stop
        q = load_rows(Q, i, d, q_l, live, D, BLOCK_D)
        dout = load_rows(DOUT, i, d, g_l, live, D, BLOCK_D)
        lse = tl.load(LSE + i, mask=live, other=0.0)
        delta = tl.load(DELTA + i, mask=live, other=0.0)
        allowed = real[:, None] & live[None, :]
        if EXTRAS == "columns":
            own, asking = (e // C)[:, None], (i // m)[None, :]
            allowed = allowed & ((own < asking) if CAUSAL else (own != asking))
        elif CAUSAL:
            allowed = allowed & (x[:, None] <= i[None, :])
        word = row_words(KEY, bh, i, DROPOUT)
        factor = kept(word[None, :], x[:, None], threshold, DROPOUT)
        p = probabilities(k, q, lse[None, :], allowed, scale, PRECISION)
        dk, dv = add_to_dk_dv(dk, dv, p, factor, v, q, dout, delta, PRECISION)
    at = (bh.to(tl.int64) * ((L + chunk - 1) // chunk) + c) * count * D
    store_rows(EXTRA_K + at, dk, e, d, D, e < count, D, BLOCK_D)
    store_rows(EXTRA_V + at, dv, e, d, D, e < count, D, BLOCK_D)


@triton.jit
def key_gradients(
    Q, K, V, MASK, TABLE, KEY, DOUT, LSE, DELTA, EXTRA_K, EXTRA_V, DK, DV,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, g_b, g_h, g_l, dk_b, dk_h, dk_l, dv_b, dv_h, dv_l,
    BH, H, L, m, left, right, count, chunks, threshold, scale, logit_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    EXTRAS: tl.constexpr, LEADING: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
    PRECISION: tl.constexpr, DROPOUT: tl.constexpr, GROUP: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    bh, tile = tl.program_id(0) % BH, tl.program_id(0) // BH
    block, b, h, bh, first, end, k_first = place_tile(TABLE, tile, BK, bh, H, L, m, PACKED)
    d = tl.arange(0, BLOCK_D)
    Q += b * q_b + h * q_h + first.to(tl.int64) * q_l
    K += b * k_b + h // GROUP * k_h + first.to(tl.int64) * k_l
    V += b * v_b + h // GROUP * v_h + first.to(tl.int64) * v_l
    DOUT += b * g_b + h * g_h + first.to(tl.int64) * g_l
    DK += b * dk_b + h * dk_h + first.to(tl.int64) * dk_l
    DV += b * dv_b + h * dv_h + first.to(tl.int64) * dv_l
    LSE += bh * L + first
    DELTA += bh * L + first

    j = k_first + tl.arange(0, BK)
    real = valid_rows(MASK + b * L + first, j, j < end, HAS_MASK)
    k = load_rows(K, j, d, k_l, real, D, BLOCK_D)
    v = load_rows(V, j, d, v_l, real, D, BLOCK_D)
    dk = tl.zeros([BK, BLOCK_D], tl.float32)
    dv = tl.zeros([BK, BLOCK_D], tl.float32)
    if EXTRAS != "none":
        e, extra = j, j < tl.minimum(C, end)
        if EXTRAS == "columns":
            e, extra = j - (m - C), (j >= m - C + (1 if LEADING else 0)) & (j < end)
            if LEADING:
                e, extra = tl.where(j == 0, 0, e), extra | (j == 0)
            e += block * C
        for c in range(0, chunks):
            at = (bh * chunks + c) * count * D
            dk += load_rows(EXTRA_K + at, e, d, D, extra, D, BLOCK_D)
            dv += load_rows(EXTRA_V + at, e, d, D, extra, D, BLOCK_D)

    low, high = tl.maximum(k_first - right, 0), tl.minimum(k_first + BK + left, end)
    near_tiles = (high - low + BQ - 1) // BQ
    far_tiles = 0
    if EXTRAS == "first":
        real = real & (j >= C)  # the first tokens are not in the windows
        if not CAUSAL:  # and attend to every key
            far_tiles = (tl.minimum(low, C) + BQ - 1) // BQ
    start, stop, _ = whole_tiles(k_first, end, right, left, low, near_tiles, 0, BK, BQ, "none", CAUSAL, HAS_MASK)
    if EXTRAS == "first":
        stop = tl.where(k_first < C, start, stop)
    if not HAS_MASK:
        for t in range(start, stop):
            i = low + t * BQ + tl.arange(0, BQ)
            q = load_rows(Q, i, d, q_l, None, D, BLOCK_D)
            dout = load_rows(DOUT, i, d, g_l, None, D, BLOCK_D)
            lse, delta = tl.load(LSE + i), tl.load(DELTA + i)
            word = row_words(KEY, bh, first + i, DROPOUT)
            factor = kept(word[None, :], (first + j)[:, None], threshold, DROPOUT)
            p = probabilities(k, q, lse[None, :], None, scale, PRECISION)
            dk, dv = add_to_dk_dv(dk, dv, p, factor, v, q, dout, delta, PRECISION)
    at_key = tl.where(real, j, NOWHERE)  # outside every window
    for u in range(0, near_tiles + far_tiles - (stop - start)):
        t = other_tile(u, start, stop, near_tiles, 0)
        i = low + t * BQ + tl.arange(0, BQ)
        live = i < high
        if EXTRAS == "first" and not CAUSAL:
            near = t < near_tiles
            i = tl.where(near, i, (t - near_tiles) * BQ + tl.arange(0, BQ))
            live = tl.where(near, live, i < tl.minimum(low, C))
        q = load_rows(Q, i, d, q_l, live, D, BLOCK_D)
        dout = load_rows(DOUT, i, d, g_l, live, D, BLOCK_D)
        lse = tl.load(LSE + i, mask=live, other=float("inf"))  # no query: no probability
        delta = tl.load(DELTA + i, mask=live, other=0.0)
        allowed = (at_key[:, None] >= (i - left)[None, :]) & (at_key[:, None] <= (i + right)[None, :])
        if EXTRAS == "first" and not CAUSAL:
            allowed = allowed | (real[:, None] & (i < C)[None, :])
        word = row_words(KEY, bh, first + i, DROPOUT)
        factor = kept(word[None, :], (first + j)[:, None], threshold, DROPOUT)
        p = probabilities(k, q, lse[None, :], allowed, scale, PRECISION)
        dk, dv = add_to_dk_dv(dk, dv, p, factor, v, q, dout, delta, PRECISION)
    store_rows(DK, dk * logit_scale, j, d, dk_l, j < end, D, BLOCK_D)
    store_rows(DV, dv, j, d, dv_l, j < end, D, BLOCK_D)
