"""CRATE over text: ids in, class scores out, with any registered mechanism in place of softmax attention.

The layers are those of the paper (see `crate.py`); the paper itself has images only. Positions are sinusoids, so a
model is not tied to a length unless its mechanism is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..core.positions import sinusoids
from .crate import crate_layers


class CRATEText(nn.Module):
    """Text classifier: ids (B, L) -> logits (B, classes).

    `mask` (B, L) is True at real tokens; left out, it is `ids != padding`. `pooling` is "cls", or "mean" over the
    real tokens and CLS. `max_length`, which some mechanisms need, counts the CLS token too. Further options go to
    every layer (see `CRATELayer`).
    """

    def __init__(
        self,
        vocab: int,
        classes: int,
        *,
        dim: int,
        heads: int,
        layers: int,
        max_length: int | None = None,
        padding: int = 0,
        pooling: str = "cls",
        dropout: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **layer: Any,
    ):
        super().__init__()
        if pooling not in ("cls", "mean"):
            raise ValueError(f"pooling is 'cls' or 'mean', got {pooling!r}")
        if pooling == "cls" and layer.get("causal"):
            raise ValueError("the CLS token stands first and sees only itself when causal: use pooling='mean'")
        self.dim, self.pooling, self.padding = dim, pooling, padding
        self.embed = nn.Embedding(vocab, dim)
        self.cls = nn.Parameter(torch.randn(1, 1, dim))
        self.dropout = nn.Dropout(dropout)
        self.blocks = crate_layers(layers, dim, heads, max_length=max_length, dropout=dropout, **layer)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)
        self.to(device=device, dtype=dtype)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        if ids.dim() != 2 or ids.is_floating_point():
            raise ValueError(f"ids must be integers (B, L), got {ids.dtype} {tuple(ids.shape)}")
        mask = ids != self.padding if mask is None else mask
        mask = torch.cat([mask.new_ones(ids.shape[0], 1), mask], 1)  # CLS is always there
        x = torch.cat([self.cls.expand(ids.shape[0], -1, -1), self.embed(ids)], 1)
        x = self.dropout(x + sinusoids(x.shape[1], self.dim, device=x.device, dtype=x.dtype))
        for block in self.blocks:
            x = block(x, mask)
        if self.pooling == "cls":
            return self.head(self.norm(x[:, 0]))
        real = mask[..., None]
        return self.head(self.norm(x.masked_fill(~real, 0).sum(1) / real.sum(1)))
