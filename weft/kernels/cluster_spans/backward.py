"""Triton kernels: backward pass. No atomics: sums have a fixed order, so results are bitwise reproducible.

    p_is = exp2(q_i·kbar_s − lse_i)        ds_is = p_is (dout_i · vbar_s − delta_i)
    dq_i = Σ_s ds_is kbar_s / √D           dkbar_s = Σ_i ds_is q_i / √D           dvbar_s = Σ_i p_is dout_i

`query_gradients` computes dq, and what a tile sends to its own tokens. What it sends to the last token of each group
before it goes to PARTS; `collect_earlier` adds these parts. `run_gradients` computes the gradients of whole runs, in
chunks of queries, and `collect_runs` adds the chunks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..random import kept, row_words
from ..rows import load_rows, store_rows
from ..softmax import add_to_dk_dv, probabilities
from .forward import earlier_tokens, standing, whole_runs


@triton.jit
def summary_gradients(dq, q, word, dout, lse, delta, KBAR, VBAR, j, exist, allowed, d, threshold, scale, logit_scale,
                      D: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
                      DROPOUT: tl.constexpr):  # fmt: skip
    """Add to dq, which is not scaled. Return it with the gradients of the summaries at tokens j."""
    k = load_rows(KBAR, j, d, D, exist, D, BLOCK_D)
    v = load_rows(VBAR, j, d, D, exist, D, BLOCK_D)
    p = probabilities(q, k, lse[:, None], allowed, scale, PRECISION)
    factor = kept(word[:, None], j[None, :], threshold, DROPOUT)
    dv = tl.dot(tl.trans((p * factor).to(dout.dtype)), dout, input_precision=PRECISION)
    ds = (p * (tl.dot(dout, tl.trans(v), input_precision=PRECISION) * factor - delta[:, None])).to(q.dtype)
    dk = tl.dot(tl.trans(ds), q, input_precision=PRECISION) * logit_scale
    return tl.dot(ds, k, dq, input_precision=PRECISION), dk, dv


@triton.jit
def query_gradients(
    Q, KBAR, VBAR, OF, ABOUT, BEFORE, LAST, FROM, KEY, DOUT, LSE, DELTA, DQ, DKBAR, DVBAR, PARTS,
    q_b, q_h, q_l, g_b, g_h, g_l, dq_b, dq_h, dq_l,
    BH, H, L, n, groups, R, threshold, scale, logit_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr, BG: tl.constexpr, BR: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Add to DQ; write DKBAR and DVBAR (B·H, L, D), and PARTS (B·H, n, groups, 2, D)."""
    bh, tile = (tl.program_id(0) % BH).to(tl.int64), tl.program_id(0) // BH
    b, h = bh // H, bh % H
    DQ += b * dq_b + h * dq_h
    KBAR += bh * L * D
    VBAR += bh * L * D
    DKBAR += bh * L * D
    DVBAR += bh * L * D
    OF += bh * L
    ABOUT += bh * L
    BEFORE += (bh * n + tile) * groups
    PARTS += (bh * n + tile) * groups * 2 * D
    LAST += bh * R
    FROM += bh * R
    d = tl.arange(0, BLOCK_D)
    i = tile * T + tl.arange(0, T)
    live = i < L
    group = tl.load(OF + i, mask=live, other=groups)
    about = tl.load(ABOUT + i, mask=live, other=0)
    word = row_words(KEY, bh, i, DROPOUT)
    q = load_rows(Q + b * q_b + h * q_h, i, d, q_l, live, D, BLOCK_D)
    dout = load_rows(DOUT + b * g_b + h * g_h, i, d, g_l, live, D, BLOCK_D)
    lse = tl.load(LSE + bh * L + i, mask=live, other=float("inf"))  # no query: no probability
    delta = tl.load(DELTA + bh * L + i, mask=live, other=0.0)
    dq = load_rows(DQ, i, d, dq_l, live, D, BLOCK_D).to(tl.float32) / logit_scale
    dk = tl.zeros([T, BLOCK_D], tl.float32)
    dv = tl.zeros([T, BLOCK_D], tl.float32)
    if CAUSAL:
        near = standing(i, group, i, group, about)
        dq, dk, dv = summary_gradients(
            dq, q, word, dout, lse, delta, KBAR, VBAR, i, about > 0, near, d, threshold, scale, logit_scale, D,
            BLOCK_D, PRECISION, DROPOUT,
        )  # fmt: skip
        for start in range(0, groups, BG):
            g = start + tl.arange(0, BG)
            j, exist, until = earlier_tokens(BEFORE, ABOUT, g, groups)
            far = standing(i, group, j, g, until)
            dq, part_k, part_v = summary_gradients(
                dq, q, word, dout, lse, delta, KBAR, VBAR, j, exist, far, d, threshold, scale, logit_scale, D,
                BLOCK_D, PRECISION, DROPOUT,
            )  # fmt: skip
            store_rows(PARTS, part_k, g, d, 2 * D, exist, D, BLOCK_D)
            store_rows(PARTS + D, part_v, g, d, 2 * D, exist, D, BLOCK_D)
    store_rows(DKBAR, dk, i, d, D, live, D, BLOCK_D)
    store_rows(DVBAR, dv, i, d, D, live, D, BLOCK_D)
    for start in range(0, R, BR):
        last, readable, allowed = whole_runs(FROM, LAST, start + tl.arange(0, BR), R, L, i, about, CAUSAL)
        k = load_rows(KBAR, last, d, D, readable, D, BLOCK_D)
        v = load_rows(VBAR, last, d, D, readable, D, BLOCK_D)
        p = probabilities(q, k, lse[:, None], allowed, scale, PRECISION)
        dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
        dp *= kept(word[:, None], last[None, :], threshold, DROPOUT)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_rows(DQ, dq * logit_scale, i, d, dq_l, live, D, BLOCK_D)


@triton.jit
def collect_earlier(
    BEFORE, ABOUT, PARTS, DKBAR, DVBAR,
    BH, L, n, groups,
    D: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    """Add the parts of the last token of each group in a tile: those of the tiles that start while it stands."""
    bh, tile = (tl.program_id(0) % BH).to(tl.int64), tl.program_id(0) // BH
    g = tl.program_id(1) * BG + tl.arange(0, BG)
    d = tl.arange(0, BLOCK_D)
    j, exist, until = earlier_tokens(BEFORE + (bh * n + tile + 1) * groups, ABOUT + bh * L, g, groups)
    exist = exist & (j >= tile * T)
    last = tl.where(exist, tl.minimum(n - 1, until // T), -1)
    dk = tl.zeros([BG, BLOCK_D], tl.float32)
    dv = tl.zeros([BG, BLOCK_D], tl.float32)
    for t in range(tile + 1, tl.max(last, 0) + 1):
        part = PARTS + (bh * n + t) * groups * 2 * D
        dk += load_rows(part, g, d, 2 * D, t <= last, D, BLOCK_D).to(tl.float32)
        dv += load_rows(part + D, g, d, 2 * D, t <= last, D, BLOCK_D).to(tl.float32)
    DKBAR += bh * L * D
    DVBAR += bh * L * D
    dk += load_rows(DKBAR, j, d, D, exist, D, BLOCK_D).to(tl.float32)
    dv += load_rows(DVBAR, j, d, D, exist, D, BLOCK_D).to(tl.float32)
    store_rows(DKBAR, dk, j, d, D, exist, D, BLOCK_D)
    store_rows(DVBAR, dv, j, d, D, exist, D, BLOCK_D)


@triton.jit
def run_gradients(
    Q, KBAR, VBAR, ABOUT, LAST, FROM, KEY, DOUT, LSE, DELTA, CHUNKS,
    q_b, q_h, q_l, g_b, g_h, g_l,
    BH, H, L, R, chunk, chunks, threshold, scale, logit_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr, BR: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """CHUNKS (B·H, chunks, R, 2, D), float32: gradients of BR whole runs from one chunk of queries."""
    bh, rest = (tl.program_id(0) % BH).to(tl.int64), tl.program_id(0) // BH
    b, h = bh // H, bh % H
    part, c = rest % chunks, rest // chunks * BR + tl.arange(0, BR)
    Q += b * q_b + h * q_h
    DOUT += b * g_b + h * g_h
    LSE += bh * L
    DELTA += bh * L
    ABOUT += bh * L
    KBAR += bh * L * D
    VBAR += bh * L * D
    d = tl.arange(0, BLOCK_D)
    start = tl.load(FROM + bh * R + c, mask=c < R, other=L)
    last = tl.load(LAST + bh * R + c, mask=c < R, other=0)
    stop = tl.minimum((part + 1) * chunk, L)
    k = load_rows(KBAR, last, d, D, start < stop, D, BLOCK_D)
    v = load_rows(VBAR, last, d, D, start < stop, D, BLOCK_D)
    dk = tl.zeros([BR, BLOCK_D], tl.float32)
    dv = tl.zeros([BR, BLOCK_D], tl.float32)
    for begin in range(tl.maximum(part * chunk, tl.min(start, 0) // T * T), stop, T):
        i = begin + tl.arange(0, T)
        live = i < stop
        q = load_rows(Q, i, d, q_l, live, D, BLOCK_D)
        dout = load_rows(DOUT, i, d, g_l, live, D, BLOCK_D)
        lse = tl.load(LSE + i, mask=live, other=float("inf"))
        delta = tl.load(DELTA + i, mask=live, other=0.0)
        about = tl.load(ABOUT + i, mask=live, other=0)
        allowed = start[:, None] <= i[None, :]
        if not CAUSAL:
            allowed = allowed & (last[:, None] != about[None, :])
        p = probabilities(k, q, lse[None, :], allowed, scale, PRECISION)
        factor = kept(row_words(KEY, bh, i, DROPOUT)[None, :], last[:, None], threshold, DROPOUT)
        dk, dv = add_to_dk_dv(dk, dv, p, factor, v, q, dout, delta, PRECISION)
    CHUNKS += (bh * chunks + part) * R * 2 * D
    store_rows(CHUNKS, dk * logit_scale, c, d, 2 * D, c < R, D, BLOCK_D)
    store_rows(CHUNKS + D, dv, c, d, 2 * D, c < R, D, BLOCK_D)


@triton.jit
def collect_runs(
    LAST, FROM, CHUNKS, DKBAR, DVBAR,
    BH, L, R, chunks,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    bh = (tl.program_id(0) % BH).to(tl.int64)
    c, d = tl.program_id(0) // BH * BR + tl.arange(0, BR), tl.arange(0, BLOCK_D)
    read = tl.load(FROM + bh * R + c, mask=c < R, other=L) < L
    last = tl.load(LAST + bh * R + c, mask=read, other=0)
    DKBAR += bh * L * D
    DVBAR += bh * L * D
    dk = load_rows(DKBAR, last, d, D, read, D, BLOCK_D).to(tl.float32)
    dv = load_rows(DVBAR, last, d, D, read, D, BLOCK_D).to(tl.float32)
    for part in range(chunks):
        at = CHUNKS + (bh * chunks + part) * R * 2 * D
        dk += load_rows(at, c, d, 2 * D, read, D, BLOCK_D)
        dv += load_rows(at + D, c, d, 2 * D, read, D, BLOCK_D)
    store_rows(DKBAR, dk, last, d, D, read, D, BLOCK_D)
    store_rows(DVBAR, dv, last, d, D, read, D, BLOCK_D)
