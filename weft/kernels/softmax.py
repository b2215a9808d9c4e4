"""Triton helpers: softmax attention of a tile of queries i to a tile of keys j.

    s_ij = q_i · k_j        p_ij = exp2(s_ij · scale − lse_i)        ds_ij = p_ij (f_ij dout_i · v_j − delta_i)
    out_i = Σ_j p_ij f_ij v_j        dq_i = Σ_j ds_ij k_j        dk_j = Σ_i ds_ij q_i        dv_j = Σ_i p_ij f_ij dout_i

Logarithms are to base 2: `scale` includes log2(e)/√D. dq and dk are without their 1/√D. f is the factor of dropout.
`allowed` is None if all pairs are. The softmax of the forward is a running one: `top` is the largest logit of a row so
far, `total` the sum of exp2(logit − top), and `acc` the sum of the values with these weights.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def no_keys(ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """acc, top and total before the first key."""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    return tl.zeros([ROWS, BLOCK_D], tl.float32), top, tl.zeros([ROWS], tl.float32)


@triton.jit
def weights(s, allowed, top, scale, EMPTY: tl.constexpr):
    """Weights of the new keys, factor for the previous sums, and the new top. EMPTY: a row may have no key so far."""
    if allowed is not None:
        s = tl.where(allowed, s, float("-inf"))
    new_top = tl.maximum(top, tl.max(s, 1) * scale)
    shift = new_top
    if EMPTY:
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # avoid inf - inf
    return tl.exp2(s * scale - shift[:, None]), tl.exp2(top - shift), new_top


@triton.jit
def weigh(s, allowed, top, total, scale):
    """`weights` and the new total."""
    p, old, top = weights(s, allowed, top, scale, True)
    return p, old, top, total * old + tl.sum(p, 1)


@triton.jit
def add_keys(acc, top, total, q, k, v, allowed, factor, scale, EMPTY: tl.constexpr, PRECISION: tl.constexpr):
    """One step of the running softmax. The total comes last: the kernels that use this are tuned so."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    p, old, top = weights(s, allowed, top, scale, EMPTY)
    acc = tl.dot((p * factor).to(v.dtype), v, acc * old[:, None], input_precision=PRECISION)
    return acc, top, total * old + tl.sum(p, 1)


@triton.jit
def mean(acc, total):
    """out; zeros for a row without keys."""
    return acc * (1.0 / tl.where(total > 0.0, total, 1.0))[:, None]


@triton.jit
def log_normaliser(top, total):
    """lse; -inf for a row without keys."""
    return tl.where(total > 0.0, top + tl.log2(tl.where(total > 0.0, total, 1.0)), float("-inf"))


@triton.jit
def probabilities(q, k, lse, allowed, scale, PRECISION: tl.constexpr):
    """p, (queries, keys); or (keys, queries), with k, q and lse[None, :]: the next products read it from registers."""
    p = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale - lse)
    if allowed is not None:
        p = tl.where(allowed, p, 0.0)
    return p


@triton.jit
def add_to_dq(dq, p, factor, k, v, dout, delta, PRECISION: tl.constexpr):
    ds = p * (tl.dot(dout, tl.trans(v), input_precision=PRECISION) * factor - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit
def add_to_dk_dv(dk, dv, p, factor, v, q, dout, delta, PRECISION: tl.constexpr):
    """`p` and `factor` are (keys, queries)."""
    dv = tl.dot((p * factor).to(dout.dtype), dout, dv, input_precision=PRECISION)
    ds = p * (tl.dot(v, tl.trans(dout), input_precision=PRECISION) * factor - delta[None, :])
    return tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION), dv
