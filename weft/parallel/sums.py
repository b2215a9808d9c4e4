"""Linear attention: a rank needs only the sums of the other ranks' keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..attention.linear import EPSILON, drop_values, features, with_ones
from ..attention.performer import divide, one
from ..core.contract import hide
from ..core.dispatch import use_kernel
from ..core.precision import precise
from ..core.scan import causal_sum
from ..kernels.linear_scan.kernel import linear_scan
from .context import Context, sharded


def others(context: Context, attn: Any, state: Tensor) -> Tensor:
    """States (B, H, X) of the ranks whose tokens this rank sees in full: (B, H, ranks, X)."""
    last = (lambda r: range(r)) if attn.causal else (lambda r: range(context.ranks))
    plan = context.plan(f"states {attn.causal}", lambda r: range(r, r + 1), last)
    (moved,) = context.move(plan, state[:, :, None])
    return moved


def sums(context: Context, attn: Any, a: Tensor, b: Tensor, v1: Tensor) -> Tensor:
    """Σ_j (a_i · b_j) v_j over the whole sequence."""
    state = b.mT @ v1
    total = a @ torch.unflatten(others(context, attn, state.flatten(2)).sum(2), 2, state.shape[2:])
    return total + causal_sum(a, b, v1) if attn.causal else total


@sharded("linear")
def linear(context: Context, attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: None) -> Tensor:
    v = drop_values(v, attn.dropout_now)
    a, b, v1 = features(q), hide(features(k), mask), with_ones(v)
    if attn.causal and use_kernel(attn, q, k, v, bias):
        # The kernel divides by the sum over this part, which is multiplied back in.
        state = b.mT @ v1
        total = a @ torch.unflatten(others(context, attn, state.flatten(2)).sum(2), 2, state.shape[2:])
        size = (a * b.cumsum(2)).sum(-1, keepdim=True) + EPSILON
        own = precise(linear_scan(q, k, v, mask, features="elu", epsilon=EPSILON))
        return ((own * size + total[..., :-1]) / (size + total[..., -1:])).to(q.dtype)
    total = sums(context, attn, a, b, v1)
    return (total[..., :-1] / (total[..., -1:] + EPSILON)).to(q.dtype)


@sharded("performer")
def performer(context: Context, attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: None) -> Tensor:
    v1 = with_ones(drop_values(v, attn.dropout_now))
    if attn.kernel == "relu":
        a, b = (precise(x).relu() + 1e-3 for x in (q, k))
        return divide(sums(context, attn, a, hide(b, mask), v1)).to(q.dtype)
    a, (b, g) = attn._queries(q), attn._keys(k, mask)
    v1 = hide(v1, mask)
    # This rank's state, relative to its own largest exponent, which travels with it.
    top = g.amax(-1)
    scale = _finite(top.detach())[..., None]
    state = (b * (g.detach() - scale).exp()[..., None]).mT @ v1
    packed = torch.cat([state.flatten(2), v1.sum(2), top[..., None]], -1)
    received = others(context, attn, packed)
    states, plain, tops = received.split([state[0, 0].numel(), v1.shape[-1], 1], -1)
    tops, states = tops[..., 0], torch.unflatten(states, 3, state.shape[2:])  # (B, H, ranks), (B, H, ranks, F, D)
    before = tops.amax(-1, keepdim=True) if tops.shape[2] else torch.full_like(top[..., None], float("-inf"))
    running = torch.maximum(before, g.cummax(-1).values) if attn.causal else before
    largest = _finite(running)
    base = _finite(before.detach())
    past = (states * (tops.detach() - base).exp()[..., None, None]).sum(2)
    total = (a @ past) * (base - largest.detach()).clamp(max=0).exp()[..., None]
    seen = plain.sum(2, keepdim=True)
    if attn.causal:
        own = _finite(g.detach().cummax(-1).values)
        total = total + causal_sum(a, b, v1, g.detach()) * (own - largest.detach()).clamp(max=0).exp()[..., None]
        seen = seen + v1.cumsum(2)
    rest = attn.epsilon * a.sum(-1, keepdim=True) * one(largest)[..., None]
    return divide(total + rest * seen).to(q.dtype)


def _finite(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, 0)
