"""A pre-norm Transformer block around any attention layer.

x ← x + dropout(Attn(LN(x), mask))
x ← x + dropout(FFN(LN(x)))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..core.contract import PositionBias, quiet_padding
from .feedforward import FeedForward

NORM_EPS = 1e-6


class EncoderBlock(nn.Module):
    """`block(x, mask=None, bias=None)`, x (B, L, dim). `attention` takes the same arguments."""

    def __init__(
        self,
        dim: int,
        attention: nn.Module,
        *,
        mlp_dim: int,
        dropout: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim, eps=NORM_EPS, device=device, dtype=dtype)
        self.attention = attention
        self.feedforward_norm = nn.LayerNorm(dim, eps=NORM_EPS, device=device, dtype=dtype)
        self.feedforward = FeedForward(dim, mlp_dim, dropout=dropout, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None, bias: PositionBias | None = None) -> Tensor:
        x = quiet_padding(x, mask)
        x = x + self.dropout(self.attention(self.attention_norm(x), mask, bias))
        return x + self.dropout(self.feedforward(self.feedforward_norm(x)))
