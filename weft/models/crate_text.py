"""CRATE text classifier, with any registered mechanism.

The layers are those of the paper (see `crate.py`), which only covers images. Positions are sinusoids, so the model
accepts any length unless its mechanism has a limit.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..core.blocks import check_mask
from ..core.positions import sinusoids
from ..core.segments import Segments, documents_of
from ..core.sharding import refuse
from .crate import crate_layers


class CRATEText(nn.Module):
    """Text classifier: ids (B, L) -> logits (B, classes).

    `mask` (B, L) is True for real tokens; the default is `ids != padding`. `pooling` is "cls", or "mean" over real
    tokens and CLS. `max_length`, which some mechanisms need, includes the CLS token. Further options go to every
    layer (see `CRATELayer`). With `segments` (B, L) there is one row of logits per packed document, in order.
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
            raise ValueError(f"pooling must be 'cls' or 'mean', got {pooling!r}")
        if pooling == "cls" and layer.get("causal"):
            raise ValueError("in a causal model the CLS token, which is first, sees only itself: use pooling='mean'")
        self.dim, self.pooling, self.padding = dim, pooling, padding
        self.embed = nn.Embedding(vocab, dim)
        self.cls = nn.Parameter(torch.randn(1, 1, dim))
        self.dropout = nn.Dropout(dropout)
        self.blocks = crate_layers(layers, dim, heads, max_length=max_length, dropout=dropout, **layer)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)
        self.to(device=device, dtype=dtype)

    def forward(
        self, ids: Tensor, mask: Tensor | Literal[True] | None = None, segments: Tensor | Segments | None = None
    ) -> Tensor:
        if ids.dim() != 2 or ids.is_floating_point():
            raise ValueError(f"ids must be integers (B, L), got {ids.dtype} {tuple(ids.shape)}")
        refuse("CRATEText")
        mask = torch.ones_like(ids, dtype=torch.bool) if mask is True else ids != self.padding if mask is None else mask
        check_mask(mask, ids.shape)
        if segments is not None:
            return self._per_document(ids, mask, documents_of(segments, ids))
        mask = torch.cat([mask.new_ones(ids.shape[0], 1), mask], 1)  # CLS is always real
        x = torch.cat([self.cls.expand(ids.shape[0], -1, -1), self.embed(ids)], 1)
        x = self.dropout(x + sinusoids(x.shape[1], self.dim, device=x.device, dtype=x.dtype))
        for block in self.blocks:
            x = block(x, mask)
        return self._logits(x, mask)

    def _per_document(self, ids: Tensor, mask: Tensor, documents: Segments) -> Tensor:
        if not len(documents):
            return self.head(self.norm(self.embed.weight.new_zeros(0, self.dim)))
        joined, source = documents.with_first()
        at = joined.positions
        x = torch.where(at[..., None] == 0, self.cls, self.embed(ids).flatten(0, 1)[source][None])
        mask = (at == 0) | mask.flatten()[source]
        x = self.dropout(x + sinusoids(joined.longest, self.dim, device=x.device, dtype=x.dtype)[at])
        for block in self.blocks:
            x = block(x, mask, segments=joined)
        return self._logits(joined.as_rows(x), joined.as_rows(mask))

    def _logits(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.pooling == "cls":
            return self.head(self.norm(x[:, 0]))
        real = mask[..., None]
        return self.head(self.norm(x.masked_fill(~real, 0).sum(1) / real.sum(1)))
