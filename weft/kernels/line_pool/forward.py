"""Triton kernels: forward pass of pooling along the lines of a grid.

Position t of a line is token start + t·step. A row has step 1, a column has the width of the grid. A loop from the end
has a negative step, which turns "after" into "before". A program loops over one line of one head and some channels of q
or k, with the running maximum or sum in registers. All rows of a chunk are loaded before the first is used. Program ids
run over heads first, so concurrent programs read whole rows of (B, L, H, D) memory.
"""

# mypy: disable-error-code="assignment,misc"
# Rows held in registers are tuples that grow while a loop is unrolled.

from __future__ import annotations

import triton
import triton.language as tl

from ..rows import valid_rows


@triton.jit
def load_row(X, token, row_stride, d, inside, D: tl.constexpr):
    return tl.load(X + token.to(tl.int64) * row_stride + d, mask=d < tl.where(inside, D, 0), other=0.0).to(tl.float32)


@triton.jit
def load_chunk(
    X, MASK, x_l, d, start, step, begin, cells, length, D: tl.constexpr, CHUNK: tl.constexpr, HAS_MASK: tl.constexpr
):  # fmt: skip
    """CHUNK rows of a line from position `begin` on, and which of them are real tokens."""
    xs = ()
    reals = ()
    for r in tl.static_range(CHUNK):
        token = start + (begin + r) * step
        inside = (begin + r < cells) & (token < length)
        xs = xs + (load_row(X, token, x_l, d, inside, D),)
        reals = reals + (valid_rows(MASK, token, inside, HAS_MASK),)
    return xs, reals


@triton.jit
def store_row(X, x, token, row_stride, d, inside, D: tl.constexpr):
    tl.store(X + token.to(tl.int64) * row_stride + d, x.to(X.dtype.element_ty), mask=d < tl.where(inside, D, 0))


@triton.jit
def finish(kept, count, POOL: tl.constexpr):
    """The pooled vector, zeros for an empty set."""
    if POOL == "max":
        return tl.where(count > 0, kept, 0.0)
    elif POOL == "mean":
        return kept / tl.maximum(count, 1)
    else:
        return kept


@triton.jit
def place(BH, H, cells, line_step, cell_step, D: tl.constexpr, BLOCK_D: tl.constexpr, BACKWARDS: tl.constexpr):
    """Head, batch entry and channels of this program, and the first token and step of its line."""
    blocks: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    pid = tl.program_id(0)
    first_d = pid % blocks * BLOCK_D
    bh = pid // blocks % BH
    start = pid // (blocks * BH) * line_step
    if BACKWARDS:
        start += (cells - 1) * cell_step
        cell_step = -cell_step
    return (bh // H).to(tl.int64), (bh % H).to(tl.int64), first_d + tl.arange(0, BLOCK_D), start, cell_step


@triton.jit
def pool(
    Q, K, MASK, QBAR, KBAR, SOME,
    q_b, q_h, q_l, k_b, k_h, k_l, o_b, o_h, o_l, p_b, p_h, p_l, mask_b, some_b,
    BH, H, length, cells, line_step, cell_step,
    D: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, RULE: tl.constexpr, POOL: tl.constexpr,
    HAS_MASK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """For every cell: the pooled query and key, and whether any token was pooled (one program per line writes it)."""
    b, h, d, start, step = place(BH, H, cells, line_step, cell_step, D, BLOCK_D, RULE == "after")
    if tl.program_id(1) == 0:
        X, x_l = Q + b * q_b + h * q_h, tl.cast(q_l, tl.int64)
        OUT, out_l = QBAR + b * o_b + h * o_h, tl.cast(o_l, tl.int64)
    else:
        X, x_l = K + b * k_b + h // GROUP * k_h, tl.cast(k_l, tl.int64)
        OUT, out_l = KBAR + b * p_b + h * p_h, tl.cast(p_l, tl.int64)
    writes = (tl.program_id(1) == 0) & (h == 0) & (tl.min(d, 0) == 0) & ((b == 0) | (some_b > 0))
    MASK += b * mask_b
    SOME += b * some_b
    if RULE == "others":
        pool_others(
            X, MASK, OUT, SOME, x_l, out_l, d, start, step, cells, length, writes, D, BLOCK_D, CHUNK, POOL, HAS_MASK
        )
    else:
        pool_running(
            X, MASK, OUT, SOME, x_l, out_l, d, start, step, cells, length, writes, D, BLOCK_D, CHUNK, RULE, POOL,
            HAS_MASK,
        )  # fmt: skip


@triton.jit
def pool_running(
    X, MASK, OUT, SOME, x_l, out_l, d, start, step, cells, length, writes,
    D: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, RULE: tl.constexpr, POOL: tl.constexpr,
    HAS_MASK: tl.constexpr,
):  # fmt: skip
    kept = tl.full([BLOCK_D], float("-inf") if POOL == "max" else 0.0, tl.float32)
    count = 0
    for begin in range(0, cells, CHUNK):
        xs, reals = load_chunk(X, MASK, x_l, d, start, step, begin, cells, length, D, CHUNK, HAS_MASK)
        for r in tl.static_range(CHUNK):
            more = tl.maximum(kept, xs[r]) if POOL == "max" else kept + xs[r]
            more = tl.where(reals[r], more, kept)
            more_count = count + reals[r].to(tl.int32)
            if RULE == "up_to":
                kept, count = more, more_count
            token = start + (begin + r) * step
            store_row(OUT, finish(kept, count, POOL), token, out_l, d, begin + r < cells, D)
            tl.store(SOME + token, count > 0, mask=writes & (begin + r < cells))
            kept, count = more, more_count


@triton.jit
def pool_others(
    X, MASK, OUT, SOME, x_l, out_l, d, start, step, cells, length, writes,
    D: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, POOL: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """The maximum of the others is that of the line, or the second largest at its only position (`alone`)."""
    kept = tl.full([BLOCK_D], float("-inf") if POOL == "max" else 0.0, tl.float32)
    second = kept
    alone = tl.full([BLOCK_D], -1, tl.int32)
    count = 0
    for begin in range(0, cells, CHUNK):
        xs, reals = load_chunk(X, MASK, x_l, d, start, step, begin, cells, length, D, CHUNK, HAS_MASK)
        for r in tl.static_range(CHUNK):
            count += reals[r].to(tl.int32)
            if POOL == "max":
                x = tl.where(reals[r], xs[r], float("-inf"))
                alone = tl.where(x > kept, begin + r, tl.where(x == kept, -1, alone))
                second = tl.maximum(second, tl.minimum(x, kept))
                kept = tl.maximum(kept, x)
            else:
                kept += tl.where(reals[r], xs[r], 0.0)
    for begin in range(0, cells, CHUNK):
        xs, reals = load_chunk(X, MASK, x_l, d, start, step, begin, cells, length, D, CHUNK, HAS_MASK)
        for r in tl.static_range(CHUNK):
            others = count - reals[r].to(tl.int32)
            if POOL == "max":
                rest = tl.where(alone == begin + r, second, kept)
            else:
                rest = kept - tl.where(reals[r], xs[r], 0.0)
            token = start + (begin + r) * step
            store_row(OUT, finish(rest, others, POOL), token, out_l, d, begin + r < cells, D)
            tl.store(SOME + token, others > 0, mask=writes & (begin + r < cells))
