"""Triton kernels: a stable sort of tokens by group, by counting, and the centroids of the groups."""

from __future__ import annotations

import triton
import triton.language as tl

from ..rows import load_rows


@triton.jit
def count_groups(GROUP, COUNTS, L, tiles, groups, TILE: tl.constexpr, CHUNK: tl.constexpr):
    """COUNTS (sequences, tiles, groups + 1): the tokens of each group in each tile of a sequence."""
    n, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tile * TILE + tl.arange(0, TILE)
    group = tl.load(GROUP + n * L + i, mask=i < L, other=-1).to(tl.int32)
    for first in range(0, groups + 1, CHUNK):
        g = first + tl.arange(0, CHUNK)
        count = tl.sum((group[:, None] == g[None, :]).to(tl.int32), 0)
        tl.store(COUNTS + (n * tiles + tile) * (groups + 1) + g, count, mask=g <= groups)


@triton.jit
def first_slots(COUNTS, START, tiles, groups, TILES: tl.constexpr, CHUNK: tl.constexpr):
    """START (sequences, groups + 1): the first slot of each group. COUNTS become the first slots of each tile."""
    n = tl.program_id(0).to(tl.int64)
    COUNTS += n * tiles * (groups + 1)
    before = 0
    for first in range(0, groups + 1, CHUNK):
        g = first + tl.arange(0, CHUNK)
        total = tl.zeros([CHUNK], tl.int32)
        for t in range(0, tiles, TILES):
            tile = t + tl.arange(0, TILES)
            inside = (tile < tiles)[:, None] & (g <= groups)[None, :]
            total += tl.sum(tl.load(COUNTS + tile[:, None] * (groups + 1) + g[None, :], mask=inside, other=0), 0)
        slot = before + tl.cumsum(total, 0) - total
        tl.store(START + n * (groups + 1) + g, slot, mask=g <= groups)
        before += tl.sum(total, 0)
        for t in range(0, tiles, TILES):
            tile = t + tl.arange(0, TILES)
            inside = (tile < tiles)[:, None] & (g <= groups)[None, :]
            at = COUNTS + tile[:, None] * (groups + 1) + g[None, :]
            count = tl.load(at, mask=inside, other=0)
            tl.store(at, slot[None, :] + tl.cumsum(count, 0) - count, mask=inside)
            slot += tl.sum(count, 0)


@triton.jit
def place_tokens(GROUP, COUNTS, TOKEN, ORDERED, L, tiles, groups, TILE: tl.constexpr, CHUNK: tl.constexpr):
    """TOKEN and ORDERED (sequences, L): the token in each slot and its group, from the first slots of `first_slots`."""
    n, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tile * TILE + tl.arange(0, TILE)
    group = tl.load(GROUP + n * L + i, mask=i < L, other=-1).to(tl.int32)
    slot = tl.zeros([TILE], tl.int32)
    for first in range(0, groups + 1, CHUNK):
        g = first + tl.arange(0, CHUNK)
        mine = (group[:, None] == g[None, :]).to(tl.int32)
        begin = tl.load(COUNTS + (n * tiles + tile) * (groups + 1) + g, mask=g <= groups, other=0)
        slot += tl.sum(mine * (begin[None, :] + tl.cumsum(mine, 0) - 1), 1)
    tl.store(TOKEN + n * L + slot, i, mask=i < L)
    tl.store(ORDERED + n * L + slot, group, mask=i < L)


@triton.jit
def move_centroids(CENTROIDS, DRAWN, COUNT, COPY, decay, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Move each centroid towards the mean of the unit keys of the last batch, and copy it."""
    c, d = tl.program_id(0), tl.arange(0, BLOCK_D)
    old = tl.load(CENTROIDS + c * D + d, mask=d < D, other=0.0).to(tl.float32)
    count = tl.load(COUNT + c).to(tl.float32)
    mean = tl.load(DRAWN + c * D + d, mask=d < D, other=0.0).to(tl.float32) / tl.maximum(count, 1.0)
    moved = decay * old + (1.0 - decay) * mean
    moved = moved / tl.maximum(tl.sqrt(tl.sum(moved * moved, 0)), 1e-12)
    new = tl.where(count > 0, moved, old).to(CENTROIDS.dtype.element_ty)
    tl.store(CENTROIDS + c * D + d, new, mask=d < D)
    tl.store(COPY + c * D + d, new, mask=d < D)


@triton.jit
def sum_tokens(X, CONTENT, x_b, x_h, x_l, H, L, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr):
    """CONTENT (B·H, parts, D): the bits of the sums of x over the tokens of each part of a sequence, in float32."""
    bh, part, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK_D)
    length = tl.cdiv(L, tl.num_programs(1))
    X += bh // H * x_b + bh % H * x_h
    total = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, length, ROWS):
        i = first + tl.arange(0, ROWS)
        live = (i < length) & (part * length + i < L)
        total += tl.sum(load_rows(X, part * length + i, d, x_l, live, D, BLOCK_D).to(tl.float32), 0)
    at = CONTENT + (bh * tl.num_programs(1) + part) * D + d
    tl.store(at, total.to(tl.int32, bitcast=True), mask=d < D)
