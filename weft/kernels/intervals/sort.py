"""Triton kernels: a stable sort of tokens by group, by counting, and the centroids of the groups."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def count_groups(GROUP, COUNTS, L, tiles, groups, TILE: tl.constexpr, CHUNK: tl.constexpr):
    """COUNTS (sequences, tiles, groups + 1): the tokens of each group in each tile of a sequence."""
    tile, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
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
    tile, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
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
