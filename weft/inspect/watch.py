"""Hooks that observe a model during one forward pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..adapt.core import kept_mechanisms, watching
from ..attention import Attention
from ..core.segments import documents_of
from ..core.staging import eagerly
from ..layers.cached import CachedAttention, RecurrentCache
from ..models.blocks import blocks


@contextmanager
def looking(model: nn.Module, hooks: Sequence[Any]) -> Iterator[None]:
    """eval() without gradients; afterwards, remove the hooks and restore mode and buffers (e.g. a cache).

    Every call starts with the streams of a cache as they are now, or with empty ones for another number of rows.
    """
    streams = [
        (m, {name: getattr(m, name) for name in m.rows})
        for m in model.modules()
        if isinstance(m, RecurrentCache) and m.scope == "stream"
    ]
    hooks = [*hooks, *(m.register_forward_pre_hook(partial(_start, before)) for m, before in streams)]
    modes = [(module, module.training) for module in model.modules()]
    kept = [
        (m, name, buffer, None if buffer is None else buffer.clone())
        for m in model.modules()
        for name, buffer in m._buffers.items()
    ]
    model.eval()
    try:
        with eagerly(), watching(), torch.inference_mode(False), torch.no_grad():  # rows of attention are gradients
            yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes:
            module.training = training
        for module, name, buffer, value in kept:
            module._buffers[name] = buffer
            if buffer is not None and value is not None:
                buffer.copy_(value)
        for cache, before in streams:
            for name, rows in before.items():
                setattr(cache, name, rows)


def _start(before: dict[str, Tensor], cache: nn.Module, args: tuple[Any, ...]) -> None:
    for name, rows in before.items():
        setattr(cache, name, rows if len(rows) == len(args[0]) else rows[:0])


def mask_of(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], tokens: Tensor) -> Tensor | None:
    """Which tokens (B, L, dim) are real, (B, L), by the block's arguments; None for all."""
    named = dict(zip(inspect.signature(block.forward).parameters, args, strict=False)) | kwargs
    if named.get("segments") is not None:
        return documents_of(named["segments"], tokens).real(named.get("mask"))
    for name, mask in named.items():
        if not isinstance(mask, Tensor) or name.startswith(("memory", "encoder")):  # of another sequence
            continue
        if mask.shape == tokens.shape[:2] and "padding" in name:  # in PyTorch's layers, True or -inf is padding
            return ~mask if mask.dtype == torch.bool else mask == 0
        if mask.shape == tokens.shape[:2] and mask.dtype == torch.bool and name not in ("src_mask", "tgt_mask"):
            return mask
        if name == "attention_mask" and mask.dim() == 4 and mask.shape[-1] == tokens.shape[1]:  # transformers'
            if type(mask) is not Tensor:  # that of a swapped model
                from ..adapt.masks import read

                mask = read(mask)
                if mask is None or mask.dim() == 2:
                    return mask
            seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
            return seen.any(2).any(1).expand(len(tokens), -1)  # a token that no query may read is padding
    return None


def first_tensor(output: Any) -> Tensor | None:
    """A block's output tokens (B, L, dim), returned alone or in a tuple."""
    if isinstance(output, (tuple, list)):
        output = output[0] if output else None
    return output if isinstance(output, Tensor) and output.dim() == 3 else None


def on_output(module: nn.Module, see: Callable[[tuple[Any, ...], dict[str, Any], Any], None]) -> Any:
    """Call `see(args, kwargs, output)` after each forward of the module."""
    return module.register_forward_hook(lambda _, args, kwargs, output: see(args, kwargs, output), with_kwargs=True)


def plain(model: nn.Module) -> nn.Module:
    """The original module of a compiled model, because hooks do not run inside a compiled graph."""
    return getattr(model, "_orig_mod", model)


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks of a model, with those of transformers, which keep their mechanisms outside of their modules."""

    def holds(block: nn.Module) -> bool:
        return any(isinstance(m, Attention) or kept_mechanisms(m) for m in block.modules())

    return blocks(plain(model), holds)


def image_grid(model: nn.Module, first: Tensor, pictures: Tensor | None, keys: int) -> list[int] | None:
    """Rows and columns of the tokens if they are pixels or patches of an image."""
    if first.dim() == 2:
        size = [] if pictures is None else list(pictures.shape[-2:])
        return size if size and size[0] * size[1] == first.shape[1] else None
    module: Any
    for module in model.modules():
        if isinstance(module, (CachedAttention, RecurrentCache)):  # the grid of its slots
            continue
        grid = getattr(module, "grid", getattr(module, "grid_size", None))
        if hasattr(module, "dynamic_feat_size"):  # timm's, for images of this size
            grid = module.dynamic_feat_size(first.shape[-2:])
        if isinstance(grid, (tuple, list)) and len(grid) == 2:
            return [int(n) for n in grid]
    if first.dim() != 4:
        return None
    prefix = len(prefix_tokens(model))
    return proportional(first.shape[2:], [keys - prefix] if prefix else [keys, keys - 1])


def proportional(shape: Sequence[int], counts: Sequence[int]) -> list[int] | None:
    """Rows and columns of an image with the proportions of `shape` and one of these numbers of cells."""
    for count in counts:
        size = [round(n * (max(count, 0) / (shape[0] * shape[1])) ** 0.5) for n in shape]
        if size[0] * size[1] == count > 0:
            return size
    return None


def prefix_tokens(model: nn.Module) -> list[str]:
    """Names of the class and register tokens before the patches, as timm and transformers count them; else empty."""
    module: Any
    for module in model.modules():
        if hasattr(module, "num_prefix_tokens"):
            registers = getattr(module, "reg_token", None)
            count = 0 if registers is None else registers.shape[1]
            classes = int(module.num_prefix_tokens) - count
        elif hasattr(getattr(module, "config", None), "num_register_tokens"):
            count, classes = int(module.config.num_register_tokens), 1
        elif hasattr(module, "distillation_token"):  # DeiT
            count, classes = 0, 2
        else:
            continue
        first = ["[CLS]"] if classes == 1 else [f"class token {i + 1}" for i in range(classes)]
        return first + [f"register {i + 1}" for i in range(count)]
    return []


def arguments(inputs: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """The arguments of a model; a tensor is the only one."""
    return [inputs] if isinstance(inputs, Tensor) else list(inputs)


def in_batches(inputs: Sequence[Tensor], size: int) -> Iterator[tuple[Tensor, ...]]:
    for start in range(0, len(inputs[0]), size):
        yield tuple(t[start : start + size] for t in inputs)
