"""Layers whose weight is read instead of calling them."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


def bare(layer: nn.Module) -> bool:
    """Whether a layer computes what its weight says: it has no adapter around it, and no hooks, which may compute the
    weight, as in pruning, or record what the layer returns."""
    return type(layer) in (nn.Linear, nn.Conv2d) and not (layer._forward_pre_hooks or layer._forward_hooks)


def through(layer: Any, x: Tensor) -> Tensor:
    """layer(x) in the dtype of x."""
    if bare(layer):
        return F.linear(x, layer.weight.to(x.dtype), None if layer.bias is None else layer.bias.to(x.dtype))
    dtype = getattr(layer.weight, "dtype", x.dtype)  # quantized layers may have a method `weight`
    return layer(x.to(dtype) if dtype.is_floating_point else x).to(x.dtype)
