"""Triton kernels: the mean of several attentions that share some keys, so that these are attended to once.

    out_i = Σ_μ out_i(μ) / M          p_ij(μ) = e^{s_ij − lse_i(μ)}          one normaliser lse(μ) per member

A key that all members share has the weight Σ_μ p_ij(μ) / M = e^{s_ij − lse_i}, and its logit the gradient
e^{s_ij − lse_i} (dout_i · v_j − delta_i), as in one attention with

    lse_i = −log Σ_μ e^{−lse_i(μ)} / M          delta_i = Σ_μ e^{lse_i − lse_i(μ)} / M · dout_i · out_i(μ)

Logarithms are to base 2. OUTS are (members, B, L, H, D), LSES and DELTAS (members, B, H, L).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..rows import load_rows, store_rows


@triton.jit
def place(BH, H, L, ROWS: tl.constexpr):
    """Head and batch entry, queries and which of them exist, and the first row of the head in a member of OUTS."""
    bh, i = (tl.program_id(0) % BH).to(tl.int64), tl.program_id(0) // BH * ROWS + tl.arange(0, ROWS)
    return bh, bh // H, bh % H, i, i < L, bh // H * L * H + bh % H


@triton.jit
def average(
    OUTS, LSES, OUT, LSE,
    o_b, o_h, o_l,
    BH, H, L, log_members,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """OUT and LSE. Adds log M to LSES, the normalisers of p(μ) / M."""
    bh, b, h, i, live, first = place(BH, H, L, ROWS)
    d = tl.arange(0, BLOCK_D)
    least = tl.full([ROWS], float("inf"), tl.float32)
    total = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for member in tl.static_range(MEMBERS):
        out = load_rows(OUTS + (member * BH * L + first) * D, i, d, H * D, live, D, BLOCK_D)
        total += out.to(tl.float32)
        least = tl.minimum(least, tl.load(LSES + (member * BH + bh) * L + i, mask=live, other=0.0))
    shared = tl.zeros([ROWS], tl.float32)
    for member in tl.static_range(MEMBERS):
        at = LSES + (member * BH + bh) * L + i
        lse = tl.load(at, mask=live, other=0.0)
        shared += tl.where(least == float("-inf"), 1.0, tl.exp2(least - lse))
        tl.store(at, lse + log_members, mask=live)
    tl.store(LSE + bh * L + i, least - tl.log2(shared) + log_members, mask=live)
    store_rows(OUT + b * o_b + h * o_h, total / MEMBERS, i, d, o_l, live, D, BLOCK_D)


@triton.jit
def products(
    OUTS, LSES, DOUT, LSE, DELTAS, DELTA,
    g_b, g_h, g_l,
    BH, H, L,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """DELTAS, of each member, and DELTA, of the keys that they share."""
    bh, b, h, i, live, first = place(BH, H, L, ROWS)
    d = tl.arange(0, BLOCK_D)
    dout = load_rows(DOUT + b * g_b + h * g_h, i, d, g_l, live, D, BLOCK_D).to(tl.float32)
    lse = tl.load(LSE + bh * L + i, mask=live, other=0.0)
    shared = tl.zeros([ROWS], tl.float32)
    for member in tl.static_range(MEMBERS):
        out = load_rows(OUTS + (member * BH * L + first) * D, i, d, H * D, live, D, BLOCK_D)
        delta = tl.sum(out.to(tl.float32) * dout, 1)
        at = (member * BH + bh) * L + i
        its_lse = tl.load(LSES + at, mask=live, other=0.0)
        shared += tl.where(lse == float("-inf"), 0.0, tl.exp2(lse - its_lse)) * delta
        tl.store(DELTAS + at, delta, mask=live)
    tl.store(DELTA + bh * L + i, shared, mask=live)
