"""Triton kernels: the keys of a random order, the sources of each window between two of its order statistics, and a
random part of them."""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.random import load_key, mixed, normals, random_words


@triton.jit
def sort_keys(
    KEY, KEYS, count, start, P, spread, low_bits, rank,
    CAUSAL: tl.constexpr, BIASED: tl.constexpr, GAUSSIAN: tl.constexpr, FRACTION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Distinct integers: s + σ ε_s in fixed point, then s. If causal, those of the prefixes P, 2P, ... one after the
    other. `spread` is σ in fixed point; `start` the first of the random numbers."""
    low, high = load_key(KEY)
    high = high ^ mixed((low * 0 + rank).to(tl.uint32))  # 0 for rank 0
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s = e
    if CAUSAL:  # prefix w begins at P w (w + 1) / 2
        step = (e // P).to(tl.float32)
        w = ((tl.sqrt(8.0 * step + 1.0) - 1.0) * 0.5).to(tl.int32)
        w = tl.where(w * (w + 1) // 2 > e // P, w - 1, w)
        w = tl.where((w + 1) * (w + 2) // 2 <= e // P, w + 1, w)
        s = e - P * (w * (w + 1) // 2)
    if BIASED:
        if GAUSSIAN:
            noise = (normals(start + e, low, high) * 8388608.0).to(tl.int64)
        else:
            noise = (random_words(start + e, low, high) >> 9).to(tl.int64)
        value = (s.to(tl.int64) << FRACTION) + ((noise * spread) >> 23) + tl.full([1], 6, tl.int64) * spread
    else:
        value = random_words(start + e, low, high).to(tl.int64)
    tl.store(KEYS + e, (value << low_bits) | s, mask=e < count)


@triton.jit
def order_statistic(KEYS, n, rank, bits, BLOCK: tl.constexpr):
    """The key with exactly `rank` smaller ones: eight bits at a time, from the highest. Each pass counts the next digit
    of the keys that begin with the digits found so far; all of these have the same number of smaller keys outside."""
    found = tl.zeros([1], tl.int64)
    rank += tl.zeros([1], tl.int32)
    for step in range(0, bits, 8):
        shift = bits - 8 - step
        counts = tl.zeros([256], tl.int32)
        for first in range(0, n, BLOCK):
            at = first + tl.arange(0, BLOCK)
            key = tl.load(KEYS + at, mask=at < n, other=-1)
            begins = (key >> (shift + 8)) == found
            digit = tl.where(begins, (key >> shift) & 255, 0).to(tl.int32)
            others = tl.sum((~begins).to(tl.int32), 0)
            counts += tl.histogram(digit, 256) - tl.where(tl.arange(0, 256) == 0, others, 0)
        smaller = tl.cumsum(counts, 0) - counts
        digit = tl.sum((smaller <= rank).to(tl.int32), 0) - 1
        rank -= tl.sum(tl.where(tl.arange(0, 256) < digit, counts, 0), 0)
        found = (found << 8) + digit
    return found


@triton.jit
def choose(KEYS, SOURCES, W, P, bits, CAUSAL: tl.constexpr, BLOCK: tl.constexpr):
    """The sources of window w: the last P of its prefix if causal, otherwise those from wP on; by position."""
    w = tl.program_id(0)
    n = W * P
    if CAUSAL:
        n = (w + 1) * P
        KEYS += (P * (w * (w + 1) // 2)).to(tl.int64)
    least = order_statistic(KEYS, n, w * P, bits, BLOCK)
    end = tl.full([1], 1 << 62, tl.int64)
    if not CAUSAL:
        if w + 1 < W:
            end = order_statistic(KEYS, n, (w + 1) * P, bits, BLOCK)
    placed = 0
    for first in range(0, n, BLOCK):
        at = first + tl.arange(0, BLOCK)
        key = tl.load(KEYS + at, mask=at < n, other=1 << 62)
        mine = (key >= least) & (key < end)
        slot = placed + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(SOURCES + w * P + slot, at, mask=mine)
        placed += tl.sum(mine.to(tl.int32), 0)


@triton.jit
def thin(KEYS, SOURCES, KEPT, P, S, bits, BLOCK: tl.constexpr):
    """S of the P sources of window w, those with the smallest keys, in their order."""
    w = tl.program_id(0)
    least = order_statistic(KEYS + w * P, P, S, bits, BLOCK)
    placed = 0
    for first in range(0, P, BLOCK):
        at = first + tl.arange(0, BLOCK)
        key = tl.load(KEYS + w * P + at, mask=at < P, other=1 << 62)
        mine = key < least
        slot = placed + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(KEPT + w * S + slot, tl.load(SOURCES + w * P + at, mask=mine), mask=mine)
        placed += tl.sum(mine.to(tl.int32), 0)


@triton.jit
def uniform(KEY, OUT, count, rank, BLOCK: tl.constexpr):
    """Numbers from U(0, 1)."""
    low, high = load_key(KEY)
    high = high ^ mixed((low * 0 + rank).to(tl.uint32))
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(OUT + at, (random_words(at, low, high) >> 8).to(tl.float32) * (1.0 / 16777216), mask=at < count)
