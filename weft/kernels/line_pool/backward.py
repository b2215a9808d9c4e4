"""Triton kernels: backward pass of pooling along the lines of a grid. Loops are as in `forward.py`.

Ties split gradients as in `combiner/summaries.py`. There, the running maximum halves a gradient wherever two equal
values meet: one after the other within a group of about √T positions, and once more where a group meets the maximum of
all earlier groups. The maximum of all others splits a gradient equally among all equal values.
"""

# mypy: disable-error-code="assignment,misc"
# Rows held in registers are tuples that grow while a loop is unrolled.

from __future__ import annotations

import triton
import triton.language as tl

from ..rows import valid_rows
from .forward import load_row, place, store_row


@triton.jit
def pool_gradients(
    Q, K, MASK, QBAR, KBAR, SOME, DQBAR, DKBAR, DQ, DK,
    q_b, q_h, q_l, k_b, k_h, k_l, o_b, o_h, o_l, p_b, p_h, p_l, mask_b, some_b,
    do_b, do_h, do_l, dp_b, dp_h, dp_l, dq_b, dq_h, dq_l, dk_b, dk_h, dk_l,
    BH, H, length, cells, line_step, cell_step,
    D: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, LINE: tl.constexpr, RULE: tl.constexpr,
    POOL: tl.constexpr, HAS_MASK: tl.constexpr, MORE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """CHUNK is the group size of the running maximum; LINE is a power of two, at least the length of a line. With MORE,
    add to DQ and DK."""
    b, h, d, start, step = place(BH, H, cells, line_step, cell_step, D, BLOCK_D, RULE == "after")
    if tl.program_id(1) == 0:
        X, x_l = Q + b * q_b + h * q_h, tl.cast(q_l, tl.int64)
        OUT, out_l = QBAR + b * o_b + h * o_h, tl.cast(o_l, tl.int64)
        DOUT, dout_l = DQBAR + b * do_b + h * do_h, tl.cast(do_l, tl.int64)
        DX, dx_l = DQ + b * dq_b + h * dq_h, tl.cast(dq_l, tl.int64)
    else:
        X, x_l = K + b * k_b + h // GROUP * k_h, tl.cast(k_l, tl.int64)
        OUT, out_l = KBAR + b * p_b + h * p_h, tl.cast(p_l, tl.int64)
        DOUT, dout_l = DKBAR + b * dp_b + h * dp_h, tl.cast(dp_l, tl.int64)
        DX, dx_l = DK + b * dk_b + h * dk_h, tl.cast(dk_l, tl.int64)
    MASK += b * mask_b
    SOME += b * some_b
    if POOL != "max":
        sum_gradients(
            MASK, DOUT, DX, dout_l, dx_l, d, start, step, cells, length,
            D, BLOCK_D, CHUNK, LINE, RULE, POOL, HAS_MASK, MORE,
        )  # fmt: skip
    elif RULE == "others":
        other_max_gradients(
            X, MASK, DOUT, DX, x_l, dout_l, dx_l, d, start, step, cells, length, D, BLOCK_D, CHUNK, HAS_MASK, MORE
        )
    else:
        running_max_gradients(
            X, MASK, OUT, SOME, DOUT, DX, x_l, out_l, dout_l, dx_l, d, start, step, cells, length,
            D, BLOCK_D, CHUNK, RULE, HAS_MASK, MORE,
        )  # fmt: skip


@triton.jit
def earlier_gradient(DX, token, dx_l, d, inside, D: tl.constexpr, BLOCK_D: tl.constexpr, MORE: tl.constexpr):
    """What to add to. Loaded with the other rows of a chunk, before the first is used."""
    return load_row(DX, token, dx_l, d, inside, D) if MORE else tl.zeros([BLOCK_D], tl.float32)


@triton.jit
def share(a, b):
    """The share of the gradient of max(a, b) that goes to a."""
    return tl.where(a > b, 1.0, tl.where(a == b, 0.5, 0.0))


@triton.jit
def running_max_gradients(
    X, MASK, OUT, SOME, DOUT, DX, x_l, out_l, dout_l, dx_l, d, start, step, cells, length,
    D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, RULE: tl.constexpr, HAS_MASK: tl.constexpr,
    MORE: tl.constexpr,
):  # fmt: skip
    """Group by group from the end. Entry e is first pooled at position e, or at e + 1 if a position excludes itself.
    Entries that are never pooled get zero."""
    shift: tl.constexpr = 0 if RULE == "up_to" else 1
    groups = (cells + GROUP - 1) // GROUP
    carried = tl.zeros([BLOCK_D], tl.float32)  # gradient of later positions for the maximum of all groups so far
    for number in range(groups):
        begin = (groups - 1 - number) * GROUP
        before = start + (begin - 1 + shift) * step
        earlier = load_row(OUT, before, out_l, d, begin > 0, D)  # the maximum of all earlier groups
        some = tl.load(SOME + before, mask=begin > 0, other=0) != 0
        xs = ()
        reals = ()
        douts = ()
        olds = ()
        for r in tl.static_range(GROUP):
            token = start + (begin + r) * step
            inside = (begin + r < cells) & (token < length)
            olds = olds + (earlier_gradient(DX, token, dx_l, d, inside, D, BLOCK_D, MORE),)
            xs = xs + (load_row(X, token, x_l, d, inside, D),)
            reals = reals + (valid_rows(MASK, token, inside, HAS_MASK),)
            douts = douts + (load_row(DOUT, token + shift * step, dout_l, d, begin + r + shift < cells, D),)
        earlier = tl.where(some, earlier, float("-inf"))
        entry = tl.where(reals[0], xs[0], float("-inf"))
        entries = (entry,)
        tops = (entry,)
        for r in tl.static_range(1, GROUP):
            entry = tl.where(reals[r], xs[r], float("-inf"))
            entries = entries + (entry,)
            tops = tops + (tl.maximum(entry, tops[r - 1]),)
        flow = carried * share(tops[GROUP - 1], earlier)  # the gradient of the group's running maximum
        carried -= flow
        for r in tl.static_range(GROUP - 1, -1, -1):
            own = douts[r] * share(tops[r], earlier)
            carried += douts[r] - own
            flow += own
            dx = flow
            if r > 0:
                dx = flow * share(entries[r], tops[r - 1])
            flow -= dx
            token = start + (begin + r) * step
            inside = (begin + r < cells) & (token < length)
            store_row(DX, olds[r] + tl.where(reals[r], dx, 0.0), token, dx_l, d, inside, D)


@triton.jit
def other_max_gradients(
    X, MASK, DOUT, DX, x_l, dout_l, dx_l, d, start, step, cells, length,
    D: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, HAS_MASK: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """The largest entries share the gradients of all positions. If only one position is the largest, its own gradient
    goes to the second largest."""
    top = tl.full([BLOCK_D], float("-inf"), tl.float32)
    second = top
    at_top = tl.zeros([BLOCK_D], tl.float32)  # how many
    at_second = at_top
    total = at_top
    of_top = at_top
    for begin in range(0, cells, CHUNK):
        xs = ()
        reals = ()
        douts = ()
        for r in tl.static_range(CHUNK):
            token = start + (begin + r) * step
            inside = (begin + r < cells) & (token < length)
            xs = xs + (load_row(X, token, x_l, d, inside, D),)
            reals = reals + (valid_rows(MASK, token, inside, HAS_MASK),)
            douts = douts + (load_row(DOUT, token, dout_l, d, begin + r < cells, D),)
        for r in tl.static_range(CHUNK):
            x = tl.where(reals[r], xs[r], float("-inf"))
            total += douts[r]
            as_second = at_second + tl.where((x == second) & (x < top), 1.0, 0.0)
            at_second = tl.where(x > top, at_top, tl.where((x > second) & (x < top), 1.0, as_second))
            at_top = tl.where(x > top, 1.0, at_top + tl.where(x == top, 1.0, 0.0))
            of_top = tl.where(x > top, douts[r], of_top)
            second = tl.where(x == top, second, tl.maximum(second, tl.minimum(x, top)))
            top = tl.maximum(top, x)
    single = at_top == 1.0
    to_top = (total - tl.where(single, of_top, 0.0)) / tl.maximum(at_top, 1.0)
    to_second = tl.where(single, of_top / tl.maximum(at_second, 1.0), 0.0)
    for begin in range(0, cells, CHUNK):
        xs = ()
        reals = ()
        olds = ()
        for r in tl.static_range(CHUNK):
            token = start + (begin + r) * step
            inside = (begin + r < cells) & (token < length)
            olds = olds + (earlier_gradient(DX, token, dx_l, d, inside, D, BLOCK_D, MORE),)
            xs = xs + (load_row(X, token, x_l, d, inside, D),)
            reals = reals + (valid_rows(MASK, token, inside, HAS_MASK),)
        for r in tl.static_range(CHUNK):
            token = start + (begin + r) * step
            inside = (begin + r < cells) & (token < length)
            dx = tl.where(xs[r] == top, to_top, tl.where(xs[r] == second, to_second, 0.0))
            store_row(DX, olds[r] + tl.where(reals[r], dx, 0.0), token, dx_l, d, inside, D)


@triton.jit
def real_tokens(MASK, start, step, cells, length, HAS_MASK: tl.constexpr, LINE: tl.constexpr):
    t = tl.arange(0, LINE)
    token = start + t * step
    return tl.sum(valid_rows(MASK, token, (t < cells) & (token < length), HAS_MASK).to(tl.int32), 0)


@triton.jit
def sum_gradients(
    MASK, DOUT, DX, dout_l, dx_l, d, start, step, cells, length,
    D: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, LINE: tl.constexpr, RULE: tl.constexpr,
    POOL: tl.constexpr, HAS_MASK: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """An entry gets gradients from every position that pools it: the later ones, from the end, or all but its own."""
    total = tl.zeros([BLOCK_D], tl.float32)
    count = real_tokens(MASK, start, step, cells, length, HAS_MASK, LINE) if POOL == "mean" else 0
    chunks = (cells + CHUNK - 1) // CHUNK
    if RULE == "others":
        for number in range(chunks):
            for r in tl.static_range(CHUNK):
                t = number * CHUNK + r
                token = start + t * step
                dout = load_row(DOUT, token, dout_l, d, t < cells, D)
                if POOL == "mean":
                    real = valid_rows(MASK, token, (t < cells) & (token < length), HAS_MASK)
                    dout = dout / tl.maximum(count - real.to(tl.int32), 1)
                total += dout
    for number in range(chunks):
        begin = (chunks - 1 - number) * CHUNK
        douts = ()
        reals = ()
        olds = ()
        for r in tl.static_range(CHUNK):
            token = start + (begin + r) * step
            douts = douts + (load_row(DOUT, token, dout_l, d, begin + r < cells, D),)
            inside = (begin + r < cells) & (token < length)
            olds = olds + (earlier_gradient(DX, token, dx_l, d, inside, D, BLOCK_D, MORE),)
            reals = reals + (valid_rows(MASK, token, inside, HAS_MASK),)
        for r in tl.static_range(CHUNK - 1, -1, -1):
            fewer = count - reals[r].to(tl.int32)
            dout = douts[r]
            if POOL == "mean":
                dout = dout / tl.maximum(count if RULE == "up_to" else fewer, 1)
            dx = total - dout if RULE == "others" else total
            if RULE == "up_to":
                dx = total + dout
            if RULE != "others":
                total += dout
                count = fewer
            token = start + (begin + r) * step
            inside = (begin + r < cells) & (token < length)
            store_row(DX, olds[r] + tl.where(reals[r], dx, 0.0), token, dx_l, d, inside, D)
