"""Triton kernels: a random placement of an image's sources on its slots, and the sources of each window of slots."""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.random import load_key, mixed, random_words

COLUMN_BITS = tl.constexpr(15)  # those of `sampling_2d`
COLUMN = tl.constexpr(2**15 - 1)
NEVER = tl.constexpr(32767.0)  # no coordinates differ by more


@triton.jit
def thresholds(
    KEY, LEAST, count, cells, width, spread_y, spread_x, window, shift, rank, BLOCK: tl.constexpr,
):  # fmt: skip
    """LEAST (bands, sweeps, 2, cells): a cell is swapped with its neighbour above (0) or to the left (1) if the
    coordinates of their sources differ by more."""
    low, high = load_key(KEY)
    high = high ^ mixed((low * 0 + rank).to(tl.uint32))
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    u = ((random_words(at, low, high) >> 8).to(tl.float32) + 0.5) * (1.0 / 16777216)
    along_x, cell = at // cells % 2 == 1, at % cells
    least = tl.floor(tl.where(along_x, spread_x, spread_y) * (tl.log(u) - tl.log(1.0 - u)))
    if window > 0:
        i = tl.where(along_x, cell % width, cell // width)
        least = tl.where((i + window - shift) % window == 0, NEVER, least)
    tl.store(LEAST + at, tl.minimum(tl.maximum(least, -NEVER), NEVER).to(tl.int16), mask=at < count)


@triton.jit
def half_sweep(STATE, LEAST, end, width, parity, ALONG_X: tl.constexpr, BLOCK: tl.constexpr):
    """Swap neighbours i - 1 and i along a column or a row, for i = 1 + parity, 3 + parity, ..., where chance decides
    so. Adjacent threads take adjacent pairs of a row."""
    across = (width - parity) // 2 if ALONG_X else width
    down = end if ALONG_X else (end - parity) // 2
    step = 1 if ALONG_X else width
    pairs = down * across
    for first in range(0, pairs, BLOCK):
        e = first + tl.arange(0, BLOCK)
        if ALONG_X:
            below = e // across * width + e % across * 2 + 1 + parity
        else:
            below = (e // across * 2 + 1 + parity) * width + e % across
        least = tl.load(LEAST + below, mask=e < pairs)
        mine = tl.load(STATE + below - step, mask=e < pairs)
        yours = tl.load(STATE + below, mask=e < pairs)
        if ALONG_X:
            difference = (mine & COLUMN) - (yours & COLUMN)
        else:
            difference = (mine >> COLUMN_BITS) - (yours >> COLUMN_BITS)
        swap = difference > least
        tl.store(STATE + below - step, tl.where(swap, yours, mine), mask=e < pairs)
        tl.store(STATE + below, tl.where(swap, mine, yours), mask=e < pairs)
    tl.debug_barrier()


@triton.jit
def place(
    KEY, POOL, LEAST, STATE, OWNER, chains, height, width, band, rank,
    rows, columns, across, SWEEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per band: continue a chain of its pool, on the rows up to the end of the band. OWNER gets the window
    of the slot of each source, -1 for a slot in an earlier band. Windows have `rows` x `columns` cells, `across` in a
    row. Each thread waits for the others after a half sweep."""
    low, high = load_key(KEY)
    high = high ^ mixed((low * 0 + rank).to(tl.uint32))
    b = tl.program_id(0)
    cells = height * width
    end = tl.minimum((b + 1) * band, height)
    total = tl.num_programs(0) * cells * (2 * SWEEPS)
    chain = (random_words(low * 0 + total.to(tl.uint32), low, high) % chains.to(tl.uint32)).to(tl.int64)
    POOL += (b * chains + chain) * cells
    LEAST += b.to(tl.int64) * SWEEPS * 2 * cells
    STATE += b.to(tl.int64) * cells
    OWNER += b.to(tl.int64) * cells
    for first in range(0, cells, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(STATE + at, tl.load(POOL + at, mask=at < cells), mask=at < cells)
        tl.store(OWNER + at, tl.full([BLOCK], -1, tl.int32), mask=at < cells)
    tl.debug_barrier()
    for sweep in range(SWEEPS):
        for parity in range(2):
            half_sweep(STATE, LEAST + 2 * sweep * cells, end, width, parity, False, BLOCK)
        for parity in range(2):
            half_sweep(STATE, LEAST + (2 * sweep + 1) * cells, end, width, parity, True, BLOCK)
    for first in range(b * band * width, end * width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        source = tl.load(STATE + at, mask=at < end * width, other=0)
        source = (source >> COLUMN_BITS) * width + (source & COLUMN)
        owner = at // width // rows * across + at % width // columns
        tl.store(OWNER + source, owner, mask=at < end * width)


@triton.jit
def owned(OWNER, SOURCES, cells, P, channels, CAUSAL: tl.constexpr, BLOCK: tl.constexpr):
    """The tokens of window w's sources by position, then `cells * channels` in empty slots."""
    w = tl.program_id(0)
    SOURCES += w.to(tl.int64) * P
    if CAUSAL:  # a band of rows is a window
        OWNER += w.to(tl.int64) * cells
    placed = 0
    for first in range(0, cells, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mine = tl.load(OWNER + at, mask=at < cells, other=-1) == w
        slot = (placed + tl.cumsum(mine.to(tl.int32), 0) - 1) * channels
        for c in range(channels):
            tl.store(SOURCES + slot + c, at * channels + c, mask=mine)
        placed += tl.sum(mine.to(tl.int32), 0)
    for first in range(placed * channels, P, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(SOURCES + at, tl.full([BLOCK], 0, tl.int32) + cells * channels, mask=at < P)
