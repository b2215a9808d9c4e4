"""Mechanisms in weft's own PVT, whose layers are softmax attention by default."""

from __future__ import annotations

from torch import Tensor

from ..models.pvt import SpatialReductionAttention
from .core import Core
from .leaf import fx_leaf


class ReducedAttention(SpatialReductionAttention):
    """Spatial-reduction attention with a mechanism."""

    weft: Core

    @fx_leaf
    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        source = x
        if self.sr is not None and self.norm is not None:
            image = x.transpose(1, 2).unflatten(2, feat_size)
            source = self.norm(self.sr(image).flatten(2).transpose(1, 2))
        k, v = self.kv(source).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(self.weft(q, k, v).transpose(1, 2).flatten(2))
