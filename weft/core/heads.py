"""Grouped keys and values: k and v with fewer heads than q, each shared by a group of adjacent heads."""

from __future__ import annotations

from torch import Tensor


def spread(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v with one head for each head of q. Tensors that do not match are left to `check`."""
    if isinstance(q, Tensor) and isinstance(k, Tensor) and k.shape == q.shape:
        return k, v
    if not all(isinstance(x, Tensor) and x.dim() == 4 for x in (q, k, v)):
        return k, v
    heads, given = q.shape[1], k.shape[1]
    if given in (0, heads) or v.shape[1] != given or heads % given:
        return k, v
    return k.repeat_interleave(heads // given, 1), v.repeat_interleave(heads // given, 1)
