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
        return super().forward(x, feat_size)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # also used by a cache around the layer
        return self.weft(q, k, v)
