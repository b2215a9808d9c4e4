"""Triton kernels: backward pass. No atomics: sums have a fixed order, so results are bitwise reproducible.

    delta_i = Σ_d dout_id out_id
    p_ij = exp2(s_ij - lse_i)            ds_ij = p_ij (dout_i · v_j - delta_i)
    α_j = exp2(qbar·k_j - local)         dα_j = dvbar · v_j          Σ_j α_j dα_j = dvbar · vbar

`span_gradients` computes delta and the gradients of the summary keys and values, in chunks of queries, so that every
multiprocessor has work; `collect` adds the chunks. If there is only one block, `row_products` computes delta.
`key_gradients` loops over the queries of the block for a tile of keys: dk, dv, and its part of the gradient of the
pooled query. `query_gradients` loops over the same keys and summaries as the forward for a tile of queries: dq.

Max pooling splits its gradient equally among the entries equal to the maximum, as torch.amax does. The accumulators
start from the gradients through the pooling and the local softmax. Dropout multiplies p in out and dv, and dout · v in
ds, by the forward's factors; summary s counts as key L + s.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....kernels.random import kept, row_words
from ....kernels.rows import load_rows, place, store_rows, valid_rows
from ....kernels.softmax import add_to_dk_dv, add_to_dq, probabilities
from .forward import own_summaries, seen_tile, seen_tiles


@triton.jit
def span_gradients(
    Q, OUT, DOUT, TABLE, KBAR, VBAR, LOCAL, LSE, KEY, DELTA, PART_K, PART_V,
    q_b, q_h, q_l, o_b, o_h, o_l, g_b, g_h, g_l,
    BH, H, L, n, span_tiles, chunk, chunks, threshold, scale, logit_scale,
    m: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr, DROPOUT: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Gradients of BS summaries from the queries of one chunk; PART_K and PART_V are (B·H, chunks, n, D), float32. The
    programs of the first summaries also store delta, of all queries. PACKED: chunks are those of each document, and
    every block has a program, of which only the first of each chunk works."""
    bh, rest = tl.program_id(0) % BH, tl.program_id(0) // BH
    s_first, c = rest % span_tiles * BS, rest // span_tiles
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    part = bh.to(tl.int64) * n * chunks
    summaries, count = bh.to(tl.int64) * n, n
    origin, length = 0, L
    if PACKED:
        own = c
        summaries, count, mine = own_summaries(TABLE, bh, own, n, PACKED)
        if (mine % (chunk // m) != 0) | (s_first >= count):
            return
        c = mine // (chunk // m)
        part += own - mine  # the document's first
        b = tl.load(TABLE + 8 * own).to(tl.int64)
        origin, length = tl.load(TABLE + 8 * own + 6), tl.load(TABLE + 8 * own + 7)
    q_first = c * chunk
    q_end = tl.minimum(q_first + chunk, length)
    first = origin + q_first
    part += c * n
    start = 0
    if CAUSAL:  # the first query that attends to the first of these summaries starts the next block
        start = tl.maximum((s_first + 1) * m - q_first, 0)
        if (start >= chunk) & (s_first > 0):  # the whole chunk is too early; `collect` skips it
            return
        start = start // BQ * BQ
    d = tl.arange(0, BLOCK_D)
    s = s_first + tl.arange(0, BS)
    real = s < count
    Q += b * q_b + h * q_h + first.to(tl.int64) * q_l
    OUT += b * o_b + h * o_h + first.to(tl.int64) * o_l
    DOUT += b * g_b + h * g_h + first.to(tl.int64) * g_l
    LSE += (b * H + h) * L + first
    DELTA += (b * H + h) * L + first
    if CAUSAL:  # queries that attend to no summary
        for begin in range(0, tl.where(s_first == 0, tl.minimum(start, q_end - q_first), 0), BQ):
            i = begin + tl.arange(0, BQ)
            live = i < q_end - q_first
            out = load_rows(OUT, i, d, o_l, live, D, BLOCK_D).to(tl.float32)
            dout = load_rows(DOUT, i, d, g_l, live, D, BLOCK_D).to(tl.float32)
            tl.store(DELTA + i, tl.sum(out * dout, 1), mask=live)
    kbar = load_rows(KBAR + summaries * D, s, d, D, real, D, BLOCK_D)
    vbar = load_rows(VBAR + summaries * D, s, d, D, real, D, BLOCK_D)
    if HAS_MASK:
        real = real & (tl.load(LOCAL + summaries + s, mask=real, other=float("-inf")) > float("-inf"))

    dkbar = tl.zeros([BS, BLOCK_D], tl.float32)
    dvbar = tl.zeros([BS, BLOCK_D], tl.float32)
    for begin in range(start, q_end - q_first, BQ):
        i = begin + tl.arange(0, BQ)
        live = i < q_end - q_first
        q = load_rows(Q, i, d, q_l, live, D, BLOCK_D)
        dout = load_rows(DOUT, i, d, g_l, live, D, BLOCK_D)
        lse = tl.load(LSE + i, mask=live, other=0.0)
        out = load_rows(OUT, i, d, o_l, live, D, BLOCK_D)
        delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
        if s_first == 0:
            tl.store(DELTA + i, delta, mask=live)
        block = (q_first + i) // m
        allowed = real[:, None] & ((s[:, None] < block[None, :]) if CAUSAL else (s[:, None] != block[None, :]))
        p = probabilities(kbar, q, lse[None, :], allowed, scale, PRECISION)
        word = row_words(KEY, b * H + h, first + i, DROPOUT)
        factor = kept(word[None, :], (L + s)[:, None], threshold, DROPOUT)
        dkbar, dvbar = add_to_dk_dv(dkbar, dvbar, p, factor, vbar, q, dout, delta, PRECISION)
    store_rows(PART_K + part * D, dkbar * logit_scale, s, d, D, s < count, D, BLOCK_D)
    store_rows(PART_V + part * D, dvbar, s, d, D, s < count, D, BLOCK_D)


@triton.jit
def collect(
    PART_K, PART_V, TABLE, VBAR, STATS, DKBAR, DVBAR, MEAN_DALPHA,
    BH, n, chunk, chunks,
    m: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, CHUNKS: tl.constexpr, CAUSAL: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Sum over the chunks that may attend to a summary: the gradient of every token that shares a pooled key entry, the
    gradient of vbar, and Σ_j α_j dα_j."""
    bh, s = (tl.program_id(0) % BH).to(tl.int64), tl.program_id(0) // BH
    at = bh * n + s
    d = tl.arange(0, BLOCK_D)
    c = tl.arange(0, CHUNKS).to(tl.int64)
    seen = c < chunks
    own = s
    if PACKED:
        own = s - tl.load(TABLE + 8 * s + 4)
        seen = seen & (tl.load(TABLE + 8 * s + 7) > c * chunk)
    if CAUSAL:
        seen = seen & ((c + 1) * chunk > (own + 1) * m)
    part = (bh * chunks * n + s) * D
    dkbar = tl.sum(load_rows(PART_K + part, c, d, n * D, seen, D, BLOCK_D), 0)
    dvbar = tl.sum(load_rows(PART_V + part, c, d, n * D, seen, D, BLOCK_D), 0)
    vbar = tl.load(VBAR + at * D + d, mask=d < D, other=0.0).to(tl.float32)
    k_share = tl.load(STATS + (4 * at + 3) * D + d, mask=d < D, other=1.0)
    tl.store(DKBAR + at * D + d, dkbar / tl.maximum(k_share, 1.0), mask=d < D)
    tl.store(DVBAR + at * D + d, dvbar, mask=d < D)
    tl.store(MEAN_DALPHA + at, tl.sum(dvbar * vbar, 0))


@triton.jit
def key_gradients(
    Q, K, V, MASK, TABLE, DOUT, STATS, KBAR, LOCAL, LSE, DELTA, KEY, DKBAR, DVBAR, MEAN_DALPHA, WEIGHTED, DK, DV,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, g_b, g_h, g_l, dk_b, dk_h, dk_l, dv_b, dv_h, dv_l,
    BH, H, L, n, threshold, scale, logit_scale,
    m: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    SPANS: tl.constexpr, POOL: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
    DROPOUT: tl.constexpr, GROUP: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (m + BK - 1) // BK
    bh, tile = tl.program_id(0) % BH, tl.program_id(0) // BH
    block = tile // TILES
    at = bh.to(tl.int64) * n + block
    b, h, bh, first, end = place(TABLE, bh, block, H, L, m, PACKED)
    d = tl.arange(0, BLOCK_D)
    Q += b * q_b + h * q_h + first.to(tl.int64) * q_l
    K += b * k_b + h // GROUP * k_h + first.to(tl.int64) * k_l
    V += b * v_b + h // GROUP * v_h + first.to(tl.int64) * v_l
    DOUT += b * g_b + h * g_h + first.to(tl.int64) * g_l
    DK += b * dk_b + h * dk_h + first.to(tl.int64) * dk_l
    DV += b * dv_b + h * dv_h + first.to(tl.int64) * dv_l
    MASK += b * L + first
    LSE += bh * L + first
    DELTA += bh * L + first

    k_first = (tile % TILES) * BK
    j = k_first + tl.arange(0, BK)
    real = valid_rows(MASK, j, j < end, HAS_MASK)
    k = load_rows(K, j, d, k_l, real, D, BLOCK_D)
    v = load_rows(V, j, d, v_l, real, D, BLOCK_D)
    dk = tl.zeros([BK, BLOCK_D], tl.float32)
    dv = tl.zeros([BK, BLOCK_D], tl.float32)
    if SPANS:  # through the local softmax and the pooling
        qbar = tl.load(STATS + at * 4 * D + d, mask=d < D, other=0.0)
        dvbar = tl.load(DVBAR + at * D + d, mask=d < D, other=0.0)
        dkbar = tl.load(DKBAR + at * D + d, mask=d < D, other=0.0)
        wide_k = k.to(tl.float32)
        alpha = tl.where(real, tl.exp2(tl.sum(wide_k * qbar[None, :], 1) * scale - tl.load(LOCAL + at)), 0.0)
        dalpha = tl.sum(v.to(tl.float32) * dvbar[None, :], 1)
        weighted = tl.sum((alpha * dalpha)[:, None] * wide_k, 0)  # Σ α dα k
        tl.store(WEIGHTED + (at * TILES + tile % TILES) * D + d, weighted, mask=d < D)
        dv += alpha[:, None] * dvbar[None, :]
        dk += (alpha * (dalpha - tl.load(MEAN_DALPHA + at)))[:, None] * qbar[None, :]
        shares = real[:, None]
        if POOL == "max":
            shares = shares & (wide_k == tl.load(KBAR + at * D + d, mask=d < D, other=0.0).to(tl.float32)[None, :])
        dk += tl.where(shares, (dkbar / logit_scale)[None, :], 0.0)

    for start in range(k_first // BQ * BQ if CAUSAL else 0, end, BQ):
        i = start + tl.arange(0, BQ)
        q = load_rows(Q, i, d, q_l, i < end, D, BLOCK_D)
        dout = load_rows(DOUT, i, d, g_l, i < end, D, BLOCK_D)
        lse = tl.load(LSE + i, mask=i < end, other=0.0)
        delta = tl.load(DELTA + i, mask=i < end, other=0.0)
        p = probabilities(k, q, lse[None, :], None, scale, PRECISION)
        if CAUSAL:
            p = tl.where((j[:, None] <= i[None, :]), p, 0.0)
        if HAS_MASK or not CAUSAL:
            p = tl.where(real[:, None], p, 0.0)
        word = row_words(KEY, bh, first + i, DROPOUT)
        factor = kept(word[None, :], (first + j)[:, None], threshold, DROPOUT)
        dk, dv = add_to_dk_dv(dk, dv, p, factor, v, q, dout, delta, PRECISION)
    store_rows(DK, dk * logit_scale, j, d, dk_l, j < end, D, BLOCK_D)
    store_rows(DV, dv, j, d, dv_l, j < end, D, BLOCK_D)


@triton.jit
def query_gradients(
    Q, K, V, MASK, TABLE, DOUT, STATS, KBAR, VBAR, LOCAL, LSE, DELTA, KEY, MEAN_DALPHA, WEIGHTED, DQ,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, g_b, g_h, g_l, dq_b, dq_h, dq_l,
    BH, H, L, n, threshold, scale, logit_scale,
    m: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    PARTS: tl.constexpr, PART_ROWS: tl.constexpr,
    SPANS: tl.constexpr, POOL: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
    DROPOUT: tl.constexpr, GROUP: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (m + BQ - 1) // BQ
    bh = tl.program_id(0) % BH
    tile = n * TILES - 1 - tl.program_id(0) // BH
    block = tile // TILES
    at = bh.to(tl.int64) * n + block
    summaries, count, mine = own_summaries(TABLE, bh, block, n, PACKED)
    b, h, bh, first, end = place(TABLE, bh, block, H, L, m, PACKED)
    d = tl.arange(0, BLOCK_D)
    Q += b * q_b + h * q_h + first.to(tl.int64) * q_l
    K += b * k_b + h // GROUP * k_h + first.to(tl.int64) * k_l
    V += b * v_b + h // GROUP * v_h + first.to(tl.int64) * v_l
    DOUT += b * g_b + h * g_h + first.to(tl.int64) * g_l
    DQ += b * dq_b + h * dq_h + first.to(tl.int64) * dq_l
    MASK += b * L + first
    KBAR += summaries * D
    VBAR += summaries * D
    LOCAL += summaries

    q_first = (tile % TILES) * BQ
    if q_first >= end:
        return
    i = q_first + tl.arange(0, BQ)
    q = load_rows(Q, i, d, q_l, i < end, D, BLOCK_D)
    dout = load_rows(DOUT, i, d, g_l, i < end, D, BLOCK_D)
    lse = tl.load(LSE + bh * L + first + i, mask=i < end, other=0.0)
    delta = tl.load(DELTA + bh * L + first + i, mask=i < end, other=0.0)
    dq = tl.zeros([BQ, BLOCK_D], tl.float32)
    if SPANS:  # through the pooled query: Σ α (dα - Σ α dα) k, in shares
        STATS += at * 4 * D
        parts = tl.arange(0, PART_ROWS)
        weighted = tl.sum(load_rows(WEIGHTED + at * PARTS * D, parts, d, D, parts < PARTS, D, BLOCK_D), 0)
        mean_key = tl.load(STATS + D + d, mask=d < D, other=0.0)
        share = tl.load(STATS + 2 * D + d, mask=d < D, other=1.0)
        dqbar = (weighted - tl.load(MEAN_DALPHA + at) * mean_key) / share
        shares = valid_rows(MASK, i, i < end, HAS_MASK)[:, None]
        if POOL == "max":
            shares = shares & (q.to(tl.float32) == tl.load(STATS + d, mask=d < D, other=0.0)[None, :])
        dq += tl.where(shares, dqbar[None, :], 0.0)

    word = row_words(KEY, bh, first + i, DROPOUT)
    own_tiles, tiles, spans = seen_tiles(q_first, end, mine, count, BQ, BK, SPANS, CAUSAL)
    for t in range(0, tiles):
        own, row, live, allowed = seen_tile(t, own_tiles, i, end, mine, spans, MASK, LOCAL, BK, CAUSAL, HAS_MASK)
        k = load_rows(tl.where(own, K, KBAR), row, d, tl.where(own, k_l, D), live, D, BLOCK_D)
        v = load_rows(tl.where(own, V, VBAR), row, d, tl.where(own, v_l, D), live, D, BLOCK_D)
        p = probabilities(q, k, lse[:, None], allowed, scale, PRECISION)
        factor = kept(word[:, None], (row + tl.where(own, first, L))[None, :], threshold, DROPOUT)
        dq = add_to_dq(dq, p, factor, k, v, dout, delta, PRECISION)
    store_rows(DQ, dq * logit_scale, i, d, dq_l, i < end, D, BLOCK_D)
