"""Register your own attention layers for `weft.swap`.

weft.adapt.add_layer(CausalSelfAttention, shape=lambda layer: (layer.n_head, layer.n_embd // layer.n_head), causal=True)
weft.swap(model, to="combiner-fixed")

A layer that calls `F.scaled_dot_product_attention` needs no more than this: weft runs its forward and replaces that
call. For other layers, write their forward as a reader:

def reader(layer, attend, x):
    q, k, v = layer.c_attn(x).unflatten(-1, (3, layer.n_head, -1)).permute(2, 0, 3, 1, 4)
    return layer.c_proj(attend(q, k, v, causal=True).transpose(1, 2).flatten(2))

weft.adapt.add_layer(CausalSelfAttention, reader, shape=..., causal=True)
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from .core import fx_leaf, rescaled

LAYERS: dict[type, Added] = {}  # both the original class and its swapped subclass
Condition = bool | Callable[[Any], bool]  # of a layer


@dataclass(frozen=True)
class Added:
    swapped: type[nn.Module]
    shape: Callable[[Any], tuple[int, int]]
    causal: bool | None
    cross: Condition
    bias: Condition
    refuse: Callable[[Any], str]
    tokens: bool

    def needs(self, layer: nn.Module) -> set[str]:
        asked = {"cross": self.cross, "bias": self.bias}
        return {name for name, when in asked.items() if (when(layer) if callable(when) else when)}


def add_layer(
    cls: type[nn.Module],
    reader: Callable[..., Any] | None = None,
    *,
    shape: Callable[[Any], tuple[int, int]],
    causal: bool | None = False,
    cross: Condition = False,
    bias: Condition = False,
    refuse: Callable[[Any], str] = lambda layer: "",
    tokens: bool = True,
) -> None:
    """Let `weft.swap` change layers of class `cls`.

    `reader(layer, attend, *args, **kwargs)` is the layer's forward, with attention computed by
    `attend(q, k, v, mask=None, causal=False, allowed=None, added=None, dropout=0.0)`: q, k, v and the result are
    (B, H, L, D), logits are scaled by 1/√D, mask (B, Lk) is True for real tokens; `allowed` (boolean) and `added` (a
    bias) broadcast to (B, H, Lq, Lk). Without a reader, the layer must call `F.scaled_dot_product_attention` once.

    `shape(layer)` returns heads and head size. `causal` says whether its attention is causal (None: both occur).
    `cross` means that keys come from another sequence, `bias` that it uses `allowed` or `added`; both can be functions
    of the layer. `refuse(layer)` returns why a layer cannot be changed, or "". `tokens=False` means that it does not
    map x (B, L, dim) to the same shape, as `weft.cache` needs.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"add_layer needs a subclass of nn.Module, got {cls!r}")

    @fx_leaf
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if reader is not None:
            return reader(self, self.weft, *args, **kwargs)
        with Replacing(self.weft) as replacing:
            out = cls.forward(self, *args, **kwargs)
        if not torch.compiler.is_compiling() and replacing.calls != 1:
            raise ValueError(
                f"{cls.__name__} called scaled_dot_product_attention {replacing.calls} times, expected once: enable "
                "its fused attention (in timm: TIMM_FUSED_ATTN=1), or register it with a reader"
            )
        return out

    methods = {"forward": forward, "__reduce__": lambda self: (_blank, (cls,), self.__getstate__())}
    swapped = type(f"Weft{cls.__name__}", (cls,), {**methods, "__module__": cls.__module__})
    LAYERS[cls] = LAYERS[swapped] = Added(swapped, shape, causal, cross, bias, refuse, tokens)


def known(cls: type) -> Added | None:
    """What was registered for this class, by `add_layer` or by weft for other libraries."""
    library = cls.__module__.partition(".")[0]
    if library in ("timm", "torchvision", "weft", "x_transformers") and is_named_attention(cls):
        importlib.import_module(f".{library}_layers", __package__)
    return LAYERS.get(cls)


def is_named_attention(cls: type) -> bool:
    return any(word in cls.__name__.lower() for word in ("attention", "attn"))


def _blank(cls: type) -> Any:
    """A swapped layer without attributes, for pickle."""
    added = known(cls)
    if added is None:
        raise ValueError(f"register {cls.__name__} with weft.adapt.add_layer before you load this file")
    return added.swapped.__new__(added.swapped)


class Replacing(TorchFunctionMode):
    """Replace calls of `F.scaled_dot_product_attention` by a mechanism."""

    def __init__(self, core: Any):
        super().__init__()
        self.core, self.calls = core, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        # A cache around the layer reads its memory before the layer's projection, with attention of its own.
        if self.calls if torch.compiler.is_compiling() else sys._getframe(1).f_globals["__name__"].startswith("weft."):
            return func(*args, **(kwargs or {}))
        self.calls += 1
        return _attend(self.core, *args, **(kwargs or {}))


def _attend(
    core: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    given: dict[str, Any] = {} if attn_mask is None else pairs(attn_mask, key.shape[0])
    query = query if scale is None else rescaled(query, scale)
    given["dropout"] = dropout_p if core.training else None
    if key.ndim == 5:  # (B, H, windows, L, D), as in Hiera
        B = key.shape[0]
        query, key, value = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
        return core(query, key, value, causal=is_causal, **given).unflatten(0, (B, -1)).transpose(1, 2)
    return core(query, key, value, causal=is_causal, **given)


def pairs(mask: Tensor, batch: int) -> dict[str, Any]:
    """A mask of `scaled_dot_product_attention` (True to attend, or added to the logits) as arguments of `Core`."""
    if mask.dtype != torch.bool:
        return {"added": mask}
    if mask.dim() == 4 and mask.shape[1:3] == (1, 1):
        return {"mask": mask[:, 0, 0].expand(batch, -1)}
    return {"allowed": mask}
