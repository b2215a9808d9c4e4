"""weft's own PVT for `weft.swap`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..models.pvt import SpatialReductionAttention
from .added import LAYERS, add_layer


def read(layer: Any, attend: Any, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
    return SpatialReductionAttention.forward(layer, x, feat_size)


add_layer(
    SpatialReductionAttention,
    read,
    shape=lambda layer: (layer.heads, layer.dim // layer.heads),
    cross=lambda layer: layer.sr is not None,
)
# A cache around the layer calls it without the layer's forward.
LAYERS[SpatialReductionAttention].swapped.attend = lambda layer, q, k, v: layer.weft(q, k, v)  # type: ignore[attr-defined]
