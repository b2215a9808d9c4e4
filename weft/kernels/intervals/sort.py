"""Triton kernels: sort tokens by group, and move centroids towards the mean of their tokens.

A counting sort, stable and without atomics: `count_groups` counts the groups in each tile of tokens, `first_slots`
turns the counts into the first slot of each group, and of its tokens in each tile, and `scatter` writes the tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def members(GROUP, L, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Tokens of this tile, their groups, and which group each belongs to, (ROWS, GROUPS)."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    g = tl.load(GROUP + tl.program_id(1).to(tl.int64) * L + i, mask=i < L, other=-1).to(tl.int32)
    return i, g, (g[:, None] == tl.arange(0, GROUPS)[None, :]).to(tl.int32)


@triton.jit
def count_groups(GROUP, COUNTS, L, tiles, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """COUNTS (sequences, tiles, GROUPS)."""
    _, _, member = members(GROUP, L, ROWS, GROUPS)
    at = (tl.program_id(1).to(tl.int64) * tiles + tl.program_id(0)) * GROUPS
    tl.store(COUNTS + at + tl.arange(0, GROUPS), tl.sum(member, 0))


@triton.jit
def first_slots(COUNTS, START, tiles, groups, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """START (sequences, groups + 1); COUNTS become first slots. One program per sequence, ROWS tiles at a time."""
    sequence = tl.program_id(0).to(tl.int64)
    c, r = tl.arange(0, GROUPS), tl.arange(0, ROWS)
    COUNTS += sequence * tiles * GROUPS
    total = tl.zeros([GROUPS], tl.int32)
    for begin in range(0, tiles, ROWS):
        t = (begin + r)[:, None]
        total += tl.sum(tl.load(COUNTS + t * GROUPS + c[None, :], mask=t < tiles, other=0), 0)
    at = tl.cumsum(total, 0) - total
    tl.store(START + sequence * (groups + 1) + c, at, mask=c <= groups)
    for begin in range(0, tiles, ROWS):
        t = (begin + r)[:, None]
        count = tl.load(COUNTS + t * GROUPS + c[None, :], mask=t < tiles, other=0)
        before = tl.cumsum(count, 0) - count
        tl.store(COUNTS + t * GROUPS + c[None, :], at[None, :] + before, mask=t < tiles)
        at += tl.sum(count, 0)


@triton.jit
def scatter(GROUP, COUNTS, TOKEN, SORTED, L, tiles, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """TOKEN and SORTED (sequences, L): the token in each slot, and its group."""
    i, g, member = members(GROUP, L, ROWS, GROUPS)
    sequence = tl.program_id(1).to(tl.int64)
    first = tl.load(COUNTS + (sequence * tiles + tl.program_id(0)) * GROUPS + tl.arange(0, GROUPS))
    slot = tl.sum(member * (first[None, :] + tl.cumsum(member, 0) - 1), 1)
    tl.store(TOKEN + sequence * L + slot, i, mask=i < L)
    tl.store(SORTED + sequence * L + slot, g, mask=i < L)


@triton.jit
def fold(CENTROIDS, SUM, COUNT, COPY, decay, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Move each centroid towards the mean of its tokens, if it has any, and copy it."""
    d, at = tl.arange(0, BLOCK_D), tl.program_id(0)
    old = tl.load(CENTROIDS + at * D + d, mask=d < D, other=0.0).to(tl.float32)
    total = tl.load(SUM + at * D + d, mask=d < D, other=0.0).to(tl.float32)
    count = tl.load(COUNT + at).to(tl.float32)
    x = decay * old + (1 - decay) * total / tl.maximum(count, 1.0)
    x = tl.where(count > 0.0, x / tl.maximum(tl.sqrt(tl.sum(x * x, 0)), 1e-12), old)
    tl.store(CENTROIDS + at * D + d, x.to(CENTROIDS.dtype.element_ty), mask=d < D)
    tl.store(COPY + at * D + d, x.to(COPY.dtype.element_ty), mask=d < D)
