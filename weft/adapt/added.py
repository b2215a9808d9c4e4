"""Register your own attention layers for `weft.swap`.

def reader(layer, attend, x):
    q, k, v = layer.c_attn(x).unflatten(-1, (3, layer.n_head, -1)).permute(2, 0, 3, 1, 4)
    return layer.c_proj(attend(q, k, v, causal=True).transpose(1, 2).flatten(2))

weft.adapt.add_layer(CausalSelfAttention, reader, shape=lambda layer: (layer.n_head, layer.head_dim), causal=True)
weft.swap(model, to="combiner-fixed")
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

LAYERS: dict[type, Added] = {}  # both the original class and its swapped subclass


@dataclass(frozen=True)
class Added:
    swapped: type[nn.Module]
    shape: Callable[[Any], tuple[int, int]]
    causal: bool | None
    cross: bool


def add_layer(
    cls: type[nn.Module],
    reader: Callable[..., Any],
    *,
    shape: Callable[[Any], tuple[int, int]],
    causal: bool | None = False,
    cross: bool = False,
) -> None:
    """Let `weft.swap` change layers of class `cls`.

    `reader(layer, attend, *args, **kwargs)` is the layer's forward, with attention computed by
    `attend(q, k, v, mask=None, causal=...)`: q, k, v and the result are (B, H, L, D), logits are scaled by 1/√D, mask
    (B, Lk) is True for real tokens. `shape(layer)` returns heads and head size. `causal` is the value that the reader
    passes to `attend` (None: both occur). `cross` means that keys come from another sequence.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"add_layer needs a subclass of nn.Module, got {cls!r}")

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return reader(self, self.weft, *args, **kwargs)

    swapped = type(f"Weft{cls.__name__}", (cls,), {"forward": forward, "__module__": cls.__module__})
    LAYERS[cls] = LAYERS[swapped] = Added(swapped, shape, causal, cross)
