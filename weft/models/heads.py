"""The classifier on top of an encoder: linear layers with ReLU between them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def classifier_head(
    dim: int, hidden: Sequence[int], classes: int, *, device: Any = None, dtype: torch.dtype | None = None
) -> nn.Sequential:
    """dim → hidden … → classes; weights N(0, 1/fan_in) truncated at ±2 std ("LeCun normal"), biases zero."""
    widths = [dim, *hidden, classes]
    if min(widths) < 1:
        raise ValueError(f"all widths of the head must be at least 1, got {widths}")
    head = nn.Sequential()
    for fan_in, fan_out in itertools.pairwise(widths):
        if len(head):
            head.append(nn.ReLU())
        linear = nn.Linear(fan_in, fan_out, device=device, dtype=dtype)
        std = 1 / math.sqrt(fan_in) / 0.87962566  # correct for the truncation at ±2 std
        nn.init.trunc_normal_(linear.weight, std=std, a=-2 * std, b=2 * std)
        nn.init.zeros_(linear.bias)
        head.append(linear)
    return head
