"""Grouped keys and values: k and v with fewer heads than q, each shared by a group of adjacent heads."""

from __future__ import annotations

from torch import Tensor


def spread(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v with one head for each head of q."""
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:  # `check` reports it
        return k, v
    return _spread(k, q.shape[1]), _spread(v, q.shape[1])


def _spread(x: Tensor, heads: int) -> Tensor:
    group = heads // max(1, x.shape[1])
    return x.repeat_interleave(group, 1) if group > 1 and x.shape[1] * group == heads else x
