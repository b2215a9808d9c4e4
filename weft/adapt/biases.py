"""Biases and windows of existing models as position biases, so that every mechanism with a bias supports them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.contract import PositionBias


class PairBias:
    """A tensor (B or 1, H or 1, Lq or 1, Lk) as a position bias. False in a boolean tensor forbids the pair."""

    def __init__(self, values: Tensor):
        if values.dtype == torch.bool:
            values = torch.zeros(values.shape, device=values.device).masked_fill(~values, float("-inf"))
        self.values, self.heads = values, values.shape[1]
        self.shared_heads = self.heads == 1

    def __call__(self, i: Tensor, j: Tensor) -> Tensor:
        B, H, rows, _ = self.values.shape
        inner = [1] * (max(i.dim(), j.dim()) - 2)
        batch = torch.arange(B, device=j.device).view(-1, 1, *inner)
        head = torch.arange(H, device=j.device).view(1, -1, *inner)
        return self.values[batch, head, i if rows > 1 else torch.zeros_like(i), j]


class WindowBias:
    """Forbids pairs outside of a sliding window, counted as in `longformer`."""

    shared_heads = True

    def __init__(self, window: int, causal: bool):
        self.window, self.causal = window, causal

    def __call__(self, i: Tensor, j: Tensor) -> Tensor:
        return torch.zeros((), device=j.device).masked_fill(~in_window(i, j, self.window, self.causal), float("-inf"))


class SumBias:
    """The sum of two position biases."""

    def __init__(self, first: Any, second: Any):
        self.first, self.second = first, second
        self.shared_heads = first.shared_heads and second.shared_heads
        self.heads = 1 if self.shared_heads else first.heads if not first.shared_heads else second.heads

    def __call__(self, i: Tensor, j: Tensor) -> Tensor:
        return self.first(i, j) + self.second(i, j)


def in_window(i: Tensor, j: Tensor, window: int, causal: bool) -> Tensor:
    """Whether key j is in the sliding window of query i."""
    left, right = (window - 1, 0) if causal else ((window - 1) // 2, window // 2)
    return (j >= i - left) & (j <= i + right)


def in_blocks(chosen: Tensor, size: int, heads: int, keys: int) -> Tensor:
    """Which keys are in the chosen blocks (B, H or fewer, Lq, blocks) of each query; -1 is no block."""
    blocks = -(-keys // size)
    kept = torch.zeros(*chosen.shape[:3], blocks + 1, dtype=torch.bool, device=chosen.device)
    kept.scatter_(-1, chosen % (blocks + 1), True)
    kept = kept[..., :blocks].repeat_interleave(size, -1)[..., :keys]
    return kept.repeat_interleave(heads // chosen.shape[1], 1)


def total(*biases: PositionBias | None) -> PositionBias | None:
    """The sum of all biases that are not None."""
    found: Any = None
    for bias in biases:
        found = bias if found is None else found if bias is None else SumBias(found, bias)
    return found
