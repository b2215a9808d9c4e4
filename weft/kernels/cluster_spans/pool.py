"""Triton kernels: the pooled query and key of a run up to each of its tokens, and their gradients.

A program walks along one run of one head. Ties split gradients as in `running_max` of `combiner/summaries.py`, with
groups of about √size tokens (see `line_pool`).
"""

# mypy: disable-error-code="assignment,misc"
# Rows held in registers are tuples that grow while a loop is unrolled.

from __future__ import annotations

import triton
import triton.language as tl

from ..line_pool.backward import share
from ..line_pool.forward import load_row, store_row


@triton.jit
def own_run(FIRST, END, BH, H, R, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Head, batch entry and channels of this program, and the slots of its run."""
    blocks: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    pid = tl.program_id(0)
    bh = (pid // blocks % BH).to(tl.int64)
    at = bh * R + pid // (blocks * BH)
    d = pid % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    return bh, bh // H, bh % H, d, tl.load(FIRST + at), tl.load(END + at)


@triton.jit
def pool_runs(
    Q, K, ORDER, FIRST, END, QBAR, KBAR,
    q_b, q_h, q_l, k_b, k_h, k_l,
    BH, H, L, R,
    D: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, POOL: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """QBAR and KBAR are (B·H, L, D). Programs of the second axis: queries, keys."""
    bh, b, h, d, first, end = own_run(FIRST, END, BH, H, R, D, BLOCK_D)
    if tl.program_id(1) == 0:
        X, x_l, OUT = Q + b * q_b + h * q_h, tl.cast(q_l, tl.int64), QBAR + bh * L * D
    else:
        X, x_l, OUT = K + b * k_b + h // HEADS * k_h, tl.cast(k_l, tl.int64), KBAR + bh * L * D
    ORDER += bh * L
    kept = tl.full([BLOCK_D], float("-inf") if POOL == "max" else 0.0, tl.float32)
    for begin in range(first, end, CHUNK):
        xs = ()
        tokens = ()
        for r in tl.static_range(CHUNK):
            tokens = tokens + (tl.load(ORDER + begin + r, mask=begin + r < end, other=0),)
            xs = xs + (load_row(X, tokens[r], x_l, d, begin + r < end, D),)
        for r in tl.static_range(CHUNK):
            kept = tl.maximum(kept, xs[r]) if POOL == "max" else kept + xs[r]
            pooled = kept / (begin + r + 1 - first) if POOL == "mean" else kept
            store_row(OUT, pooled, tokens[r], D, d, begin + r < end, D)


@triton.jit
def pool_gradients(
    Q, K, ORDER, FIRST, END, QBAR, KBAR, DQBAR, DKBAR, DQ, DK,
    q_b, q_h, q_l, k_b, k_h, k_l, dq_b, dq_h, dq_l, dk_b, dk_h, dk_l,
    BH, H, L, R,
    D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, POOL: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Add to DQ and DK, group by group from the end of the run."""
    bh, b, h, d, first, end = own_run(FIRST, END, BH, H, R, D, BLOCK_D)
    at = bh * L * D
    if tl.program_id(1) == 0:
        X, x_l, OUT, DOUT = Q + b * q_b + h * q_h, tl.cast(q_l, tl.int64), QBAR + at, DQBAR + at
        DX, dx_l = DQ + b * dq_b + h * dq_h, tl.cast(dq_l, tl.int64)
    else:
        X, x_l, OUT, DOUT = K + b * k_b + h // HEADS * k_h, tl.cast(k_l, tl.int64), KBAR + at, DKBAR + at
        DX, dx_l = DK + b * dk_b + h * dk_h, tl.cast(dk_l, tl.int64)
    ORDER += bh * L
    groups = (end - first + GROUP - 1) // GROUP
    carried = tl.zeros([BLOCK_D], tl.float32)  # of later tokens: for the maximum of all groups so far, or for the sum
    for number in range(groups):
        begin = first + (groups - 1 - number) * GROUP
        tokens = ()
        xs = ()
        douts = ()
        olds = ()
        for r in tl.static_range(GROUP):
            inside = begin + r < end
            tokens = tokens + (tl.load(ORDER + begin + r, mask=inside, other=0),)
            xs = xs + (load_row(X, tokens[r], x_l, d, inside, D),)
            douts = douts + (load_row(DOUT, tokens[r], D, d, inside, D),)
            olds = olds + (load_row(DX, tokens[r], dx_l, d, inside, D),)
        if POOL == "max":
            before = tl.load(ORDER + begin - 1, mask=begin > first, other=0)
            earlier = load_row(OUT, before, D, d, begin > first, D)  # the maximum of all earlier groups
            earlier = tl.where(begin > first, earlier, float("-inf"))
            entries = ()
            tops = ()
            for r in tl.static_range(GROUP):
                entries = entries + (tl.where(begin + r < end, xs[r], float("-inf")),)
                tops = tops + ((entries[r] if r == 0 else tl.maximum(entries[r], tops[r - 1])),)
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
                store_row(DX, olds[r] + dx, tokens[r], dx_l, d, begin + r < end, D)
        else:
            for r in tl.static_range(GROUP - 1, -1, -1):
                carried += douts[r] / (begin + r + 1 - first) if POOL == "mean" else douts[r]
                store_row(DX, olds[r] + carried, tokens[r], dx_l, d, begin + r < end, D)
