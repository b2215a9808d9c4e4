"""Maps of the two branches of every cached layer: attention over the input, and attention over the cache.

Zhang et al., Cached Transformers, https://arxiv.org/abs/2312.12742, Figure 4
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..layers.cached import BranchMaps, CachedAttention, branch_maps
from .watch import arguments, image_grid, plain


class BranchView(NamedTuple):
    """o_self and o_mem of one layer for one example, means over channels and heads in [0, 1].

    Each is (height, width) without class tokens if the tokens form an image, else (L,) without padding.
    """

    path: str
    own: Tensor
    memory: Tensor
    share: Tensor  # σ(λ) of each head


def branch_views(
    model: nn.Module, inputs: Tensor | Sequence[Tensor], *, grid: Sequence[int] | None = None
) -> tuple[list[BranchView], list[str]]:
    """The views of the first example in call order, and the paths of layers without a view.

    `grid` is the height and width if the token ids are pixels. Layers that are called with windows of an image have no
    view.
    """
    model = plain(model)
    one = [t[:1] for t in arguments(inputs)]
    views: list[BranchView] = []
    windows: list[str] = []
    calls: dict[str, int] = {}
    for found in branch_maps(model, *one):
        if len(found.own) != 1:
            windows.append(found.name)
            continue
        calls[found.name] = calls.get(found.name, 0) + 1
        path = found.name + (f" (call {calls[found.name]})" if calls[found.name] > 1 else "")
        layer = model.get_submodule(found.name)
        assert isinstance(layer, CachedAttention)
        shape = _image(model, one[0], found, grid)
        own, memory = (_picture(values[0], found.valid, shape) for values in (found.own, found.memory))
        views.append(BranchView(path, own, memory, layer.share.double().cpu()))
    return views, windows


def has_cache(model: nn.Module) -> bool:
    return any(isinstance(module, CachedAttention) for module in plain(model).modules())


def _image(model: nn.Module, first: Tensor, found: BranchMaps, grid: Sequence[int] | None) -> tuple[int, int] | None:
    """Height and width of the token image: from the layer, from `grid`, or from the model."""
    T = found.own.shape[1]
    for shape in (found.grid, grid, image_grid(model, first, None, T) if first.dim() == 4 else None):
        if shape is not None and 0 <= T - shape[0] * shape[1] < shape[0] * shape[1]:  # class tokens come first
            return shape[0], shape[1]
    return None


def _picture(values: Tensor, valid: Tensor | None, shape: tuple[int, int] | None) -> Tensor:
    values = values.double().cpu()
    if shape is not None:
        values = values[len(values) - shape[0] * shape[1] :]
    elif valid is not None:
        values = values[valid[0].cpu()]
    if not len(values):
        return values
    low, high = values.min(), values.max()  # rescale: a class token may have been the largest
    values = (values - low) / (high - low).clamp(min=torch.finfo(values.dtype).tiny)
    return values if shape is None else values.unflatten(0, shape)
