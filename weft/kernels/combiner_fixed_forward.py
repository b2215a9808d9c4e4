"""Triton, forward: the blocks' summaries, then attention to the own block and to the summaries in one softmax.

`summarise` reads q, k and v once and leaves one row per block: the pooled query (for the backward), the summary key,
the summary value and the normaliser of the block's local softmax. `attend` takes a tile of queries of one block,
first over the block's own keys and then over the summaries, with the running maximum and sum of FlashAttention.
All logarithms are to base 2: `scale` carries log2(e)/√D.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(X, row, d, row_stride, live, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of X as (rows, BLOCK_D); zeros where a row is not live, and past D."""
    if D == BLOCK_D:
        return tl.load(X + row[:, None] * row_stride + d[None, :], mask=live[:, None], other=0.0)
    return tl.load(X + row[:, None] * row_stride + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def valid_rows(MASK, position, live, HAS_MASK: tl.constexpr):
    """Which rows hold a real token: those inside the sequence that the mask does not hide."""
    if HAS_MASK:
        return live & (tl.load(MASK + position, mask=live, other=0) != 0)
    return live


@triton.jit
def summarise(
    Q, K, V, MASK, QBAR, KBAR, VBAR, LOCAL,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l,
    H, L, n, scale,
    m: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    POOL: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    block, bh = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    rows = tl.arange(0, ROWS)
    first = block * m
    Q += b * q_b + h * q_h + first.to(tl.int64) * q_l
    K += b * k_b + h * k_h + first.to(tl.int64) * k_l
    V += b * v_b + h * v_h + first.to(tl.int64) * v_l
    MASK += b * L + first
    end = tl.minimum(m, L - first)

    count = tl.zeros([ROWS], tl.float32)
    qbar = tl.full([BLOCK_D], float("-inf") if POOL == "max" else 0.0, tl.float32)
    for start in range(0, m, ROWS):
        row = start + rows
        live = valid_rows(MASK, row, row < end, HAS_MASK)
        q = load_rows(Q, row, d, q_l, live, D, BLOCK_D).to(tl.float32)
        if POOL == "max":
            qbar = tl.maximum(qbar, tl.max(tl.where(live[:, None], q, float("-inf")), 0))
        else:
            qbar += tl.sum(q, 0)
        count += live.to(tl.float32)
    tokens = tl.sum(count, 0)
    if POOL == "mean":
        qbar = qbar / tl.maximum(tokens, 1.0)
    qbar = tl.where(tokens > 0, qbar, 0.0)

    kbar = tl.full([BLOCK_D], float("-inf") if POOL == "max" else 0.0, tl.float32)
    vbar = tl.zeros([BLOCK_D], tl.float32)
    top = float("-inf")
    total = 0.0
    for start in range(0, m, ROWS):
        row = start + rows
        live = valid_rows(MASK, row, row < end, HAS_MASK)
        k = load_rows(K, row, d, k_l, live, D, BLOCK_D).to(tl.float32)
        v = load_rows(V, row, d, v_l, live, D, BLOCK_D).to(tl.float32)
        if POOL == "max":
            kbar = tl.maximum(kbar, tl.max(tl.where(live[:, None], k, float("-inf")), 0))
        else:
            kbar += tl.sum(k, 0)
        logit = tl.where(live, tl.sum(k * qbar[None, :], 1) * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(logit, 0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        old = tl.exp2(top - shift)
        p = tl.exp2(logit - shift)
        vbar = vbar * old + tl.sum(p[:, None] * v, 0)
        total = total * old + tl.sum(p, 0)
        top = new_top
    if POOL == "mean":
        kbar = kbar / tl.maximum(tokens, 1.0)
    kbar = tl.where(tokens > 0, kbar, 0.0)
    total = tl.where(tokens > 0, total, 1.0)
    vbar = vbar / total

    at = (bh.to(tl.int64) * n + block) * D + d
    tl.store(QBAR + at, qbar, mask=d < D)
    tl.store(KBAR + at, kbar.to(KBAR.dtype.element_ty), mask=d < D)
    tl.store(VBAR + at, vbar.to(VBAR.dtype.element_ty), mask=d < D)
    # log2 of the local normaliser; -inf marks a block without a token, which nobody may attend to
    tl.store(LOCAL + bh.to(tl.int64) * n + block, tl.where(tokens > 0, top + tl.log2(total), float("-inf")))


@triton.jit
def online_softmax(acc, top, total, q, k, v, allowed, scale, MASKED: tl.constexpr, GUARD: tl.constexpr,
                   PRECISION: tl.constexpr):  # fmt: skip
    """One tile of keys more: rescale what was summed under the old maximum, add the new terms."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if MASKED:
        s = tl.where(allowed, s, float("-inf"))
    new_top = tl.maximum(top, tl.max(s, 1) * scale)
    shift = new_top
    if GUARD:  # a row that has seen no legal key yet: keep inf - inf out
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(s * scale - shift[:, None])
    old = tl.exp2(top - shift)
    total = total * old + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * old[:, None], input_precision=PRECISION)
    return acc, new_top, total


@triton.jit
def attend(
    Q, K, V, MASK, KBAR, VBAR, LOCAL, OUT, LSE,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, o_b, o_h, o_l,
    H, L, n, scale,
    m: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr,
    SPANS: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (m + BQ - 1) // BQ  # tiles of queries in a block
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last blocks see the most summaries: start them first
    bh = tl.num_programs(1) - 1 - tl.program_id(1)  # backwards: the last heads summarised may still be in the cache
    block = tile // TILES
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    first = block * m
    Q += b * q_b + h * q_h + first.to(tl.int64) * q_l
    K += b * k_b + h * k_h + first.to(tl.int64) * k_l
    V += b * v_b + h * v_h + first.to(tl.int64) * v_l
    OUT += b * o_b + h * o_h + first.to(tl.int64) * o_l
    MASK += b * L + first
    KBAR += bh.to(tl.int64) * n * D
    VBAR += bh.to(tl.int64) * n * D
    LOCAL += bh.to(tl.int64) * n
    end = tl.minimum(m, L - first)

    q_first = (tile % TILES) * BQ
    i = q_first + tl.arange(0, BQ)
    q = load_rows(Q, i, d, q_l, i < end, D, BLOCK_D)
    acc = tl.zeros([BQ, BLOCK_D], tl.float32)
    top = tl.full([BQ], float("-inf"), tl.float32)
    total = tl.zeros([BQ], tl.float32)

    key_end = tl.minimum(end, q_first + BQ) if CAUSAL else end
    for start in range(0, key_end, BK):
        j = start + tl.arange(0, BK)
        real = valid_rows(MASK, j, j < end, HAS_MASK)
        k = load_rows(K, j, d, k_l, real, D, BLOCK_D)
        v = load_rows(V, j, d, v_l, real, D, BLOCK_D)
        allowed = real[None, :]
        if CAUSAL:
            allowed = allowed & (j[None, :] <= i[:, None])
        acc, top, total = online_softmax(acc, top, total, q, k, v, allowed, scale, True, HAS_MASK,
                                         PRECISION)  # fmt: skip

    spans = block if CAUSAL else n
    if not SPANS:  # one block only: nothing was summarised
        spans = 0
    plain = (spans // BS) * BS  # whole tiles of summaries need no mask, unless a block may be dead or our own
    if HAS_MASK or not CAUSAL:
        plain = 0
    for start in range(0, plain, BS):
        s = start + tl.arange(0, BS)
        kbar = load_rows(KBAR, s, d, D, s < n, D, BLOCK_D)
        vbar = load_rows(VBAR, s, d, D, s < n, D, BLOCK_D)
        acc, top, total = online_softmax(acc, top, total, q, kbar, vbar, (s < n)[None, :], scale, False, False,
                                         PRECISION)  # fmt: skip
    for start in range(plain, spans, BS):
        s = start + tl.arange(0, BS)
        real = s < spans
        if not CAUSAL:
            real = real & (s != block)
        if HAS_MASK:
            real = real & (tl.load(LOCAL + s, mask=s < spans, other=float("-inf")) > float("-inf"))
        kbar = load_rows(KBAR, s, d, D, s < spans, D, BLOCK_D)
        vbar = load_rows(VBAR, s, d, D, s < spans, D, BLOCK_D)
        acc, top, total = online_softmax(acc, top, total, q, kbar, vbar, real[None, :], scale, True, HAS_MASK,
                                         PRECISION)  # fmt: skip

    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    out = acc / total[:, None]
    live = (i < end)[:, None]
    if D != BLOCK_D:
        live = live & (d < D)[None, :]
    tl.store(OUT + i[:, None] * o_l + d[None, :], out.to(OUT.dtype.element_ty), mask=live)
    # 0 for a row without keys: the backward then finds exp2(-inf - 0) = 0 everywhere
    lse = tl.where(empty, 0.0, top + tl.log2(total))
    tl.store(LSE + bh.to(tl.int64) * L + first + i, lse, mask=i < end)
