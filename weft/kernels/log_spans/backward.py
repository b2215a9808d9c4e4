"""Triton kernels: backward pass. No atomics: sums have a fixed order, so results are bitwise reproducible.

    delta_i = Σ_d dout_id out_id        p_ij = exp2(s_ij − lse_i)        ds_ij = p_ij (dout_i · v_j − delta_i)
    dq_i = Σ_j ds_ij k_j / √D           dk_j = Σ_i ds_ij q_i / √D        dv_j = Σ_i p_ij dout_i

`gradients` computes what a tile sends to its own rows, and stores what it sends to the spans of earlier tiles in PARTS.
`collect` sums these parts for the span at the end of each tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..random import kept, row_words
from ..rows import load_rows, store_rows, valid_rows
from .forward import far_spans, near_spans, rows_of


@triton.jit
def gradients(
    Q, K, V, MASK, KBAR, VBAR, SOME, KEY, OUT, DOUT, LSE, DELTA, DQ, DK, DV, DKBAR, DVBAR, PARTS,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, n_b, n_h, n_l, m_b, m_h, m_l, o_b, o_h, o_l, g_b, g_h, g_l,
    dq_b, dq_h, dq_l, dk_b, dk_h, dk_l, dv_b, dv_h, dv_l, dn_b, dn_h, dn_l, dm_b, dm_h, dm_l,
    BH, H, L, n, threshold, scale, logit_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr, U: tl.constexpr, REVERSE: tl.constexpr,
    HAS_MASK: tl.constexpr, MORE: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr, SUMMARIES: tl.constexpr,
    SPAN_GROUP: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """PARTS is (B·H, n, 2, U, D), float32. With SUMMARIES, the gradients of the spans are separate from those of the
    tokens. With MORE, add to DQ, DK and DV."""
    bh, tile = tl.program_id(0) % BH, tl.program_id(0) // BH
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    KBAR += b * n_b + h // SPAN_GROUP * n_h
    VBAR += b * m_b + h // SPAN_GROUP * m_h
    DQ += b * dq_b + h * dq_h
    DK += b * dk_b + h * dk_h
    DV += b * dv_b + h * dv_h
    SOME += b * L
    DELTA += bh.to(tl.int64) * L
    d = tl.arange(0, BLOCK_D)
    p = tile * T + tl.arange(0, T)
    live = p < L
    row = rows_of(p, L, REVERSE)
    word = row_words(KEY, bh, row, DROPOUT)
    q = load_rows(Q + b * q_b + h * q_h, row, d, q_l, live, D, BLOCK_D)
    dout = load_rows(DOUT + b * g_b + h * g_h, row, d, g_l, live, D, BLOCK_D)
    lse = tl.load(LSE + bh.to(tl.int64) * L + row, mask=live, other=float("inf"))  # no query: no probability
    if MORE:
        delta = tl.load(DELTA + row, mask=live, other=0.0)
        dq = load_rows(DQ, row, d, dq_l, live, D, BLOCK_D).to(tl.float32) / logit_scale
    else:
        out = load_rows(OUT + b * o_b + h * o_h, row, d, o_l, live, D, BLOCK_D)
        delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
        tl.store(DELTA + row, delta, mask=live)
        dq = tl.zeros([T, BLOCK_D], tl.float32)

    real = valid_rows(SOME, row, live, HAS_MASK)
    k = load_rows(KBAR, row, d, n_l, real, D, BLOCK_D)
    v = load_rows(VBAR, row, d, m_l, real, D, BLOCK_D)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale - lse[:, None]
    w = tl.where(near_spans(T) & real[None, :], tl.exp2(s), 0.0)
    factor = kept(word[:, None], row[None, :], threshold, DROPOUT)
    dv = tl.dot(tl.trans((w * factor).to(dout.dtype)), dout, input_precision=PRECISION)
    ds = (w * (tl.dot(dout, tl.trans(v), input_precision=PRECISION) * factor - delta[:, None])).to(q.dtype)
    dq = tl.dot(ds, k, dq, input_precision=PRECISION)
    dk = tl.dot(tl.trans(ds), q, input_precision=PRECISION) * logit_scale
    if SUMMARIES:
        store_rows(DKBAR + b * dn_b + h * dn_h, dk, row, d, dn_l, live, D, BLOCK_D)
        store_rows(DVBAR + b * dm_b + h * dm_h, dv, row, d, dm_l, live, D, BLOCK_D)
        dk = tl.zeros([T, BLOCK_D], tl.float32)
        dv = tl.zeros([T, BLOCK_D], tl.float32)
    if not MORE:  # the token itself
        real = valid_rows(MASK + b * L, row, live, HAS_MASK)
        k = load_rows(K + b * k_b + h // GROUP * k_h, row, d, k_l, real, D, BLOCK_D).to(tl.float32)
        v = load_rows(V + b * v_b + h // GROUP * v_h, row, d, v_l, real, D, BLOCK_D).to(tl.float32)
        own = tl.where(real, tl.exp2(tl.sum(q.to(tl.float32) * k, 1) * scale - lse), 0.0)
        factor = kept(word, row, threshold, DROPOUT)
        dx = own * (tl.sum(dout.to(tl.float32) * v, 1) * factor - delta)
        dq += dx[:, None] * k
        dk += (dx * logit_scale)[:, None] * q.to(tl.float32)
        dv += (own * factor)[:, None] * dout.to(tl.float32)
    elif not SUMMARIES:
        dk += load_rows(DK, row, d, dk_l, live, D, BLOCK_D).to(tl.float32)
        dv += load_rows(DV, row, d, dv_l, live, D, BLOCK_D).to(tl.float32)
    if not (MORE and SUMMARIES):
        store_rows(DK, dk, row, d, dk_l, live, D, BLOCK_D)
        store_rows(DV, dv, row, d, dv_l, live, D, BLOCK_D)

    far, exist = far_spans(tile, L, T, U, REVERSE)
    real = valid_rows(SOME, far, exist, HAS_MASK)
    k = load_rows(KBAR, far, d, n_l, real, D, BLOCK_D)
    v = load_rows(VBAR, far, d, m_l, real, D, BLOCK_D)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale - lse[:, None]
    w = tl.where(real[None, :], tl.exp2(s), 0.0)
    factor = kept(word[:, None], far[None, :], threshold, DROPOUT)
    dv = tl.dot(tl.trans((w * factor).to(dout.dtype)), dout, input_precision=PRECISION)
    ds = (w * (tl.dot(dout, tl.trans(v), input_precision=PRECISION) * factor - delta[:, None])).to(q.dtype)
    dq = tl.dot(ds, k, dq, input_precision=PRECISION)
    dk = tl.dot(tl.trans(ds), q, input_precision=PRECISION) * logit_scale
    store_rows(DQ, dq * logit_scale, row, d, dq_l, live, D, BLOCK_D)
    u = tl.arange(0, U)
    PARTS += (bh.to(tl.int64) * n + tile) * (2 * U * D)
    store_rows(PARTS, dk, u, d, D, exist, D, BLOCK_D)
    store_rows(PARTS + U * D, dv, u, d, D, exist, D, BLOCK_D)


@triton.jit
def collect(
    PARTS, DK, DV,
    dk_b, dk_h, dk_l, dv_b, dv_h, dv_l,
    BH, H, L, n,
    D: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr, U: tl.constexpr, ROWS: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """Add the parts of the span that ends with a tile: those of as many later tiles as the span has."""
    bh, tile = tl.program_id(0) % BH, tl.program_id(0) // BH
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    end = tile + 1
    size = end & -end
    bit = tl.sum((size > (1 << tl.arange(0, U))).to(tl.int32), 0)
    d, r = tl.arange(0, BLOCK_D), tl.arange(0, ROWS)
    PARTS += (bh.to(tl.int64) * n + end) * (2 * U * D) + bit * D
    dk = tl.zeros([BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_D], tl.float32)
    count = tl.minimum(size, n - end)
    for start in range(0, count, ROWS):
        t = start + r
        dk += tl.sum(load_rows(PARTS, t, d, 2 * U * D, t < count, D, BLOCK_D), 0)
        dv += tl.sum(load_rows(PARTS + U * D, t, d, 2 * U * D, t < count, D, BLOCK_D), 0)
    row = rows_of(end * T - 1, L, REVERSE)
    keep = d < D
    DK += b * dk_b + h * dk_h + row * dk_l + d
    DV += b * dv_b + h * dv_h + row * dv_l + d
    dk += tl.load(DK, mask=keep, other=0.0).to(tl.float32)
    dv += tl.load(DV, mask=keep, other=0.0).to(tl.float32)
    tl.store(DK, dk.to(DK.dtype.element_ty), mask=keep)
    tl.store(DV, dv.to(DV.dtype.element_ty), mask=keep)
