"""Attention over a part of the keys, and its combination with other parts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

Partial = tuple[Tensor, Tensor]  # out (.., Q, D), and the logarithm of its normaliser (.., Q, 1), -inf without a key


def partial_attention(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None = None, bias: Tensor | None = None, dropout: float = 0.0
) -> Partial:
    dtype = torch.promote_types(q.dtype, torch.float32)
    logits = q.to(dtype) @ k.to(dtype).mT * q.shape[-1] ** -0.5
    if bias is not None:
        logits = logits + bias.to(dtype)
    if not logits.shape[-1]:
        return (q @ k.mT @ v).to(dtype), logits.new_full((*logits.shape[:-1], 1), float("-inf"))
    if allowed is not None:
        logits = logits.masked_fill(~allowed, float("-inf"))
    alive = logits.detach().amax(-1, keepdim=True) != float("-inf")
    logits = logits.masked_fill(~alive, 0)  # no NaN, and no gradient after the next lines
    out = (F.dropout(logits.softmax(-1), dropout) @ v.to(dtype)).masked_fill(~alive, 0)
    return out, logits.logsumexp(-1, keepdim=True).masked_fill(~alive, float("-inf"))


def merge(parts: list[Partial]) -> Partial:
    """Attention over the union of disjoint sets of keys."""
    outs, sizes = (torch.stack(t) for t in zip(*parts, strict=True))
    alive = sizes.detach().amax(0) != float("-inf")
    total = sizes.masked_fill(~alive, 0).logsumexp(0)
    weights = (sizes - total).exp().masked_fill(~alive, 0)
    return (weights * outs).sum(0), total.masked_fill(~alive, float("-inf"))
