"""Triton kernels: forward pass of attention within the groups of a sequence sorted by group.

A slot is a place in the sorted order; ORDER is the token in each slot, GROUP its group, and START the first slot of
each group. A group is cut into runs of `size` slots. The query in slot s attends to an interval of slots [low, high):
its own run and, with BACK, the run before it in the same group; up to s if causal. With OTHERS it attends to itself
only if it is alone. Tokens of the group `groups` attend to nothing. With SHARED, keys are the normalised
queries: K is Q, and INV holds 1 / |q|. HEADS heads of Q share a head of K and V. For DROPOUT, orders are more heads:
`earlier` is the number of heads of all earlier ones.

Both ends of the interval grow with s, so a tile of queries needs one range of keys, and a tile of keys one range of
queries. `attend` continues the softmax that an earlier order stored in OUT and LSE (MORE). Logarithms are to base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..random import kept, row_words
from ..rows import load_rows, store_rows
from ..softmax import log_normaliser, mean, no_keys, weigh


@triton.jit
def run_of(s, live, GROUP, START, groups, size):
    """For slots s: whether they are live, the first slot of their run, and the first and last + 1 of their group."""
    g = tl.load(GROUP + s, mask=live, other=groups)
    live = live & (g < groups)
    start = tl.load(START + g, mask=live, other=0)
    end = tl.load(START + g + 1, mask=live, other=0)
    return live, start + (s - start) // size * size, start, end


@triton.jit
def seen_slots(s, live, GROUP, START, groups, size, BACK: tl.constexpr, CAUSAL: tl.constexpr):
    """[low, high) of the keys of queries in slots s; empty if not live."""
    live, run, start, end = run_of(s, live, GROUP, START, groups, size)
    low = tl.maximum(run - size, start) if BACK else run
    high = s + 1 if CAUSAL else tl.minimum(run + size, end)
    return tl.where(live, low, 0), tl.where(live, high, 0)


@triton.jit
def asking_slots(s, live, GROUP, START, groups, size, BACK: tl.constexpr, CAUSAL: tl.constexpr):
    """[first, last) of the queries that attend to the keys in slots s; empty if not live."""
    live, run, _, end = run_of(s, live, GROUP, START, groups, size)
    first = s if CAUSAL else run
    last = tl.minimum(run + (2 * size if BACK else size), end)
    return tl.where(live, first, 0), tl.where(live, last, 0)


@triton.jit
def sees(s, low, high, j, OTHERS: tl.constexpr):
    """(queries, keys), all arguments in that shape."""
    allowed = (low <= j) & (j < high)
    if OTHERS:
        allowed = allowed & ((j != s) | (high - low == 1))
    return allowed


@triton.jit
def bounds(low, high):
    """The smallest range that contains all [low, high) that are not empty."""
    stop = tl.max(high, 0)
    return tl.min(tl.where(low < high, low, stop), 0), stop


@triton.jit
def attend(
    Q, K, V, INV, ORDER, GROUP, START, KEY, OUT, LSE,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, o_b, o_h, o_l,
    H, L, groups, size, threshold, earlier, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    BACK: tl.constexpr, CAUSAL: tl.constexpr, OTHERS: tl.constexpr, SHARED: tl.constexpr, MORE: tl.constexpr,
    PRECISION: tl.constexpr, HEADS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    tiles = (L + BQ - 1) // BQ
    bh = (tl.program_id(0) // tiles).to(tl.int64)  # tiles first: neighbours share keys
    b, h = bh // H, bh % H
    Q += b * q_b + h * q_h
    K += b * k_b + (h if SHARED else h // HEADS) * k_h
    V += b * v_b + h // HEADS * v_h
    OUT += b * o_b + h * o_h
    LSE += bh * L
    INV += bh * L
    ORDER += bh * L
    GROUP += bh * L
    START += bh * (groups + 1)
    d = tl.arange(0, BLOCK_D)
    s = tl.program_id(0) % tiles * BQ + tl.arange(0, BQ)
    live = s < L
    token = tl.load(ORDER + s, mask=live, other=0)
    low, high = seen_slots(s, live, GROUP, START, groups, size, BACK, CAUSAL)
    word = row_words(KEY, earlier + bh, token, DROPOUT)
    q = load_rows(Q, token, d, q_l, live, D, BLOCK_D)
    if MORE:
        top = tl.load(LSE + token, mask=live, other=float("-inf"))
        total = tl.where(top == float("-inf"), 0.0, 1.0)
        acc = load_rows(OUT, token, d, o_l, live, D, BLOCK_D).to(tl.float32)
    else:
        acc, top, total = no_keys(BQ, BLOCK_D)
    start, stop = bounds(low, high)
    for begin in range(start, stop, BK):
        j = begin + tl.arange(0, BK)
        key = tl.load(ORDER + j, mask=j < stop, other=0)
        k = load_rows(K, key, d, k_l, j < stop, D, BLOCK_D)
        v = load_rows(V, key, d, v_l, j < stop, D, BLOCK_D)
        allowed = sees(s[:, None], low[:, None], high[:, None], j[None, :], OTHERS)
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SHARED:
            x *= tl.load(INV + key, mask=j < stop, other=0.0)[None, :]
        p, old, top, total = weigh(x, allowed, top, total, scale)
        p *= kept(word[:, None], key[None, :], threshold, DROPOUT)
        acc = tl.dot(p.to(v.dtype), v, acc * old[:, None], input_precision=PRECISION)
    store_rows(OUT, mean(acc, total), token, d, o_l, live, D, BLOCK_D)
    tl.store(LSE + token, log_normaliser(top, total), mask=live)
