"""Triton kernels: backward pass. No atomics: sums have a fixed order, so results are bitwise reproducible.

    delta_i = Σ_d dout_id out_id
    p_is = exp2(logit_is - lse_i)            ds_is = p_is (dout_i · v_s - delta_i)
    dq_i = Σ_s ds_is k_s / √D                dk_s = Σ_i ds_is q_i / √D              dv_s = Σ_i p_is dout_i

`query_gradients` loops over the same sources as the forward for a tile of targets, and also computes delta.
`key_gradients` loops over the targets of a window for a tile of its sources, from the first target that may attend to
them. A source may be in several windows: each window writes its own rows, and `collect` adds the rows of a token in
window order. If no source is in two windows (`ONCE`), the rows are written directly to their tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.random import kept, row_words
from ...kernels.rows import load_rows, store_rows
from .forward import absolute, biased, next_sources, seen_sources, target_rows


@triton.jit
def query_tile(
    q, word, dout, dq, lse, delta, K, V, pos, slot, seen, i, d, k_l, v_l, reference, slope, threshold, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, EDGE: tl.constexpr, CAUSAL: tl.constexpr,
    ALIBI: tl.constexpr, PRECISION: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    here = slot < seen if EDGE else None
    k = load_rows(K, pos.to(tl.int64), d, k_l, here, D, BLOCK_D)
    v = load_rows(V, pos.to(tl.int64), d, v_l, here, D, BLOCK_D)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
    dp *= kept(word[:, None], slot[None, :], threshold, DROPOUT)
    p = tl.exp2(biased(s, i, pos, reference, slope, scale, CAUSAL, ALIBI) - lse[:, None])
    if EDGE:
        allowed = (slot < seen)[None, :]
        if CAUSAL:
            allowed = allowed & (pos[None, :] <= i[:, None])
        p = tl.where(allowed, p, 0.0)
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit
def query_gradients(
    Q, K, V, SOURCES, FIRST, TARGETS, SLOPES, KEY, OUT, DOUT, LSE, DELTA, DQ,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, o_b, o_h, o_l, g_b, g_h, g_l, dq_b, dq_h, dq_l,
    BH, H, L, W, P, S, threshold, scale, logit_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr, ALIBI: tl.constexpr, GRID: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
    DROPOUT: tl.constexpr,
):  # fmt: skip
    bh, tile = tl.program_id(0) % BH, tl.program_id(0) // BH
    w = tile % W
    start = ((P + BQ - 1) // BQ - 1 - tile // W) * BQ
    if not GRID:
        if w * P + start >= L:  # padding: the sequence has no such targets
            return
    i = target_rows(TARGETS, w, start, P, L, BQ, GRID)
    live = i < L
    row = i.to(tl.int64)
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    K += b * k_b + h // GROUP * k_h
    V += b * v_b + h // GROUP * v_h
    LSE += bh.to(tl.int64) * L
    DELTA += bh.to(tl.int64) * L
    if HAS_MASK:
        SOURCES += b * W * S
        FIRST += b * W * (L + 1)
    SOURCES += w * S
    reference = w * P + start
    slope = tl.load(SLOPES + h) if ALIBI else 0.0

    word = row_words(KEY, bh, i, DROPOUT)
    q = load_rows(Q + b * q_b + h * q_h, row, d, q_l, live, D, BLOCK_D)
    dout = load_rows(DOUT + b * g_b + h * g_h, row, d, g_l, live, D, BLOCK_D)
    out = load_rows(OUT + b * o_b + h * o_h, row, d, o_l, live, D, BLOCK_D)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    tl.store(DELTA + i, delta, mask=live)
    lse = absolute(tl.load(LSE + i, mask=live, other=float("inf")), i, reference, -slope, CAUSAL, ALIBI)
    dq = tl.zeros([BQ, BLOCK_D], tl.float32)
    by_all, seen = seen_sources(FIRST, w, start, P, L, BQ, CAUSAL)
    inner = by_all // BK * BK
    slot = tl.arange(0, BK)
    pos = tl.load(SOURCES + slot, mask=slot < S, other=0)
    for first in range(0, inner, BK):
        ahead = next_sources(SOURCES, first + slot, S, BK)
        dq = query_tile(
            q, word, dout, dq, lse, delta, K, V, pos, first + slot, seen, i, d, k_l, v_l, reference, slope, threshold,
            scale, D, BLOCK_D, False, CAUSAL, ALIBI, PRECISION, DROPOUT,
        )  # fmt: skip
        pos = ahead
    for first in tl.range(inner, seen, BK, num_stages=1):
        ahead = next_sources(SOURCES, first + slot, S, BK)
        dq = query_tile(
            q, word, dout, dq, lse, delta, K, V, pos, first + slot, seen, i, d, k_l, v_l, reference, slope, threshold,
            scale, D, BLOCK_D, True, CAUSAL, ALIBI, PRECISION, DROPOUT,
        )  # fmt: skip
        pos = ahead
    store_rows(DQ + b * dq_b + h * dq_h, dq * logit_scale, row, d, dq_l, live, D, BLOCK_D)


@triton.jit
def key_tile(
    k, v, dk, dv, Q, DOUT, LSE, DELTA, TARGETS, KEY, bh, w, start, P, L, pos, slot, d, q_l, g_l, slope, threshold,
    scale, D: tl.constexpr, BLOCK_D: tl.constexpr, BQ: tl.constexpr, EDGE: tl.constexpr, CAUSAL: tl.constexpr,
    ALIBI: tl.constexpr, GRID: tl.constexpr, PRECISION: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Computed as (sources, targets), so that the next two products read the probabilities from registers. EDGE: some
    targets do not exist or do not attend to all of these sources."""
    reference = w * P + start
    if EDGE:
        i = target_rows(TARGETS, w, start, P, L, BQ, GRID)
        q = load_rows(Q, i.to(tl.int64), d, q_l, i < L, D, BLOCK_D)
        dout = load_rows(DOUT, i.to(tl.int64), d, g_l, i < L, D, BLOCK_D)
        lse = tl.load(LSE + i, mask=i < L, other=float("inf"))  # p = 0 for a target that does not exist
        delta = tl.load(DELTA + i, mask=i < L, other=0.0)
    else:
        row = tl.arange(0, BQ)
        i = reference + row
        q = load_rows(Q + reference.to(tl.int64) * q_l, row, d, q_l, None, D, BLOCK_D)
        dout = load_rows(DOUT + reference.to(tl.int64) * g_l, row, d, g_l, None, D, BLOCK_D)
        lse = tl.load(LSE + i)
        delta = tl.load(DELTA + i)
    s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
    logit = s * scale
    if ALIBI and CAUSAL:
        logit += (slope * (pos - reference).to(tl.float32))[:, None]
    elif ALIBI:
        logit -= slope * tl.abs(i[None, :] - pos[:, None]).to(tl.float32)
    p = tl.exp2(logit - absolute(lse, i, reference, -slope, CAUSAL, ALIBI)[None, :])
    if EDGE and CAUSAL:
        p = tl.where(pos[:, None] <= i[None, :], p, 0.0)
    factor = kept(row_words(KEY, bh, i, DROPOUT)[None, :], slot[:, None], threshold, DROPOUT)
    dv = tl.dot((p * factor).to(dout.dtype), dout, dv, input_precision=PRECISION)
    ds = p * (dp * factor - delta[None, :])
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def key_gradients(
    Q, K, V, SOURCES, FIRST, TARGETS, SLOPES, KEY, DOUT, LSE, DELTA, PART_K, PART_V,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, g_b, g_h, g_l, dk_b, dk_h, dk_l, dv_b, dv_h, dv_l,
    BH, H, L, W, P, S, threshold, scale, logit_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr, ALIBI: tl.constexpr, GRID: tl.constexpr, ONCE: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """PART_K and PART_V: rows per token if ONCE, else per slot of a window, (B, H, W · S, D)."""
    bh, tile = tl.program_id(0) % BH, tl.program_id(0) // BH
    w, k_first = tile % W, tile // W * BK  # the first sources of a window have the most targets: start them first
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    if HAS_MASK:
        SOURCES += b * W * S
        FIRST += b * W * (L + 1)
    real = tl.load(FIRST + w * (L + 1) + L)
    if k_first >= real:  # these rows are never read
        return
    d = tl.arange(0, BLOCK_D)
    Q += b * q_b + h * q_h
    DOUT += b * g_b + h * g_h
    LSE += bh.to(tl.int64) * L
    DELTA += bh.to(tl.int64) * L
    slope = tl.load(SLOPES + h) if ALIBI else 0.0

    slot = k_first + tl.arange(0, BK)
    here = slot < real
    pos = tl.load(SOURCES + w * S + slot, mask=here, other=0)
    k = load_rows(K + b * k_b + h // GROUP * k_h, pos.to(tl.int64), d, k_l, here, D, BLOCK_D)
    v = load_rows(V + b * v_b + h // GROUP * v_h, pos.to(tl.int64), d, v_l, here, D, BLOCK_D)
    dk = tl.zeros([BK, BLOCK_D], tl.float32)
    dv = tl.zeros([BK, BLOCK_D], tl.float32)
    # Targets from `begin` on attend to some of these sources, from `inner` on to all of them; targets end at `end`.
    end = tl.minimum(P, L - w * P)
    begin = 0
    inner = 0
    if CAUSAL:
        begin = tl.maximum(tl.load(SOURCES + w * S + k_first) - w * P, 0) // BQ * BQ
        last = tl.load(SOURCES + w * S + tl.minimum(k_first + BK, real) - 1)
        inner = tl.maximum((tl.maximum(last - w * P, 0) + BQ - 1) // BQ * BQ, begin)
    whole = tl.maximum(end, 0) // BQ * BQ
    if GRID:  # any target of a rectangle may be outside the image
        end, whole = P, 0
    before = (tl.minimum(inner, end) - begin + BQ - 1) // BQ  # edge tiles before the full tiles
    after = tl.maximum(inner, whole)
    for t in tl.range(0, tl.maximum(before, 0) + (tl.maximum(end - after, 0) + BQ - 1) // BQ, num_stages=1):
        start = tl.where(t < before, begin + t * BQ, after + (t - tl.maximum(before, 0)) * BQ)
        dk, dv = key_tile(
            k, v, dk, dv, Q, DOUT, LSE, DELTA, TARGETS, KEY, bh, w, start, P, L, pos, slot, d, q_l, g_l, slope,
            threshold, scale, D, BLOCK_D, BQ, True, CAUSAL, ALIBI, GRID, PRECISION, DROPOUT,
        )  # fmt: skip
    for start in range(inner, whole, BQ):
        dk, dv = key_tile(
            k, v, dk, dv, Q, DOUT, LSE, DELTA, TARGETS, KEY, bh, w, start, P, L, pos, slot, d, q_l, g_l, slope,
            threshold, scale, D, BLOCK_D, BQ, False, CAUSAL, ALIBI, GRID, PRECISION, DROPOUT,
        )  # fmt: skip
    row = (pos if ONCE else w * S + slot).to(tl.int64)
    store_rows(PART_K + b * dk_b + h * dk_h, dk * logit_scale, row, d, dk_l, here, D, BLOCK_D)
    store_rows(PART_V + b * dv_b + h * dv_h, dv, row, d, dv_l, here, D, BLOCK_D)


@triton.jit
def collect(
    PART_K, PART_V, FIRST, NEAREST, OWNED, LSE, DOUT, DK, DV,
    p_b, p_h, p_l, g_b, g_h, g_l, dk_b, dk_h, dk_l, dv_b, dv_h, dv_l,
    BH, H, L, W, P, S, tiles,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr, STAND_IN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """For ROWS tokens: add their rows of every window, and the gradients of targets without a sampled source."""
    bh, tile = tl.program_id(0) % BH, tl.program_id(0) // BH
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    first = tile * ROWS
    token = first + tl.arange(0, ROWS)
    live = token < L
    if HAS_MASK:
        FIRST += b * W * (L + 1)
    PART_K += b * p_b + h * p_h
    PART_V += b * p_b + h * p_h
    dk = tl.zeros([ROWS, BLOCK_D], tl.float32)
    dv = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for w in range(first // P if CAUSAL else 0, W):  # earlier windows end before these tokens
        lo = tl.load(FIRST + w * (L + 1) + token, mask=live, other=0)
        n = tl.load(FIRST + w * (L + 1) + token + 1, mask=live, other=0) - lo
        for copy in range(0, tl.max(n, 0)):  # one, unless a given sample has repeated sources
            row = (w * S + lo + copy).to(tl.int64)
            dk += load_rows(PART_K, row, d, p_l, copy < n, D, BLOCK_D).to(tl.float32)
            dv += load_rows(PART_V, row, d, p_l, copy < n, D, BLOCK_D).to(tl.float32)
    if STAND_IN:
        begin, end = first, tl.minimum(first + ROWS, L)
        if HAS_MASK:  # the targets whose nearest tokens these are have consecutive positions
            begin = tl.load(OWNED + b * (tiles + 1) + tile)
            end = tl.load(OWNED + b * (tiles + 1) + tile + 1)
        for start in range(begin, end, ROWS):
            i = start + tl.arange(0, ROWS)
            empty = tl.load(LSE + bh.to(tl.int64) * L + i, mask=i < end, other=0.0) == float("inf")
            nearest = i
            if HAS_MASK:
                nearest = tl.load(NEAREST + b * L + i, mask=i < end, other=0)
            dout = load_rows(DOUT + b * g_b + h * g_h, i.to(tl.int64), d, g_l, empty, D, BLOCK_D)
            mine = (token[:, None] == nearest[None, :]).to(dout.dtype)
            dv = tl.dot(mine, dout, dv, input_precision=PRECISION)
    store_rows(DK + b * dk_b + h * dk_h, dk, token.to(tl.int64), d, dk_l, live, D, BLOCK_D)
    store_rows(DV + b * dv_b + h * dv_h, dv, token.to(tl.int64), d, dv_l, live, D, BLOCK_D)
