"""Mean activation maps of the two branches of cached attention, layer by layer.

Zhang et al., Cached Transformers, https://arxiv.org/abs/2312.12742, Figure 4: o_self and o_mem averaged over channels
and heads, scaled to [0, 1] per sample over its real tokens.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...core.staging import eagerly
from .inputs import grid_of, valid_tokens
from .layer import CachedAttention


class BranchMaps(NamedTuple):
    """The layer's path, and one value per token from each branch, (B, T); images are row-major."""

    name: str
    own: Tensor
    memory: Tensor
    valid: Tensor | None = None  # (B, T) if some tokens are padding; padding is 0 in both maps
    grid: tuple[int, int] | None = None  # height and width of the image, if known


def branch_maps(model: nn.Module, *args: Any, **kwargs: Any) -> list[BranchMaps]:
    """Run `model(*args, **kwargs)` in eval() and return the maps of every cached layer. Writes no cache."""
    found: list[BranchMaps] = []
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, CachedAttention):
            if module.options.eval_update:
                raise ValueError("branch_maps would change this model's streams, because it has eval_update=True")

            def see(layer: CachedAttention, given: Any, named: Any, name: str = name) -> None:
                # The branches are computed once more than by the model: not with its key-value cache of transformers.
                again = {key: copy.deepcopy(x) if hasattr(x, "get_seq_length") else x for key, x in named.items()}
                own, memory = layer.branches(*given, **again)
                valid = valid_tokens(layer, given[0], given[1:], named, named.get("valid"))
                grid = grid_of(given[1:], named, named.get("grid"))
                if grid is None and layer.grid is not None:
                    fits = layer.grid[0] * layer.grid[1] + layer.prefix == own.shape[1]
                    grid = layer.grid if fits else None
                found.append(BranchMaps(name, _map(own, valid), _map(memory, valid), valid, grid))

            hooks.append(module.register_forward_pre_hook(see, with_kwargs=True))
    if not hooks:
        raise ValueError(f"{type(model).__name__} has no cached attention: add it with weft.cache(model)")
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with eagerly(), torch.no_grad():
            model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes:
            module.training = training
    return found


def _map(branch: Tensor, valid: Tensor | None) -> Tensor:
    values = branch.to(torch.promote_types(branch.dtype, torch.float32)).mean((2, 3))
    padding = torch.zeros_like(values, dtype=torch.bool) if valid is None else ~valid
    low = values.masked_fill(padding, torch.inf).amin(1, keepdim=True)
    high = values.masked_fill(padding, -torch.inf).amax(1, keepdim=True)
    return ((values - low) / (high - low).clamp(min=torch.finfo(values.dtype).tiny)).masked_fill(padding, 0)
