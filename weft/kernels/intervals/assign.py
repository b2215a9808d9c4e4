"""Triton kernel: the group of every token, and 1 / |x|."""

from __future__ import annotations

import triton
import triton.language as tl

from ..rows import load_rows, valid_rows


@triton.jit
def nearest(
    X, MASK, W, GROUP, INV,
    x_b, x_h, x_l, w_r, w_h, w_c, w_d,
    BH, H, L, C, groups,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BC: tl.constexpr, SIGNED: tl.constexpr,
    HAS_MASK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """GROUP (R, B·H, L): the direction c of W (R, H, C, D) with the largest x · w_c, the first of equals; with SIGNED,
    the largest of [x · w; -x · w]. Masked tokens get `groups`. Products have the precision of float32."""
    bh, first = tl.program_id(0) % BH, tl.program_id(0) // BH * ROWS
    b, h, r = (bh // H).to(tl.int64), (bh % H).to(tl.int64), tl.program_id(1).to(tl.int64)
    i, d = first + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    live = i < L
    x = load_rows(X + b * x_b + h // HEADS * x_h, i, d, x_l, live, D, BLOCK_D).to(tl.float32)
    W += r * w_r + h * w_h
    top = tl.full([ROWS], float("-inf"), tl.float32)
    low = tl.full([ROWS], float("-inf"), tl.float32)
    at_top = tl.zeros([ROWS], tl.int32)
    at_low = tl.zeros([ROWS], tl.int32)
    for start in range(0, C, BC):
        c = start + tl.arange(0, BC)
        keep = (c < C)[None, :] & (d < D)[:, None]
        w = tl.load(W + c[None, :] * w_c + d[:, None] * w_d, mask=keep, other=0.0).to(tl.float32)
        y = tl.dot(x, w, input_precision="tf32x3")
        up = tl.where((c < C)[None, :], y, float("-inf"))
        here = tl.max(up, 1)
        at_top = tl.where(here > top, start + tl.argmax(up, 1), at_top)
        top = tl.maximum(top, here)
        if SIGNED:
            down = tl.where((c < C)[None, :], -y, float("-inf"))
            here = tl.max(down, 1)
            at_low = tl.where(here > low, start + tl.argmax(down, 1), at_low)
            low = tl.maximum(low, here)
    group = at_top
    if SIGNED:
        group = tl.where(low > top, C + at_low, at_top)
        if r == 0:
            size = tl.sqrt(tl.sum(x * x, 1))
            tl.store(INV + bh.to(tl.int64) * L + i, 1.0 / tl.maximum(size, 1e-12), mask=live)
    group = tl.where(valid_rows(MASK + b * L, i, live, HAS_MASK), group, groups)
    tl.store(GROUP + (r * BH + bh) * L + i, group.to(GROUP.dtype.element_ty), mask=live)


@triton.jit
def group_sums(
    X, ORDER, START, TOTAL, COUNT,
    x_b, x_h, x_l,
    B, H, L, groups,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """TOTAL (H, groups, D): the sum of x / |x| over the members of a group in all sequences; COUNT (H, groups)."""
    g, h = tl.program_id(0) % groups, (tl.program_id(0) // groups).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    X += h // HEADS * x_h
    ORDER += h * L
    START += h * (groups + 1) + g
    total = tl.zeros([BLOCK_D], tl.float32)
    count = tl.sum(tl.zeros([ROWS], tl.int32), 0)
    for _ in range(0, B):
        first, last = tl.load(START), tl.load(START + 1)
        count += last - first
        for begin in range(first, last, ROWS):
            s = begin + tl.arange(0, ROWS)
            token = tl.load(ORDER + s, mask=s < last, other=0)
            rows = load_rows(X, token, d, x_l, s < last, D, BLOCK_D).to(tl.float32)
            size = tl.maximum(tl.sqrt(tl.sum(rows * rows, 1)), 1e-12)
            total += tl.sum(rows / size[:, None], 0)
        X += x_b
        ORDER += H * L
        START += H * (groups + 1)
    at = h * groups + g
    tl.store(TOTAL + at * D + d, total.to(TOTAL.dtype.element_ty), mask=d < D)
    tl.store(COUNT + at, count.to(COUNT.dtype.element_ty))
