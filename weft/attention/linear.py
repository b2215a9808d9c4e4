"""Linear attention.

Katharopoulos et al., Transformers are RNNs, https://arxiv.org/abs/2006.16236

    out_i = φ(q_i)ᵀ Σ_j φ(k_j) v_jᵀ / (φ(q_i)ᵀ Σ_j φ(k_j) + ε),   φ(t) = elu(t) + 1, ε = 1e-6

over all allowed j (j ≤ i if causal, computed as a running sum).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.contract import Attention, PositionBias, hide
from ..core.decoding_state import Place
from ..core.dense import legal
from ..core.dispatch import Kernel
from ..core.precision import precise
from ..core.registry import register
from ..core.scan import causal_sum
from ..core.segments import Segments
from ..kernels.linear_scan import kernel
from ..kernels.linear_sum.kernel import SHORTEST, linear_sum
from ..kernels.steps.kernel import Step, sums_step

EPSILON = 1e-6


def naive(
    attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bias: PositionBias | None = None
) -> Tensor:
    """ε is in the authors' code, not in the paper."""
    A = ((F.elu(q) + 1) @ (F.elu(k) + 1).mT) * legal(attn, q, k, mask)
    return A @ v / (A.sum(-1, keepdim=True) + EPSILON)


class LinearAttention(Attention):
    # At 1, φ is so flat that all keys have nearly the same weight: see experiments/wide/README.md.
    qk_gain = 4.0
    long_sums = True
    exports_any_length = property(lambda self: not self.causal)  # type: ignore[assignment]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: PositionBias | None) -> Tensor:
        v = drop_values(v, self.dropout_now)
        a, b = features(q), hide(features(k), mask)
        v1 = with_ones(v)
        total = causal_sum(a, b, v1) if self.causal else a @ (b.transpose(-1, -2) @ v1)
        return (total[..., :-1] / (total[..., -1:] + EPSILON)).to(q.dtype)

    def empty_state(self, k: Tensor, capacity: int) -> Tensor:
        D = self.head_dim
        return precise(k).new_zeros(k.shape[0], self.heads, D, D + 1)

    def state_after(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, capacity: int) -> Tensor:
        return hide(features(k), mask).transpose(-1, -2) @ with_ones(v)

    def attend_more(self, q, k, v, memory: Tensor, mask, bias, at: Place):
        a, b, v1 = features(q), hide(features(k), mask), with_ones(v)
        total = causal_sum(a, b, v1) + a @ memory
        memory = at.add_product(memory, b.transpose(-1, -2), v1)
        return (total[..., :-1] / (total[..., -1:] + EPSILON)).to(q.dtype), memory

    def attend_next(self, q, k, v, memory: Tensor, mask, bias, at: Place):
        b = hide(features(k), None if mask is None else mask[:, None])
        memory = at.add_product(memory, b.transpose(-1, -2), with_ones(v))
        total = features(q) @ memory
        return (total[..., :-1] / (total[..., -1:] + EPSILON)).to(q.dtype), memory


def run_kernel(attn: LinearAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: None) -> Tensor:
    v = drop_values(v, attn.dropout_now)
    fused = kernel.linear_scan if attn.causal else linear_sum
    return fused(q, k, v, mask, features="elu", epsilon=EPSILON).to(q.dtype)


def run_packed(
    attn: LinearAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, documents: Segments
) -> Tensor:
    v = drop_values(v, attn.dropout_now)
    fused, chunk = (kernel.linear_scan, kernel.CHUNK) if attn.causal else (linear_sum, SHORTEST)
    return fused(q, k, v, mask, features="elu", epsilon=EPSILON, table=documents.table(chunk)).to(q.dtype)


def step_of(attn: LinearAttention, memory: Tensor) -> Step | None:
    return sums_step(memory, "elu", EPSILON)


def features(x: Tensor) -> Tensor:
    return F.elu(precise(x)) + 1


def with_ones(v: Tensor) -> Tensor:
    """Append a channel of ones to v; its sum is the denominator."""
    v = precise(v)
    return torch.cat([v, torch.ones_like(v[..., :1])], -1)


def drop_values(v: Tensor, p: float) -> Tensor:
    """Dropout of whole keys, for mechanisms without a matrix of probabilities.

    A dropped token's value is removed from the numerator, the others are scaled by 1 / (1 - p), and the denominator
    keeps all tokens. So the expected output is the output without dropout. Dropping tokens from both sums would not
    have this property: a causal token whose keys are all dropped would return zero.
    """
    return v * F.dropout(torch.ones_like(v[..., :1]), p) if p else v


def drops_nothing(attn: Attention) -> bool:
    """Whether the kernels can share the heads of v: with dropout, each head of q drops its own values."""
    return not attn.dropout_now


register(
    "linear",
    LinearAttention,
    naive=naive,
    paper="Katharopoulos et al. 2020, Transformers are RNNs (2006.16236)",
    cost="L",
    cross=True,
    dropout="keys",
    kernel=Kernel(
        run_kernel,
        least_length=kernel.LEAST_LENGTH,
        dropout=True,
        far=True,
        grouped=drops_nothing,
        packed=run_packed,
        step=step_of,
    ),
)
