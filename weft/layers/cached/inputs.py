"""What cached attention needs to know about the wrapped layer and its arguments."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ...attention import Attention
from ...core.contract import quiet_padding
from ..multihead import MultiheadAttention
from .options import CacheOptions


def width_and_heads(inner: nn.Module, dim: int | None, heads: int | None) -> tuple[int, int, int]:
    """Channels, heads, and total channels of the heads: as given, or read from the layer."""
    if isinstance(inner, nn.MultiheadAttention) and not inner.batch_first:
        raise ValueError("cached attention takes (B, T, D): use nn.MultiheadAttention with batch_first=True")
    dim = dim or _told(inner, "dim", "embed_dim")
    for name in ("qkv", "qk", "q"):
        projection = getattr(inner, name, None)
        if dim is None and isinstance(projection, nn.Linear):
            dim = projection.in_features
    heads = _told(inner, "heads", "num_heads") if heads is None else heads
    if heads is not None and heads < 1:
        raise ValueError(f"heads must be at least 1, got {heads}")
    if dim is None or heads is None:
        raise ValueError(f"cannot read the channels and heads of {type(inner).__name__}: set dim= and heads=")
    head_dim = _told(inner, "head_dim") if hasattr(inner, "merge") else None
    if head_dim is None and dim % heads:
        raise ValueError(f"{dim} channels are not divisible by {heads} heads")
    return dim, heads, dim if head_dim is None else heads * head_dim


def slots(length: int | None, grid: tuple[int, int] | None, prefix: int, options: CacheOptions) -> int | None:
    """The number of slots; None to use the length of the first training step."""
    if options.resample == "2d" and grid is None:
        raise ValueError("resample='2d' needs the image size of the cache: set grid=(height, width)")
    if grid is not None:
        if length not in (None, grid[0] * grid[1] + prefix):
            raise ValueError(
                f"length={length} must be {grid[0] * grid[1] + prefix}: the {grid[0]} x {grid[1]} cells of grid and "
                f"{prefix} prefix tokens"
            )
        length = grid[0] * grid[1] + prefix
    if length is not None and length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    return length


def refuse_leaks(options: CacheOptions, mechanism: Attention) -> None:
    """Reject options, and a mechanism of the cached branch, that leak the future into a causal layer."""
    if not options.delayed:
        raise ValueError(
            "the layer is causal, and a cache of the current segment would leak the future: "
            "set delayed=True, which reads only earlier segments"
        )
    if options.position == "conv":
        raise ValueError("position='conv' reads later tokens: use position='none' for a causal layer")
    if mechanism.info is not None and not mechanism.info.cross:
        raise ValueError(
            f"memory_attention: {mechanism.name} may read the queries of later tokens; for a causal layer, use 'full' "
            "or another mechanism that supports cross-attention"
        )


def refuse_one_way(allowed: Tensor, real: Tensor) -> None:
    """Reject asymmetric masks (B, H, T, T), True to attend, such as causal masks.

    Tokens that are padding in `real` (B, T) are ignored: their queries may read anything.
    """
    seen = allowed & real[:, None, :, None] & real[:, None, None, :]
    why = (
        "the mask hides later tokens from earlier ones, and a cache of the current segment would leak them: "
        "set delayed=True, which reads only earlier segments"
    )
    if torch.compiler.is_compiling():
        torch._assert_async((seen == seen.transpose(-1, -2)).all(), why)
    elif not torch.equal(seen, seen.transpose(-1, -2)):
        raise ValueError(why)


def is_causal(inner: nn.Module) -> bool:
    """True if the layer or any of its submodules is marked as causal."""
    return any(getattr(m, name, None) is True for m in inner.modules() for name in ("causal", "is_causal"))


def _told(inner: nn.Module, *names: str) -> int | None:
    for name in names:
        if isinstance(getattr(inner, name, None), int):
            return int(getattr(inner, name))
    return None


def parameter_names(inner: nn.Module) -> list[str]:
    """The names of the layer's arguments after x."""
    return list(inspect.signature(type(inner).forward).parameters)[2:]


def valid_tokens(
    layer: Any, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], valid: Tensor | None
) -> Tensor | None:
    """Which tokens may enter the cache of `layer`, (B, T) boolean; None for all.

    Raises an error for masks whose meaning is unknown.
    """
    named = dict(zip(layer.names, args, strict=False)) | kwargs
    if named.get("is_causal") and not layer.options.delayed:
        raise ValueError("is_causal=True: a cache of the current segment would leak the future; set delayed=True")
    if valid is not None:
        if valid.dtype != torch.bool or valid.shape != x.shape[:2]:
            raise ValueError(
                f"valid must be boolean (B, T) = {tuple(x.shape[:2])}, got {valid.dtype} {tuple(valid.shape)}"
            )
        return valid
    if isinstance(layer.inner, nn.MultiheadAttention):
        if isinstance(named.get("key"), Tensor) and named["key"].shape[:2] != x.shape[:2]:
            raise ValueError("cached attention does not support cross attention: use the inner layer without the cache")
        return _valid_of_torch(layer, x, named.get("key_padding_mask"), named.get("attn_mask"))
    mask = named.get("mask", args[0] if args else None)
    if isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == x.shape[:2]:
        return mask  # weft's convention: True for real tokens
    padding = named.get("key_padding_mask")
    if padding is not None:
        return _not_ignored(padding)
    for name in ("attn_mask", "attention_mask"):
        if named.get(name) is not None:
            raise ValueError(f"{name} may hide padding: mark the real tokens with valid=(B, T)")
    return None


def _valid_of_torch(layer: Any, x: Tensor, padding: Tensor | None, pairs: Tensor | None) -> Tensor | None:
    """Valid tokens from the masks of nn.MultiheadAttention. A token that no query may read is not real."""
    real = None if padding is None else _not_ignored(padding)
    if pairs is None:
        return real
    B, T = x.shape[:2]
    allowed = _not_ignored(pairs, biased=True)
    allowed = allowed.view(B, -1, T, T) if pairs.dim() == 3 else allowed[None, None]
    read = allowed.any(2).any(1).expand(B, -1)
    real = read if real is None else real & read
    if not layer.options.delayed:
        refuse_one_way(allowed, real)
    return real


def _not_ignored(mask: Tensor, biased: bool = False) -> Tensor:
    """In PyTorch's masks, True or -inf means ignored."""
    if mask.dtype == torch.bool:
        return ~mask
    return mask > float("-inf") if biased else mask == 0


def per_head(inner: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The inner layer's heads before its output projection, (B, H, T, d)."""
    if not isinstance(inner, MultiheadAttention):
        return inner.per_head(x, *args, **kwargs)
    mask, bias, segments = _arguments(*args, **kwargs)
    if segments is not None:
        return inner.per_document(x, mask, bias, segments)
    x = quiet_padding(x, mask)
    return inner.attention(*inner.project(x), mask, bias, **inner.input(x))


def _arguments(
    mask: Tensor | None = None, bias: Any = None, context: Tensor | None = None, segments: Any = None
) -> tuple[Tensor | None, Any, Any]:
    if context is not None:
        raise ValueError("cached attention does not support cross attention: use the inner layer without the cache")
    return mask, bias, segments


def grid_of(args: tuple[Any, ...], kwargs: dict[str, Any], grid: tuple[int, int] | None) -> tuple[int, int] | None:
    """Height and width of the token image if the call includes them, as for PVT layers."""
    size = grid or kwargs.get("feat_size", args[0] if args else None)
    if isinstance(size, (tuple, list, torch.Size)) and len(size) == 2 and all(isinstance(n, int) for n in size):
        return size[0], size[1]
    return None
