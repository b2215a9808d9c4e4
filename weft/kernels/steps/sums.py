"""Triton kernel: one token of causal attention with feature maps, which keeps running sums over the sequence.

    S ← e^{G - G'} S + φ(k) e^{m - G'} [v, 1]ᵀ         out = φ(q)ᵀ S, divided by its last channel

G is the largest scale m of all keys so far and G' includes the new key. Only FEATURES "softmax" has scales; "elu" and
"relu" have none. PLAIN is the sum of [v, 1] over all keys, for the ε in the features of "softmax" (see `performer`).
One program per head. S is processed in groups of columns, after its last column, the denominators. Several warps may
read the same numbers, so a barrier is between reading and writing.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def random_features(Q, K, PROJECTION, here, f, D: tl.constexpr, F: tl.constexpr, BLOCK_F: tl.constexpr,
                    COLUMNS: tl.constexpr, SHRINK: tl.constexpr):  # fmt: skip
    """For t = q · SHRINK and t = k · SHRINK: p_m · t - |t|²/2 for every feature, and the largest p_m · t."""
    queries = tl.zeros([BLOCK_F], tl.float32)
    keys = tl.zeros([BLOCK_F], tl.float32)
    query_square, key_square = 0.0, 0.0
    for first in range(0, D, COLUMNS):
        d = first + tl.arange(0, COLUMNS)
        q = tl.load(Q + d, mask=d < here, other=0.0).to(tl.float32) * SHRINK
        k = tl.load(K + d, mask=d < here, other=0.0).to(tl.float32) * SHRINK
        inside = (f < F)[:, None] & (d < D)[None, :]
        p = tl.load(PROJECTION + f[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
        queries += tl.sum(p * q[None, :], 1)
        keys += tl.sum(p * k[None, :], 1)
        query_square += tl.sum(q * q, 0)
        key_square += tl.sum(k * k, 0)
    largest_query = tl.max(tl.where(f < F, queries, float("-inf")), 0)
    largest_key = tl.max(tl.where(f < F, keys, float("-inf")), 0)
    return queries - query_square / 2, largest_query, keys - key_square / 2, largest_key


@triton.jit
def direct_features(X, here, f, D: tl.constexpr, FEATURES: tl.constexpr):
    x = tl.load(X + f, mask=f < here, other=0.0).to(tl.float32)
    if FEATURES == "elu":
        x = tl.where(x > 0, x + 1.0, tl.exp(x))
    else:
        x = tl.maximum(x, 0.0) + 1e-3
    return tl.where(f < D, x, 0.0)


@triton.jit
def token_to_sums(
    Q, K, V, MASK, MEMORY, TOP, PLAIN, PROJECTION, OUT,
    q_b, q_h, k_b, k_h, v_b, v_h,
    H, epsilon,
    FEATURES: tl.constexpr, HAS_MASK: tl.constexpr, SHRINK: tl.constexpr,
    D: tl.constexpr, F: tl.constexpr, BLOCK_F: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """MEMORY (B, H, F, D + 1): S. TOP (B, H): G. PLAIN (B, H, D + 1). PROJECTION (F, D)."""
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // H, bh % H
    real = bh >= 0
    if HAS_MASK:
        real = tl.load(MASK + b) != 0
    here = tl.where(real, D, 0)  # elements to read of a token
    Q += b * q_b + h * q_h
    K += b * k_b + h * k_h
    V += b * v_b + h * v_h
    MEMORY += bh * F * (D + 1)
    PLAIN += bh * (D + 1)
    f = tl.arange(0, BLOCK_F)
    kept, rest, new = 1.0, 0.0, 0.0
    if FEATURES == "softmax":
        old = tl.load(TOP + bh)
        exponents, largest, key_exponents, largest_key = random_features(
            Q, K, PROJECTION, here, f, D, F, BLOCK_F, COLUMNS, SHRINK
        )  # fmt: skip
        query = tl.where(f < F, tl.exp(exponents - largest) + epsilon, 0.0)
        scale = tl.where(real, largest_key, float("-inf"))
        new = tl.maximum(old, scale)
        base = tl.where(new == float("-inf"), 0.0, new)
        kept = tl.exp(old - base)
        key = tl.where(f < F, tl.exp(key_exponents - largest_key) * tl.exp(scale - base), 0.0)
        rest = epsilon * tl.sum(query, 0)
    else:
        query = direct_features(Q, here, f, D, FEATURES)
        key = direct_features(K, here, f, D, FEATURES)
        key = tl.where(real, key, 0.0)
    one = tl.where(real, 1.0, 0.0)
    last = MEMORY + f * (D + 1) + D
    z = tl.load(last, mask=f < F, other=0.0) * kept + key
    seen = one
    if FEATURES != "elu":
        seen += tl.load(PLAIN + D)
    tl.debug_barrier()
    tl.store(last, z, mask=f < F)
    denominator = tl.sum(query * z, 0)
    if FEATURES == "elu":
        denominator += epsilon
    else:
        tl.store(TOP + bh, new)
        tl.store(PLAIN + D, seen)
        denominator += rest * seen
        denominator = tl.where(denominator == 0, 1.0, denominator)  # no key: zeros
    for first in range(0, D, COLUMNS):
        d = first + tl.arange(0, COLUMNS)
        v = tl.load(V + d, mask=d < here, other=0.0).to(tl.float32)
        at = MEMORY + f[:, None] * (D + 1) + d[None, :]
        inside = (f < F)[:, None] & (d < D)[None, :]
        memory = tl.load(at, mask=inside, other=0.0) * kept + key[:, None] * v[None, :]
        plain = v
        if FEATURES != "elu":
            plain += tl.load(PLAIN + d, mask=d < D, other=0.0)
        tl.debug_barrier()
        tl.store(at, memory, mask=inside)
        out = tl.sum(query[:, None] * memory, 0)
        if FEATURES != "elu":
            tl.store(PLAIN + d, plain, mask=d < D)
            out += rest * plain
        tl.store(OUT + bh * D + d, (out / denominator).to(OUT.dtype.element_ty), mask=d < D)
