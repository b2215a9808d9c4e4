"""Triton kernels: tables of the runs of a sequence sorted by group, and of the tokens in order of position.

ORDER, GROUP and START are those of `intervals`. A token stands for the newest run of its group from its position until
the next token of the group.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def list_runs(
    ORDER, START, FIRST, END, LAST, FROM,
    L, groups, size, R,
    ROWS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Tables (B·H, R): the slots [FIRST, END) of each run, its LAST token, and FROM which position on it is read as a
    whole: once the next run of its group has started, if causal. L: never."""
    bh = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    ORDER += bh * L
    START += bh * (groups + 1)
    first = tl.zeros([ROWS], tl.int32)
    stop = tl.zeros([ROWS], tl.int32)
    before = 0  # runs of earlier groups
    for g in range(groups):
        begin, end = tl.load(START + g), tl.load(START + g + 1)
        count = (end - begin + size - 1) // size
        mine = (c >= before) & (c < before + count)
        first = tl.where(mine, begin + (c - before) * size, first)
        stop = tl.where(mine, end, stop)
        before += count
    end = tl.minimum(first + size, stop)
    live = first < end
    whole = tl.where(live, 0, L)
    if CAUSAL:
        whole = tl.load(ORDER + end, mask=live & (end < stop), other=L)
    at = bh * R + c
    tl.store(FIRST + at, first, mask=c < R)
    tl.store(END + at, end, mask=c < R)
    tl.store(LAST + at, tl.load(ORDER + end - 1, mask=live, other=0), mask=c < R)
    tl.store(FROM + at, whole, mask=c < R)


@triton.jit
def describe_tokens(
    ORDER, GROUP, START, OF, ABOUT,
    L, groups, size,
    ROWS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Tables (B·H, L): the group OF a token, and ABOUT it: if causal, until which position it stands for its run, else
    the last token of its run. Masked tokens stand for nothing."""
    bh = tl.program_id(0).to(tl.int64)
    ORDER += bh * L
    START += bh * (groups + 1)
    s = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live = s < L
    token = tl.load(ORDER + s, mask=live, other=0)
    g = tl.load(GROUP + bh * L + s, mask=live, other=groups)
    real = g < groups
    begin = tl.load(START + g, mask=real, other=0)
    end = tl.load(START + g + 1, mask=real, other=0)
    if CAUSAL:
        about = tl.where(real, tl.load(ORDER + s + 1, mask=real & (s + 1 < end), other=L), 0)
    else:
        last = tl.minimum(begin + ((s - begin) // size + 1) * size, end) - 1
        about = tl.load(ORDER + last, mask=real, other=-1)
    tl.store(OF + bh * L + token, g, mask=live)
    tl.store(ABOUT + bh * L + token, about, mask=live)


@triton.jit
def last_before(
    ORDER, START, BEFORE,
    L, n, groups, steps,
    T: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """BEFORE (B·H, n, groups): the last token of each group before each tile of T tokens; -1 if there is none."""
    bh, g = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups
    ORDER += bh * L
    begin = tl.load(START + bh * (groups + 1) + g)
    end = tl.load(START + bh * (groups + 1) + g + 1)
    tile = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    low = tl.zeros([ROWS], tl.int32) + begin  # binary search: slots below `low` hold earlier tokens
    high = tl.zeros([ROWS], tl.int32) + end
    for _ in range(steps):
        middle = (low + high) // 2
        token = tl.load(ORDER + middle, mask=low < high, other=0)
        earlier = token < tile * T
        low, high = tl.where((low < high) & earlier, middle + 1, low), tl.where((low < high) & ~earlier, middle, high)
    found = tl.load(ORDER + low - 1, mask=(tile < n) & (low > begin), other=-1)
    tl.store(BEFORE + (bh * n + tile) * groups + g, found, mask=tile < n)
