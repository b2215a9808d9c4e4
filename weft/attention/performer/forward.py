"""Triton kernels: forward pass of the random features (formulas in `kernel.py`).

A tile of rows is multiplied by the directions twice, for the largest product and then for the features, so only one
tile is held at a time. In bfloat16 the directions are split into two tensors, the rounded value and the rounding error.
The sum of both products is as accurate as float32. The first tensor alone would also keep the exponentials in range,
but then the largest feature, which has the most weight, would not be 1 and would be rounded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.linear_scan.forward import operand
from ...kernels.rows import load_rows, store_rows, valid_rows


@triton.jit
def split(P, OUT, count, scale, COLUMNS: tl.constexpr, BF16: tl.constexpr):
    """P times scale; in bfloat16 as two concatenated parts."""
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    p = tl.load(P + at, mask=at < count, other=0.0).to(tl.float32) * scale
    if BF16:
        high = p.to(tl.bfloat16)
        tl.store(OUT + at, high, mask=at < count)
        tl.store(OUT + count + at, (p - high.to(tl.float32)).to(tl.bfloat16), mask=at < count)
    else:
        tl.store(OUT + at, p, mask=at < count)


@triton.jit
def project(x, P, f, d, M: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BF16: tl.constexpr):
    """x times the directions f, and these directions."""
    p = load_rows(P, f, d, D, f < M, D, BLOCK_D)
    y = tl.dot(x, tl.trans(p), input_precision="tf32x3")
    if BF16:
        y = tl.dot(x, tl.trans(load_rows(P + M * D, f, d, D, f < M, D, BLOCK_D)), y)
    return y, p


@triton.jit
def half_square(x, D: tl.constexpr):
    """|t|² / 2."""
    x = x.to(tl.float32)
    return tl.sum(x * x, 1) * (0.5 * D**-0.5)


@triton.jit
def shares(half, epsilon):
    """Factors (a, b) such that the features of a query are a · e^u + b, with the largest equal to 1."""
    z = epsilon * tl.exp(tl.minimum(half, 80.0))  # clamped to stay finite
    return 1.0 / (1.0 + z), z / (1.0 + z)


@triton.jit
def features(
    X, MASK, P, PHI, LARGEST, NUMBER,
    x_b, x_h, x_l,
    BH, H, L, epsilon,
    M: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BF: tl.constexpr,
    QUERIES: tl.constexpr, HAS_MASK: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """PHI (B·H, L, WIDTH), zeros past M. NUMBER is rest, or key_scale. LARGEST is -inf for masked keys."""
    bh = tl.program_id(0) % BH
    first = tl.program_id(0) // BH * ROWS
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    i, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    inside = i < L - first
    live = valid_rows(MASK + b * L + first, i, inside, HAS_MASK)
    x = load_rows(X + b * x_b + h * x_h + first.to(tl.int64) * x_l, i, d, x_l, live, D, BLOCK_D)
    half = half_square(x, D)
    x = operand(x, BF16)
    at = bh.to(tl.int64) * L + first
    PHI += at * WIDTH

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    for f0 in range(0, M, BF):
        f = f0 + tl.arange(0, BF)
        y, _ = project(x, P, f, d, M, D, BLOCK_D, BF16)
        largest = tl.maximum(largest, tl.max(tl.where((f < M)[None, :], y, float("-inf")), 1))

    total = tl.zeros([ROWS], tl.float32)
    power, floor = shares(half, epsilon)
    for f0 in range(0, M, BF):
        f = f0 + tl.arange(0, BF)
        y, _ = project(x, P, f, d, M, D, BLOCK_D, BF16)
        phi = tl.exp(y - largest[:, None])
        if QUERIES:
            phi = phi * power[:, None] + floor[:, None]
        phi = tl.where((f < M)[None, :], phi, 0.0)
        total += tl.sum(phi, 1)
        store_rows(PHI, phi, i, f, WIDTH, inside, WIDTH, WIDTH // BF * BF)

    if QUERIES:
        tl.store(NUMBER + at + i, epsilon * total, mask=inside)
    else:
        tl.store(NUMBER + at + i, largest - half, mask=inside)
    tl.store(LARGEST + at + i, tl.where(live, largest, float("-inf")), mask=inside)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def running_top(LARGEST, TOP, L, SPAN: tl.constexpr):
    """The running maximum of one head, 0 before the first key."""
    LARGEST += tl.program_id(0).to(tl.int64) * L
    TOP += tl.program_id(0).to(tl.int64) * L
    so_far = tl.max(tl.full([SPAN], float("-inf"), tl.float32), 0)
    for start in range(0, L, SPAN):
        i = start + tl.arange(0, SPAN)
        x = tl.load(LARGEST + i, mask=i < L, other=float("-inf"))
        top = tl.maximum(tl.associative_scan(x, 0, larger), so_far)
        tl.store(TOP + i, tl.where(top == float("-inf"), 0.0, top), mask=i < L)
        so_far = tl.maximum(so_far, tl.max(x, 0))
