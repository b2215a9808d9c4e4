"""Triton, backward. No atomics: every sum is taken in a fixed order, so two runs agree to the last bit.

    delta_i = Σ_d dout_id out_id
    p_ij = exp2(s_ij - lse_i)        ds_ij = p_ij (dout_i · v_j - delta_i)

`row_products` takes delta. `span_gradients` sums what later queries send to the summary keys and values, in chunks of
queries, so that there is work for every multiprocessor. `block_gradients` takes one block: it adds the chunks up,
goes back through the local softmax and the pooling, and then takes dq (own keys, then summaries) and dk, dv.

Pooling by maximum sends its gradient to the entries equal to the maximum, in equal shares, as torch.amax does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .combiner_fixed_forward import load_rows, valid_rows


@triton.jit
def row_products(
    OUT, DOUT, DELTA,
    o_b, o_h, o_l, g_b, g_h, g_l,
    H, L,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(1)
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    first = tl.program_id(0) * ROWS
    row = tl.arange(0, ROWS)
    live = row < L - first
    out = load_rows(OUT + b * o_b + h * o_h + first.to(tl.int64) * o_l, row, d, o_l, live, D, BLOCK_D).to(tl.float32)
    dout = load_rows(DOUT + b * g_b + h * g_h + first.to(tl.int64) * g_l, row, d, g_l, live, D, BLOCK_D).to(tl.float32)
    tl.store(DELTA + bh.to(tl.int64) * L + first + row, tl.sum(out * dout, 1), mask=live)


@triton.jit
def span_gradients(
    Q, DOUT, KBAR, VBAR, LOCAL, LSE, DELTA, PART_K, PART_V,
    q_b, q_h, q_l, g_b, g_h, g_l,
    H, L, n, chunk, scale, logit_scale,
    m: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What the queries of one chunk send to BS summaries: PART_K and PART_V are (B·H, chunks, n, D), float32."""
    bh = tl.program_id(2)
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    s_first = tl.program_id(0) * BS
    s = s_first + tl.arange(0, BS)
    real = s < n
    q_first = tl.program_id(1) * chunk
    q_end = tl.minimum(q_first + chunk, L)
    Q += b * q_b + h * q_h + q_first.to(tl.int64) * q_l
    DOUT += b * g_b + h * g_h + q_first.to(tl.int64) * g_l
    LSE += bh.to(tl.int64) * L + q_first
    DELTA += bh.to(tl.int64) * L + q_first
    kbar = load_rows(KBAR + bh.to(tl.int64) * n * D, s, d, D, real, D, BLOCK_D)
    vbar = load_rows(VBAR + bh.to(tl.int64) * n * D, s, d, D, real, D, BLOCK_D)
    if HAS_MASK:
        real = real & (tl.load(LOCAL + bh.to(tl.int64) * n + s, mask=real, other=float("-inf")) > float("-inf"))

    dkbar = tl.zeros([BS, BLOCK_D], tl.float32)
    dvbar = tl.zeros([BS, BLOCK_D], tl.float32)
    start = 0
    if CAUSAL:  # the first query that sees the first of these summaries opens the next block
        start = tl.maximum((s_first + 1) * m - q_first, 0) // BQ * BQ
    for begin in range(start, q_end - q_first, BQ):
        i = begin + tl.arange(0, BQ)
        live = i < q_end - q_first
        q = load_rows(Q, i, d, q_l, live, D, BLOCK_D)
        dout = load_rows(DOUT, i, d, g_l, live, D, BLOCK_D)
        lse = tl.load(LSE + i, mask=live, other=0.0)
        delta = tl.load(DELTA + i, mask=live, other=0.0)
        block = (q_first + i) // m
        allowed = real[:, None] & ((s[:, None] < block[None, :]) if CAUSAL else (s[:, None] != block[None, :]))
        logit = tl.dot(kbar, tl.trans(q), input_precision=PRECISION)
        p = tl.where(allowed, tl.exp2(logit * scale - lse[None, :]), 0.0)
        dvbar = tl.dot(p.to(dout.dtype), dout, dvbar, input_precision=PRECISION)
        dp = tl.dot(vbar, tl.trans(dout), input_precision=PRECISION)
        ds = p * (dp - delta[None, :])
        dkbar = tl.dot(ds.to(q.dtype), q, dkbar, input_precision=PRECISION)
    at = ((bh.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * n + s[:, None]) * D + d[None, :]
    live = (s < n)[:, None] & (d < D)[None, :]
    tl.store(PART_K + at, dkbar * logit_scale, mask=live)
    tl.store(PART_V + at, dvbar, mask=live)


@triton.jit
def add_chunks(PART, bh, block, n, d, chunk, chunks, m: tl.constexpr, D: tl.constexpr, CHUNKS: tl.constexpr,
               CAUSAL: tl.constexpr):  # fmt: skip
    """One summary's gradient: the sum over the chunks of queries that can see it."""
    c = tl.arange(0, CHUNKS)
    seen = c < chunks
    if CAUSAL:
        seen = seen & ((c + 1) * chunk > (block + 1) * m)
    at = ((bh.to(tl.int64) * chunks + c[:, None]) * n + block) * D + d[None, :]
    return tl.sum(tl.load(PART + at, mask=seen[:, None] & (d < D)[None, :], other=0.0), 0)


@triton.jit
def through_pooling(
    Q, K, V, MASK, QBAR, KBAR, LOCAL, PART_K, PART_V, POOLED,
    q_l, k_l, v_l, bh, block, n, end, chunk, chunks, scale, logit_scale,
    m: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BK: tl.constexpr, CHUNKS: tl.constexpr,
    POOL: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Back through the local softmax, α_j = exp2(qbar·k_j - local) and vbar = Σ α_j v_j, and through the pooling.

    Leaves three rows per block in POOLED: what each pooled query entry sends to the tokens that share it, the same
    for keys, and the gradient of vbar. They go through memory, not through registers, which the matrix products need.
    Returns Σ α_j (dvbar·v_j).
    """
    d = tl.arange(0, BLOCK_D)
    qbar = tl.load(QBAR + d, mask=d < D, other=0.0)
    kbar = tl.load(KBAR + d, mask=d < D, other=0.0).to(tl.float32)
    local = tl.load(LOCAL)
    dkbar = add_chunks(PART_K, bh, block, n, d, chunk, chunks, m, D, CHUNKS, CAUSAL)
    dvbar = add_chunks(PART_V, bh, block, n, d, chunk, chunks, m, D, CHUNKS, CAUSAL)
    weighted = tl.zeros([BLOCK_D], tl.float32)  # Σ α dα k
    mean_key = tl.zeros([BLOCK_D], tl.float32)  # Σ α k
    mean_dalpha = 0.0
    q_share = tl.zeros([BLOCK_D], tl.float32)  # how many tokens share the pooled entry
    k_share = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, m, BK):
        j = start + tl.arange(0, BK)
        real = valid_rows(MASK, j, j < end, HAS_MASK)
        k = load_rows(K, j, d, k_l, real, D, BLOCK_D).to(tl.float32)
        v = load_rows(V, j, d, v_l, real, D, BLOCK_D).to(tl.float32)
        alpha = tl.where(real, tl.exp2(tl.sum(k * qbar[None, :], 1) * scale - local), 0.0)
        alpha_dalpha = alpha * tl.sum(v * dvbar[None, :], 1)
        weighted += tl.sum(alpha_dalpha[:, None] * k, 0)
        mean_key += tl.sum(alpha[:, None] * k, 0)
        mean_dalpha += tl.sum(alpha_dalpha, 0)
        if POOL == "max":
            q = load_rows(Q, j, d, q_l, real, D, BLOCK_D).to(tl.float32)
            q_share += tl.sum(tl.where(real[:, None] & (q == qbar[None, :]), 1.0, 0.0), 0)
            k_share += tl.sum(tl.where(real[:, None] & (k == kbar[None, :]), 1.0, 0.0), 0)
        elif POOL == "mean":
            q_share += tl.sum(real.to(tl.float32), 0)
    if POOL == "mean":
        k_share = q_share
    tl.store(POOLED + d, logit_scale * (weighted - mean_dalpha * mean_key) / tl.maximum(q_share, 1.0), mask=d < D)
    tl.store(POOLED + D + d, dkbar / tl.maximum(k_share, 1.0), mask=d < D)
    tl.store(POOLED + 2 * D + d, dvbar, mask=d < D)
    tl.debug_barrier()
    return mean_dalpha


@triton.jit
def add_to_queries(dq, q, real, QBAR, POOLED, D: tl.constexpr, BLOCK_D: tl.constexpr, POOL: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    pooled = real[:, None]
    if POOL == "max":
        pooled = pooled & (q.to(tl.float32) == tl.load(QBAR + d, mask=d < D, other=0.0)[None, :])
    return dq + tl.where(pooled, tl.load(POOLED + d, mask=d < D, other=0.0)[None, :], 0.0)


@triton.jit
def add_to_keys(dk, dv, k, v, real, mean_dalpha, QBAR, KBAR, LOCAL, POOLED, scale, logit_scale,
                D: tl.constexpr, BLOCK_D: tl.constexpr, POOL: tl.constexpr):  # fmt: skip
    d = tl.arange(0, BLOCK_D)
    k = k.to(tl.float32)
    qbar = tl.load(QBAR + d, mask=d < D, other=0.0)
    dvbar = tl.load(POOLED + 2 * D + d, mask=d < D, other=0.0)
    alpha = tl.where(real, tl.exp2(tl.sum(k * qbar[None, :], 1) * scale - tl.load(LOCAL)), 0.0)
    dlogit = alpha * (tl.sum(v.to(tl.float32) * dvbar[None, :], 1) - mean_dalpha)
    dk += dlogit[:, None] * (qbar * logit_scale)[None, :]
    dv += alpha[:, None] * dvbar[None, :]
    pooled = real[:, None]
    if POOL == "max":
        pooled = pooled & (k == tl.load(KBAR + d, mask=d < D, other=0.0).to(tl.float32)[None, :])
    dk += tl.where(pooled, tl.load(POOLED + D + d, mask=d < D, other=0.0)[None, :], 0.0)
    return dk, dv


@triton.jit
def span_logit_gradients(dq, q, dout, lse, delta, KBAR, VBAR, LOCAL, block, n, scale,
                         D: tl.constexpr, BLOCK_D: tl.constexpr, BS: tl.constexpr, CAUSAL: tl.constexpr,
                         HAS_MASK: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """dq += Σ_s ds_is kbar_s over the summaries these queries attend to."""
    d = tl.arange(0, BLOCK_D)
    spans = block if CAUSAL else n
    for start in range(0, spans, BS):
        s = start + tl.arange(0, BS)
        real = s < spans
        kbar = load_rows(KBAR, s, d, D, real, D, BLOCK_D)
        vbar = load_rows(VBAR, s, d, D, real, D, BLOCK_D)
        if not CAUSAL:
            real = real & (s != block)
        if HAS_MASK:
            real = real & (tl.load(LOCAL + s, mask=s < spans, other=float("-inf")) > float("-inf"))
        logit = tl.dot(q, tl.trans(kbar), input_precision=PRECISION)
        p = tl.where(real[None, :], tl.exp2(logit * scale - lse[:, None]), 0.0)
        dp = tl.dot(dout, tl.trans(vbar), input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(kbar.dtype), kbar, dq, input_precision=PRECISION)
    return dq


@triton.jit
def store_rows(X, x, row, d, row_stride, live, D: tl.constexpr, BLOCK_D: tl.constexpr):
    mask = live[:, None]
    if D != BLOCK_D:
        mask = mask & (d < D)[None, :]
    tl.store(X + row[:, None] * row_stride + d[None, :], x.to(X.dtype.element_ty), mask=mask)


@triton.jit
def block_gradients(
    Q, K, V, MASK, DOUT, QBAR, KBAR, VBAR, LOCAL, LSE, DELTA, PART_K, PART_V, POOLED, DQ, DK, DV,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, g_b, g_h, g_l,
    dq_b, dq_h, dq_l, dk_b, dk_h, dk_l, dv_b, dv_h, dv_l,
    H, L, n, chunk, chunks, scale, logit_scale,
    m: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr,
    CHUNKS: tl.constexpr, SPANS: tl.constexpr, POOL: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the last blocks have the most summaries: start them first
    bh = tl.program_id(1)
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    first = block * m
    Q += b * q_b + h * q_h + first.to(tl.int64) * q_l
    K += b * k_b + h * k_h + first.to(tl.int64) * k_l
    V += b * v_b + h * v_h + first.to(tl.int64) * v_l
    DOUT += b * g_b + h * g_h + first.to(tl.int64) * g_l
    DQ += b * dq_b + h * dq_h + first.to(tl.int64) * dq_l
    DK += b * dk_b + h * dk_h + first.to(tl.int64) * dk_l
    DV += b * dv_b + h * dv_h + first.to(tl.int64) * dv_l
    MASK += b * L + first
    LSE += bh.to(tl.int64) * L + first
    DELTA += bh.to(tl.int64) * L + first
    row = bh.to(tl.int64) * n  # of this head's first block, in what is kept per block
    end = tl.minimum(m, L - first)
    cols = tl.arange(0, BK)
    rows = tl.arange(0, BQ)
    mean_dalpha = 0.0
    if SPANS:
        mean_dalpha = through_pooling(
            Q, K, V, MASK, QBAR + (row + block) * D, KBAR + (row + block) * D, LOCAL + row + block, PART_K, PART_V,
            POOLED + (row + block) * 3 * D, q_l, k_l, v_l, bh, block, n, end, chunk, chunks, scale, logit_scale,
            m, D, BLOCK_D, BK, CHUNKS, POOL, CAUSAL, HAS_MASK,
        )  # fmt: skip

    if BQ >= m:  # the block's queries are one tile: p and ds are computed once, and serve dq, dk and dv
        q = load_rows(Q, rows, d, q_l, rows < end, D, BLOCK_D)
        dout = load_rows(DOUT, rows, d, g_l, rows < end, D, BLOCK_D)
        lse = tl.load(LSE + rows, mask=rows < end, other=0.0)
        delta = tl.load(DELTA + rows, mask=rows < end, other=0.0)
        dq = tl.zeros([BQ, BLOCK_D], tl.float32)
        for start in range(0, end, BK):
            j = start + cols
            real = valid_rows(MASK, j, j < end, HAS_MASK)
            k = load_rows(K, j, d, k_l, real, D, BLOCK_D)
            v = load_rows(V, j, d, v_l, real, D, BLOCK_D)
            allowed = real[None, :]
            if CAUSAL:
                allowed = allowed & (j[None, :] <= rows[:, None])
            logit = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            p = tl.where(allowed, tl.exp2(logit * scale - lse[:, None]), 0.0)
            dv = tl.dot(tl.trans(p.to(dout.dtype)), dout, input_precision=PRECISION)
            dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
            ds = (p * (dp - delta[:, None])).to(q.dtype)
            dk = tl.dot(tl.trans(ds), q, input_precision=PRECISION) * logit_scale
            dq = tl.dot(ds, k, dq, input_precision=PRECISION)
            if SPANS:
                dk, dv = add_to_keys(
                    dk, dv, k, v, real, mean_dalpha, QBAR + (row + block) * D, KBAR + (row + block) * D,
                    LOCAL + row + block, POOLED + (row + block) * 3 * D, scale, logit_scale, D, BLOCK_D, POOL,
                )  # fmt: skip
            store_rows(DK, dk, j, d, dk_l, j < end, D, BLOCK_D)
            store_rows(DV, dv, j, d, dv_l, j < end, D, BLOCK_D)
        if SPANS:
            dq = span_logit_gradients(dq, q, dout, lse, delta, KBAR + row * D, VBAR + row * D, LOCAL + row, block, n,
                                      scale, D, BLOCK_D, BS, CAUSAL, HAS_MASK, PRECISION)  # fmt: skip
        dq = dq * logit_scale
        if SPANS:
            real = valid_rows(MASK, rows, rows < end, HAS_MASK)
            dq = add_to_queries(dq, q, real, QBAR + (row + block) * D, POOLED + (row + block) * 3 * D, D, BLOCK_D, POOL)
        store_rows(DQ, dq, rows, d, dq_l, rows < end, D, BLOCK_D)
    else:
        for q_start in range(0, end, BQ):
            i = q_start + rows
            q = load_rows(Q, i, d, q_l, i < end, D, BLOCK_D)
            dout = load_rows(DOUT, i, d, g_l, i < end, D, BLOCK_D)
            lse = tl.load(LSE + i, mask=i < end, other=0.0)
            delta = tl.load(DELTA + i, mask=i < end, other=0.0)
            dq = tl.zeros([BQ, BLOCK_D], tl.float32)
            key_end = tl.minimum(end, q_start + BQ) if CAUSAL else end
            for start in range(0, key_end, BK):
                j = start + cols
                real = valid_rows(MASK, j, j < end, HAS_MASK)
                k = load_rows(K, j, d, k_l, real, D, BLOCK_D)
                v = load_rows(V, j, d, v_l, real, D, BLOCK_D)
                allowed = real[None, :]
                if CAUSAL:
                    allowed = allowed & (j[None, :] <= i[:, None])
                logit = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                p = tl.where(allowed, tl.exp2(logit * scale - lse[:, None]), 0.0)
                dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
                ds = p * (dp - delta[:, None])
                dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
            if SPANS:
                dq = span_logit_gradients(dq, q, dout, lse, delta, KBAR + row * D, VBAR + row * D, LOCAL + row, block,
                                          n, scale, D, BLOCK_D, BS, CAUSAL, HAS_MASK, PRECISION)  # fmt: skip
            dq = dq * logit_scale
            if SPANS:
                real = valid_rows(MASK, i, i < end, HAS_MASK)
                dq = add_to_queries(dq, q, real, QBAR + (row + block) * D, POOLED + (row + block) * 3 * D, D, BLOCK_D,
                                    POOL)  # fmt: skip
            store_rows(DQ, dq, i, d, dq_l, i < end, D, BLOCK_D)

        for start in range(0, end, BK):
            j = start + cols
            real = valid_rows(MASK, j, j < end, HAS_MASK)
            k = load_rows(K, j, d, k_l, real, D, BLOCK_D)
            v = load_rows(V, j, d, v_l, real, D, BLOCK_D)
            dk = tl.zeros([BK, BLOCK_D], tl.float32)
            dv = tl.zeros([BK, BLOCK_D], tl.float32)
            q_begin = (start // BQ) * BQ if CAUSAL else 0
            for q_start in range(q_begin, end, BQ):
                i = q_start + rows
                q = load_rows(Q, i, d, q_l, i < end, D, BLOCK_D)
                dout = load_rows(DOUT, i, d, g_l, i < end, D, BLOCK_D)
                lse = tl.load(LSE + i, mask=i < end, other=0.0)
                delta = tl.load(DELTA + i, mask=i < end, other=0.0)
                allowed = real[:, None]
                if CAUSAL:
                    allowed = allowed & (j[:, None] <= i[None, :])
                logit = tl.dot(k, tl.trans(q), input_precision=PRECISION)
                p = tl.where(allowed, tl.exp2(logit * scale - lse[None, :]), 0.0)
                dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
                dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
                ds = p * (dp - delta[None, :])
                dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
            dk = dk * logit_scale
            if SPANS:
                dk, dv = add_to_keys(
                    dk, dv, k, v, real, mean_dalpha, QBAR + (row + block) * D, KBAR + (row + block) * D,
                    LOCAL + row + block, POOLED + (row + block) * 3 * D, scale, logit_scale, D, BLOCK_D, POOL,
                )  # fmt: skip
            store_rows(DK, dk, j, d, dk_l, j < end, D, BLOCK_D)
            store_rows(DV, dv, j, d, dv_l, j < end, D, BLOCK_D)
