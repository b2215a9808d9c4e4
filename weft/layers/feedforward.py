"""The feed-forward half of a Transformer block.

FFN(x) = W2 · dropout(gelu(W1 x + b1)) + b2          gelu with the tanh approximation
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FeedForward(nn.Module):
    """`layer(x)`, x (..., dim), with `hidden` hidden units."""

    def __init__(
        self, dim: int, hidden: int, *, dropout: float = 0.0, device: Any = None, dtype: torch.dtype | None = None
    ):
        super().__init__()
        if dim < 1 or hidden < 1:
            raise ValueError(f"dim and hidden must be at least 1, got {dim} and {hidden}")
        self.up = nn.Linear(dim, hidden, device=device, dtype=dtype)
        self.down = nn.Linear(hidden, dim, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        for linear in (self.up, self.down):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.normal_(linear.bias, std=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(F.gelu(self.up(x), approximate="tanh")))
