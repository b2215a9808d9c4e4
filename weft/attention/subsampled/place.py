"""Triton kernels: a random placement of an image's sources on its slots, and the sources of each window of slots."""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.random import load_key, mixed, random_words

COLUMN_BITS = tl.constexpr(15)  # those of `sampling_2d`
COLUMN = tl.constexpr(2**15 - 1)


@triton.jit
def half_sweep(
    STATE, low, high, counter, rows, columns, row_stride, column_stride, spread, parity, window, shift,
    ALONG_X: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Swap neighbours i - 1 and i along the rows, for i = 1 + parity, 3 + parity, ..., where chance decides so."""
    pairs = (rows - parity) // 2 * columns
    for first in range(0, pairs, BLOCK):
        e = first + tl.arange(0, BLOCK)
        i = e // columns * 2 + 1 + parity
        below = i * row_stride + e % columns * column_stride
        word = random_words(counter + below, low, high)
        u = ((word >> 8).to(tl.float32) + 0.5) * (1.0 / 16777216)
        least = tl.floor(spread * (tl.log(u) - tl.log(1.0 - u)))
        mine = tl.load(STATE + below - row_stride, mask=e < pairs)
        yours = tl.load(STATE + below, mask=e < pairs)
        if ALONG_X:
            difference = (mine & COLUMN) - (yours & COLUMN)
        else:
            difference = (mine >> COLUMN_BITS) - (yours >> COLUMN_BITS)
        swap = difference.to(tl.float32) > least
        if window > 0:
            swap = swap & ((i + window - shift) % window != 0)
        tl.store(STATE + below - row_stride, tl.where(swap, yours, mine), mask=e < pairs)
        tl.store(STATE + below, tl.where(swap, mine, yours), mask=e < pairs)
    tl.debug_barrier()


@triton.jit
def place(
    KEY, POOL, STATE, OWNER, chains, height, width, band, spread_y, spread_x, window, shift, rank,
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
    STATE += b.to(tl.int64) * cells
    OWNER += b.to(tl.int64) * cells
    for first in range(0, cells, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(STATE + at, tl.load(POOL + at, mask=at < cells), mask=at < cells)
        tl.store(OWNER + at, tl.full([BLOCK], -1, tl.int32), mask=at < cells)
    tl.debug_barrier()
    for sweep in range(SWEEPS):
        counter = (b * SWEEPS + sweep) * 2 * cells
        for parity in range(2):
            half_sweep(STATE, low, high, counter, end, width, width, 1, spread_y, parity, window, shift, False, BLOCK)
        for parity in range(2):
            half_sweep(
                STATE, low, high, counter + cells, width, end, 1, width, spread_x, parity, window, shift, True, BLOCK
            )
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
