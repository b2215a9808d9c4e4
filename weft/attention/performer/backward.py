"""Triton kernels: backward pass of the random features. Products are computed and split as in `forward.py`.

    dx = Σ_m G_m p_m / D^{1/4} - x Σ_m G_m / √D + c p_top / D^{1/4}          G_m = g_m · the exponential in φ_m

p_top is the direction of the largest product. c is the gradient that reaches it via ε. For queries, c is the share of ε
in φ times Σ_m g_m, g_m = dφ_m + ε drest; for keys, the sum of dtop over the queries whose running maximum is theirs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.linear_scan.forward import operand
from ...kernels.rows import load_rows, store_rows, valid_rows
from .forward import half_square, project, shares


@triton.jit
def feature_gradients(
    X, MASK, P, LARGEST, DPHI, DNUMBER, DX,
    x_b, x_h, x_l, g_b, g_h, g_l, dx_b, dx_h, dx_l,
    BH, H, L, epsilon,
    M: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BF: tl.constexpr,
    QUERIES: tl.constexpr, HAS_MASK: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """Recomputes the features: after rounding, φ no longer shows the part that ε hides. DNUMBER is drest, or for keys
    the gradient of the largest product."""
    bh = tl.program_id(0) % BH
    first = tl.program_id(0) // BH * ROWS
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    i, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    inside = i < L - first
    live = valid_rows(MASK + b * L + first, i, inside, HAS_MASK)
    X += b * x_b + h * x_h + first.to(tl.int64) * x_l
    DX += b * dx_b + h * dx_h + first.to(tl.int64) * dx_l
    DPHI += b * g_b + h * g_h + first.to(tl.int64) * g_l
    x = operand(load_rows(X, i, d, x_l, live, D, BLOCK_D), BF16)
    at = bh.to(tl.int64) * L + first
    largest = tl.load(LARGEST + at + i, mask=live, other=0.0)
    dnumber = tl.load(DNUMBER + at + i, mask=inside, other=0.0)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    where_top = tl.zeros([ROWS], tl.int32)
    sent = tl.zeros([ROWS], tl.float32)
    dx = tl.zeros([ROWS, BLOCK_D], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for f0 in range(0, M, BF):
        f = f0 + tl.arange(0, BF)
        y, p = project(x, P, f, d, M, D, BLOCK_D, BF16)
        G = load_rows(DPHI, i, f, g_l, live, WIDTH, WIDTH // BF * BF).to(tl.float32)
        if QUERIES:
            G += (epsilon * dnumber)[:, None]
            sent += tl.sum(tl.where((f < M)[None, :], G, 0.0), 1)
        G = tl.where((f < M)[None, :], G * tl.exp(y - largest[:, None]), 0.0)
        y = tl.where((f < M)[None, :], y, float("-inf"))
        here = tl.max(y, 1)
        where_top = tl.where(here > top, f0 + tl.argmax(y, 1), where_top)
        top = tl.maximum(top, here)
        total += tl.sum(G, 1)
        dx = tl.dot(operand(G, BF16), p, dx, input_precision="tf32x3")
    x = load_rows(X, i, d, x_l, live, D, BLOCK_D).to(tl.float32)  # load again instead of keeping it
    dx -= x * (total * D**-0.5)[:, None]
    through = dnumber
    if QUERIES:
        power, floor = shares(half_square(x, D), epsilon)
        dx *= power[:, None]
        through = floor * sent
    p_top = load_rows(P, where_top, d, D, live, D, BLOCK_D).to(tl.float32)
    if BF16:
        p_top += load_rows(P + M * D, where_top, d, D, live, D, BLOCK_D).to(tl.float32)
    dx += through[:, None] * p_top
    store_rows(DX, tl.where(live[:, None], dx, 0.0), i, d, dx_l, inside, D, BLOCK_D)


@triton.jit
def joined(total, stops, more, more_stops):
    """The sum of two neighbouring stretches, from the last stop on."""
    return tl.where(more_stops != 0, more, total + more), stops | more_stops


@triton.jit
def reaches(LARGEST, TOP, i, live):
    return live & (tl.load(LARGEST + i, mask=live, other=0.0) == tl.load(TOP + i, mask=live, other=0.0))


@triton.jit
def top_gradients(LARGEST, TOP, DTOP, OUT, L, SPAN: tl.constexpr):
    """For each key of one head, the sum of dtop over the queries whose running maximum is its product: those from the
    key to the next one that reaches the maximum. Zero for a key below the maximum. Sums backwards in a fixed order, so
    the gradient is deterministic."""
    first = tl.program_id(0).to(tl.int64) * L
    LARGEST += first
    TOP += first
    DTOP += first
    OUT += first
    p = tl.arange(0, SPAN)
    carried = tl.sum(tl.zeros([SPAN], tl.float32), 0)
    for start in range(0, L, SPAN):
        i = L - 1 - start - p
        dtop = tl.load(DTOP + i, mask=i >= 0, other=0.0)
        stops = reaches(LARGEST, TOP, i + 1, (i >= 0) & (i + 1 < L)).to(tl.int32)
        total, stopped = tl.associative_scan((dtop, stops), 0, joined)
        total += tl.where(stopped != 0, 0.0, carried)
        tl.store(OUT + i, tl.where(reaches(LARGEST, TOP, i, i >= 0), total, 0.0), mask=i >= 0)
        carried = tl.sum(tl.where(p == SPAN - 1, total, 0.0), 0)
