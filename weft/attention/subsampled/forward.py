"""Triton kernels: forward pass. A tile of targets attends to the sampled sources of its window, read in place.

SOURCES (W, S) holds the sources of each window sorted by position; empty slots are last, with L or more. FIRST
(W, L + 1) is the number of sources before a position. Because sources are sorted, causality is a length: a tile of
targets [a, b) needs the first FIRST[b] sources, and only those from FIRST[a + 1] on need a comparison with the target.
With a mask (HAS_MASK), each sequence has its own SOURCES and FIRST without masked tokens. Logarithms are to base 2:
`scale` includes log2(e)/√D, SLOPES log2(e). For DROPOUT, the key index of a source is its slot, because a given sample
may repeat a source.

Program ids run over heads first, so concurrent programs read whole rows of (B, L, H, D) memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.random import kept, row_words
from ...kernels.rows import load_rows, store_rows
from ...kernels.softmax import no_keys


@triton.jit
def count_before(SOURCES, FIRST, L, S, STEPS: tl.constexpr, ROWS: tl.constexpr):
    """Compute FIRST by bisection."""
    w = tl.program_id(0)
    position = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    low = tl.zeros([ROWS], tl.int32)
    high = low + S
    for _ in range(STEPS):
        middle = (low + high) // 2
        before = tl.load(SOURCES + w * S + middle, mask=low < high, other=0) < position
        low, high = tl.where(before & (low < high), middle + 1, low), tl.where(before, high, middle)
    tl.store(FIRST + w * (L + 1) + position, low, mask=position <= L)


@triton.jit
def target_rows(TARGETS, w, start, P, L, BQ: tl.constexpr, GRID: tl.constexpr):
    """Positions of BQ targets of window w from slot `start` on; L for no target."""
    slot = start + tl.arange(0, BQ)
    if GRID:  # windows are not runs of tokens
        return tl.load(TARGETS + w * P + slot, mask=slot < P, other=L)
    return tl.where(slot < P, tl.minimum(w * P + slot, L), L)


@triton.jit
def seen_sources(FIRST, w, start, P, L, BQ: tl.constexpr, CAUSAL: tl.constexpr):
    """Number of sources that all BQ targets of a tile attend to, and that any of them attends to."""
    FIRST += w * (L + 1)
    if CAUSAL:
        a = w * P + start
        b = tl.minimum(tl.minimum(a + BQ, (w + 1) * P), L)
        return tl.load(FIRST + tl.minimum(a + 1, L)), tl.load(FIRST + b)
    n = tl.load(FIRST + L)
    return n, n


@triton.jit
def next_sources(SOURCES, slot, S, BK: tl.constexpr):
    """Prefetch the positions of the next tile, so that its rows can be loaded as early as in a plain loop."""
    return tl.load(SOURCES + slot + BK, mask=slot + BK < S, other=0)


@triton.jit
def biased(s, i, pos, reference, slope, scale, CAUSAL: tl.constexpr, ALIBI: tl.constexpr):
    """Logits to base 2 from products s (targets i, sources pos). If causal, the distance is relative to `reference`
    instead of the target. This shifts each row by slope · (i - reference), which does not change the softmax."""
    if not ALIBI:
        return s * scale
    if CAUSAL:
        return s * scale + (slope * (pos - reference).to(tl.float32))[None, :]
    return s * scale - slope * tl.abs(i[:, None] - pos[None, :]).to(tl.float32)


@triton.jit
def absolute(lse, i, reference, slope, CAUSAL: tl.constexpr, ALIBI: tl.constexpr):
    """Remove the shift of `biased` from the normaliser of a row; use -slope to add it back."""
    if ALIBI and CAUSAL:
        return lse - slope * (i - reference).to(tl.float32)
    return lse


@triton.jit
def attend_tile(
    q, word, acc, top, total, K, V, pos, slot, seen, i, d, k_l, v_l, reference, slope, threshold, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, EDGE: tl.constexpr, CAUSAL: tl.constexpr,
    ALIBI: tl.constexpr, STAND_IN: tl.constexpr, PRECISION: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Add one tile of sources to the running softmax. EDGE: some pairs are not allowed."""
    here = slot < seen if EDGE else None
    k = load_rows(K, pos.to(tl.int64), d, k_l, here, D, BLOCK_D)
    v = load_rows(V, pos.to(tl.int64), d, v_l, here, D, BLOCK_D)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if ALIBI:
        s = biased(s, i, pos, reference, slope, scale, CAUSAL, ALIBI)
    if EDGE:
        allowed = (slot < seen)[None, :]
        if CAUSAL:
            allowed = allowed & (pos[None, :] <= i[:, None])
        s = tl.where(allowed, s, float("-inf"))
    new_top = tl.maximum(top, tl.max(s, 1) if ALIBI else tl.max(s, 1) * scale)
    shift = new_top
    if STAND_IN:  # a row without any allowed source so far: avoid inf - inf
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    if ALIBI:
        p = tl.exp2(s - shift[:, None])
    else:
        p = tl.exp2(s * scale - shift[:, None])
    old = tl.exp2(top - shift)
    total = total * old + tl.sum(p, 1)
    p *= kept(word[:, None], slot[None, :], threshold, DROPOUT)
    acc = tl.dot(p.to(v.dtype), v, acc * old[:, None], input_precision=PRECISION)
    return acc, new_top, total


@triton.jit
def attend(
    Q, K, V, SOURCES, FIRST, TARGETS, NEAREST, SLOPES, KEY, OUT, LSE,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, o_b, o_h, o_l,
    BH, H, L, W, P, S, threshold, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr, ALIBI: tl.constexpr, STAND_IN: tl.constexpr, GRID: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    bh, tile = tl.program_id(0) % BH, tl.program_id(0) // BH
    w = tile % W
    start = ((P + BQ - 1) // BQ - 1 - tile // W) * BQ  # start with the last targets: they have the most sources
    if not GRID:
        if w * P + start >= L:  # padding: the sequence has no such targets
            return
    i = target_rows(TARGETS, w, start, P, L, BQ, GRID)
    live = i < L
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    Q += b * q_b + h * q_h
    K += b * k_b + h // GROUP * k_h
    V += b * v_b + h // GROUP * v_h
    OUT += b * o_b + h * o_h
    LSE += bh.to(tl.int64) * L
    if HAS_MASK:
        SOURCES += b * W * S
        FIRST += b * W * (L + 1)
    SOURCES += w * S
    reference = w * P + start
    slope = tl.load(SLOPES + h) if ALIBI else 0.0

    word = row_words(KEY, bh, i, DROPOUT)
    q = load_rows(Q, i.to(tl.int64), d, q_l, live, D, BLOCK_D)
    acc, top, total = no_keys(BQ, BLOCK_D)
    by_all, seen = seen_sources(FIRST, w, start, P, L, BQ, CAUSAL)
    inner = by_all // BK * BK
    slot = tl.arange(0, BK)
    pos = tl.load(SOURCES + slot, mask=slot < S, other=0)
    for first in range(0, inner, BK):
        ahead = next_sources(SOURCES, first + slot, S, BK)
        acc, top, total = attend_tile(
            q, word, acc, top, total, K, V, pos, first + slot, seen, i, d, k_l, v_l, reference, slope, threshold, scale,
            D, BLOCK_D, False, CAUSAL, ALIBI, STAND_IN, PRECISION, DROPOUT,
        )  # fmt: skip
        pos = ahead
    for first in tl.range(inner, seen, BK, num_stages=1):  # a few tiles at most
        ahead = next_sources(SOURCES, first + slot, S, BK)
        acc, top, total = attend_tile(
            q, word, acc, top, total, K, V, pos, first + slot, seen, i, d, k_l, v_l, reference, slope, threshold, scale,
            D, BLOCK_D, True, CAUSAL, ALIBI, STAND_IN, PRECISION, DROPOUT,
        )  # fmt: skip
        pos = ahead

    lse = top + tl.log2(total)
    if STAND_IN:
        empty = live & (total == 0.0)
        total = tl.where(total == 0.0, 1.0, total)
        nearest = i
        if HAS_MASK:
            nearest = tl.load(NEAREST + b * L + i, mask=empty, other=0)
        acc += load_rows(V, nearest.to(tl.int64), d, v_l, empty, D, BLOCK_D).to(tl.float32)
        # so that the backward gets exp2(logit - inf) = 0 everywhere
        lse = tl.where(empty, float("inf"), lse)
    store_rows(OUT, acc * (1.0 / total)[:, None], i.to(tl.int64), d, o_l, live, D, BLOCK_D)
    tl.store(LSE + i, absolute(lse, i, reference, slope, CAUSAL, ALIBI), mask=live)
