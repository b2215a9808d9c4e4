"""Performer: linear attention with random features of the softmax kernel (FAVOR+), or with the ReLU kernel.

Choromanski et al., Rethinking Attention with Performers, https://arxiv.org/abs/2009.14794

    out_i = φ(q_i)ᵀ Σ_j φ(k_j) v_jᵀ / φ(q_i)ᵀ Σ_j φ(k_j)

    softmax   t ← t / D^{1/4};   φ(t)_m = (exp(p_m · t - |t|²/2 - c) + ε) / √M,   p_1 … p_M orthogonal, ε = 1e-6
    relu      φ(t) = ReLU(t) + 1e-3

c keeps the exponentials in range. For a query it is its own largest p_m · t; for keys, the largest p_m · t of all keys
in the sum (if causal, the running maximum, so nothing depends on the future). Gradients are those of this formula,
including c. The features are drawn once and saved with the weights; `redraw()` draws new ones.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...core.contract import Attention, PositionBias, hide
from ...core.decoding_state import Place
from ...core.dense import legal
from ...core.dispatch import Kernel
from ...core.precision import precise
from ...core.registry import register
from ...core.scan import causal_sum
from ...kernels.linear_scan.kernel import linear_scan
from ...kernels.linear_sum.kernel import linear_sum
from ...kernels.steps.kernel import Step, sums_step
from ..linear import drop_values, drops_nothing, with_ones
from .kernel import LEAST_LENGTH, random_feature_attention


def naive(
    attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bias: PositionBias | None = None
) -> Tensor:
    """The published code draws new features in every call; here they are fixed until `redraw()`."""
    allowed = legal(attn, q, k, mask)
    if attn.kernel == "relu":
        A = (q.relu() + 1e-3) @ (k.relu() + 1e-3).mT * allowed
    else:
        t_q, t_k = (x / attn.head_dim**0.25 for x in (q, k))
        p_q, p_k = (t @ attn.projection.T for t in (t_q, t_k))
        e_q, e_k = p_q - t_q.square().sum(-1, keepdim=True) / 2, p_k - t_k.square().sum(-1, keepdim=True) / 2
        c_q, c_k = p_q.amax(-1, keepdim=True), p_k.amax(-1)[:, :, None]
        c_k = c_k.masked_fill(~allowed, float("-inf")).amax(-1)  # of the keys in the sum of i
        c_k = c_k.masked_fill(c_k.isinf(), 0)[..., None, None]
        inside = (e_k[:, :, None] - c_k).masked_fill(~allowed[..., None], float("-inf"))
        A = (((e_q - c_q).exp() + attn.epsilon)[:, :, :, None] * (inside.exp() + attn.epsilon)).sum(-1) * allowed
    total = A.sum(-1, keepdim=True)
    return A @ v / total.where(total > 0, 1)


class PerformerAttention(Attention):
    long_sums = True
    exports_any_length = property(lambda self: not self.causal)  # type: ignore[assignment]
    projection: Tensor

    def __init__(
        self,
        *,
        kernel: str = "softmax",
        features: int | None = None,
        epsilon: float = 1e-6,
        **contract: Any,
    ):
        super().__init__(**contract)
        if kernel not in ("softmax", "relu"):
            raise ValueError(f"kernel must be 'softmax' or 'relu', got {kernel!r}")
        if kernel == "relu" and features is not None:
            raise ValueError(f"kernel='relu' has no random features; remove features={features}")
        self.kernel, self.epsilon = kernel, epsilon
        if kernel == "softmax":
            D = self.head_dim
            count = max(1, round(D * math.log(D + 1))) if features is None else features
            if count < 1:
                raise ValueError(f"features must be at least 1, got {features}")
            self.register_buffer("projection", orthogonal_features(count, D))

    @torch.no_grad()
    def redraw(self) -> None:
        """Draw new random features."""
        self.projection.copy_(orthogonal_features(*self.projection.shape))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: PositionBias | None) -> Tensor:
        v = drop_values(v, self.dropout_now)
        v1 = with_ones(v)
        if self.kernel == "relu":
            a, b = (precise(x).relu() + 1e-3 for x in (q, k))
            b = hide(b, mask)
            total = causal_sum(a, b, v1) if self.causal else a @ (b.transpose(-1, -2) @ v1)
            return divide(total).to(q.dtype)
        a = self._queries(q)
        b, g = self._keys(k, mask)
        v1 = hide(v1, mask)
        rest = self.epsilon * a.sum(-1, keepdim=True)  # the part of the feature product that ε in the keys adds
        top = g.cummax(-1).values if self.causal else g.amax(-1, keepdim=True)
        top = torch.where(top.isfinite(), top, 0)  # not finite if there is no key
        rest = rest * one(top)[..., None]
        if self.causal:
            total = causal_sum(a, b, v1, g.detach()) + rest * v1.cumsum(2)
        else:
            b = b * (g - top).detach().exp()[..., None]
            total = a @ (b.transpose(-1, -2) @ v1) + rest * v1.sum(2, keepdim=True)
        return divide(total).to(q.dtype)

    def _exponentials(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """exp(p_m · t - |t|²/2 - c) for every feature, and c, the largest p_m · t. Gradients of c are left out."""
        t = precise(x) * self.head_dim**-0.25
        projected = t @ self.projection.to(t.dtype).T
        c = projected.amax(-1)
        return (projected - (t.square().sum(-1) / 2 + c.detach())[..., None]).exp_(), c

    def _queries(self, q: Tensor) -> Tensor:
        e, c = self._exponentials(q)
        return e + self.epsilon * one(c)[..., None]

    def _keys(self, k: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """The exponentials of each key and its c; -inf for a masked key."""
        e, c = self._exponentials(k)
        return e, c if mask is None else c.masked_fill(~mask[:, None], float("-inf"))

    def empty_state(self, k: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
        k, features = precise(k), self.head_dim if self.kernel == "relu" else len(self.projection)
        B, H, D = k.shape[0], self.heads, self.head_dim
        top = torch.full((B, H, 1), float("-inf"), dtype=k.dtype, device=k.device)
        return k.new_zeros(B, H, features, D + 1), top, k.new_zeros(B, H, 1, D + 1)

    def state_after(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, capacity: int) -> tuple[Tensor, ...]:
        b, g, v1 = self._decoded(k, v, mask)
        top = g.cummax(-1).values[..., -1:].contiguous()  # of equal keys the last gets the gradient, as in `attend`
        scale = torch.where(top.isfinite(), top, 0).detach()
        memory = (b * (g.detach() - scale).exp()[..., None]).transpose(-1, -2) @ v1
        return memory, top, v1.sum(2, keepdim=True)

    def _decoded(self, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Key features, their scale and the values."""
        v1 = hide(with_ones(v), mask)
        if self.kernel == "relu":
            return hide(precise(k).relu() + 1e-3, mask), torch.zeros_like(v1[..., 0]), v1
        return *self._keys(k, mask), v1

    def attend_next(self, q, k, v, state, mask, bias, at: Place):
        memory, top, plain = state
        b, g, v1 = self._decoded(k, v, None if mask is None else mask[:, None])
        a = precise(q).relu() + 1e-3 if self.kernel == "relu" else self._queries(q)
        new_top = torch.where(g >= top, g, top)
        stabiliser = torch.where(new_top.isfinite(), new_top, 0)
        scale = stabiliser.detach()
        kept, added = (top.detach() - scale).exp()[..., None], (g.detach() - scale).exp()[..., None]
        memory = at.add_product(at.set(memory, memory * kept), (b * added).transpose(-1, -2), v1)
        plain = at.set(plain, plain + v1)
        total = a @ memory
        if self.kernel == "softmax":
            total = total + self.epsilon * a.sum(-1, keepdim=True) * one(stabiliser)[..., None] * plain
        return divide(total).to(q.dtype), (memory, at.set(top, new_top), plain)


def one(c: Tensor) -> Tensor:
    """1, with the gradient of e^c.

    A stabiliser c divides the exponentials by e^c, but not ε. Multiplying numerator and denominator by e^c makes the
    exponentials independent of c and multiplies ε by e^c. So this factor of ε carries the whole gradient of c.
    """
    return (c - c.detach()).exp()


def divide(total: Tensor) -> Tensor:
    """Divide by the last channel, the denominator; zeros if the sum has no key."""
    denominator = total[..., -1:]
    empty = denominator == 0
    return (total[..., :-1] / denominator.masked_fill(empty, 1)).masked_fill(empty, 0)


def orthogonal_features(count: int, dim: int) -> Tensor:
    """(count, dim): blocks of orthogonal directions with the lengths of Gaussian vectors."""
    blocks = []
    for _ in range(-(-count // dim)):
        Q, R = torch.linalg.qr(torch.randn(dim, dim, dtype=torch.float64))
        blocks.append((Q * R.diagonal().sign()).T)  # without the signs, Q is not uniform and the features are biased
    lengths = torch.randn(count, dim, dtype=torch.float64).norm(dim=1, keepdim=True)
    return (torch.cat(blocks)[:count] * lengths).to(torch.get_default_dtype())


def run_kernel(attn: PerformerAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: None) -> Tensor:
    v = drop_values(v, attn.dropout_now)
    if attn.kernel == "relu":
        return (linear_scan if attn.causal else linear_sum)(q, k, v, mask, features="relu").to(q.dtype)
    found = random_feature_attention(q, k, v, mask, attn.projection, attn.epsilon, causal=attn.causal)
    return found.to(q.dtype)


def step_of(attn: PerformerAttention, state: tuple[Tensor, ...]) -> Step | None:
    memory, top, plain = state
    if attn.kernel == "relu":
        return sums_step(memory, "relu", top=top, plain=plain)
    return sums_step(memory, "softmax", attn.epsilon, top=top, plain=plain, projection=attn.projection)


def lacks(attn: PerformerAttention, *qkv: Tensor) -> str:
    if qkv and qkv[0].dtype == torch.bfloat16 and attn.head_dim > 128:
        return f"its gradients are not exact enough in bfloat16 with heads over 128, got {attn.head_dim}"
    return ""


register(
    "performer",
    PerformerAttention,
    naive=naive,
    paper="Choromanski et al. 2021, Rethinking Attention with Performers (2009.14794)",
    cost="L",
    cross=True,
    dropout="keys",
    kernel=Kernel(
        run_kernel,
        lacks,
        LEAST_LENGTH,
        dropout=True,
        far=True,
        grouped=drops_nothing,
        auto=lambda attn: attn.head_dim <= 128,
        step=step_of,
    ),
)
