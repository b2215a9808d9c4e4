"""Triton helpers: load and store tile rows of a (B, H, L, D) tensor. D can be any width: tiles are padded to the next
power of two; columns past D read as zero and are never written."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(X, row, d, row_stride, live, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load rows of X as (rows, BLOCK_D); zeros for rows that are not live and past D. live=None: all rows are live."""
    X += row[:, None] * row_stride + d[None, :]
    if live is None and D == BLOCK_D:
        x = tl.load(X)
    elif live is None:
        x = tl.load(X, mask=(d < D)[None, :], other=0.0)
    elif D == BLOCK_D:
        x = tl.load(X, mask=live[:, None], other=0.0)
    else:
        x = tl.load(X, mask=live[:, None] & (d < D)[None, :], other=0.0)
    return x


@triton.jit
def store_rows(X, x, row, d, row_stride, live, D: tl.constexpr, BLOCK_D: tl.constexpr):
    keep = live[:, None]
    if D != BLOCK_D:
        keep = keep & (d < D)[None, :]
    tl.store(X + row[:, None] * row_stride + d[None, :], x.to(X.dtype.element_ty), mask=keep)


@triton.jit
def valid_rows(MASK, position, live, HAS_MASK: tl.constexpr):
    """Which rows are real tokens: inside the sequence and not masked."""
    if HAS_MASK:
        return live & (tl.load(MASK + position, mask=live, other=0) != 0)
    return live


@triton.jit
def place(TABLE, bh, block, H, L, m, PACKED: tl.constexpr):
    """Where block number `block` is: batch row, head, both in one number, first token, number of tokens. Blocks of m
    tokens cover each row; or, PACKED, TABLE (blocks, 8) lists them (`Segments.table`), for all rows in sequence."""
    b, h, first = bh // H, bh % H, block * m
    end = tl.minimum(m, L - first)
    if PACKED:
        TABLE += 8 * block
        b, first, end = tl.load(TABLE), tl.load(TABLE + 1), tl.load(TABLE + 2)
    b, h = b.to(tl.int64), h.to(tl.int64)
    return b, h, b * H + h, first, end


@triton.jit
def clear(X, count, COLUMNS: tl.constexpr):
    """Set `count` adjacent elements to 0."""
    at = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(X + at, tl.zeros([COLUMNS], X.dtype.element_ty), mask=at < count)


@triton.jit
def sum_groups(
    X, OUT,
    x_b, x_h, x_l, o_b, o_h, o_l,
    BH, H, L,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """OUT (B, H, L, D): the sums of X (B, H · GROUP, L, D) over each group of heads."""
    bh = tl.program_id(0) % BH
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    first = tl.program_id(0) // BH * ROWS
    row = tl.arange(0, ROWS)
    live = row < L - first
    X += b * x_b + h * GROUP * x_h + first.to(tl.int64) * x_l
    total = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for g in range(GROUP):
        total += load_rows(X + g * x_h, row, d, x_l, live, D, BLOCK_D).to(tl.float32)
    store_rows(OUT + b * o_b + h * o_h + first.to(tl.int64) * o_l, total, row, d, o_l, live, D, BLOCK_D)


@triton.jit
def row_products(
    OUT, DOUT, DELTA,
    o_b, o_h, o_l, g_b, g_h, g_l,
    BH, H, L,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """delta_i = Σ_d dout_id out_id, (B·H, L), needed by the softmax backward."""
    bh = tl.program_id(0) % BH
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    first = tl.program_id(0) // BH * ROWS
    row = tl.arange(0, ROWS)
    live = row < L - first
    out = load_rows(OUT + b * o_b + h * o_h + first.to(tl.int64) * o_l, row, d, o_l, live, D, BLOCK_D).to(tl.float32)
    dout = load_rows(DOUT + b * g_b + h * g_h + first.to(tl.int64) * g_l, row, d, g_l, live, D, BLOCK_D).to(tl.float32)
    tl.store(DELTA + bh.to(tl.int64) * L + first + row, tl.sum(out * dout, 1), mask=live)


@triton.jit
def move_rows(
    X, Y, NEW_X, NEW_Y, ROW,
    x_b, x_h, x_l, y_b, y_h, y_l, nx_b, nx_h, nx_l, ny_b, ny_h, ny_l,
    BH, H, L,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Copy rows ROW[i] of X and Y (B, H, L, D) to rows i; with BACK, rows i to rows ROW[i]."""
    bh, i, d = tl.program_id(0) % BH, tl.program_id(0) // BH * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    b, h, live = (bh // H).to(tl.int64), (bh % H).to(tl.int64), i < L
    old, new = tl.load(ROW + i, mask=live, other=0).to(tl.int64), i.to(tl.int64)
    if BACK:
        old, new = new, old
    x = load_rows(X + b * x_b + h * x_h, old, d, x_l, live, D, BLOCK_D)
    y = load_rows(Y + b * y_b + h * y_h, old, d, y_l, live, D, BLOCK_D)
    store_rows(NEW_X + b * nx_b + h * nx_h, x, new, d, nx_l, live, D, BLOCK_D)
    store_rows(NEW_Y + b * ny_b + h * ny_h, y, new, d, ny_l, live, D, BLOCK_D)
