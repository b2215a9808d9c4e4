"""Cached attention around a transformers layer.

transformers calls its layers with keyword arguments and one mask for padding and causality, but `CachedAttention` needs
x and the real tokens. A token that no query may read is padding.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache

from ..layers.cached import CachedAttention
from ..layers.cached.inputs import refuse_one_way
from .kinds import Layer
from .masks import WeftMask, packed_numbers, read, says_causal

QUERIES = ("q_proj", "query", "q", "q_lin", "to_q", "linear_q", "q_a_proj", "qkv", "c_attn", "Wqkv", "query_key_value")


class CachedLayer(nn.Module):
    """`weft.CachedAttention` around a transformers attention layer, with the same call signature.

    Other attributes are forwarded to the layer; `share` is σ(λ) per head.
    """

    cached: CachedAttention

    def __init__(self, layer: nn.Module, ratio: float, **options: Any):
        super().__init__()
        dim, heads = width_and_heads(layer)
        self.cached = CachedAttention(layer, ratio, dim=dim, heads=heads, **options)
        self.both_ways = False  # a bidirectional mask was seen

    @property
    def share(self) -> Tensor:
        """σ(λ) per head: the weight of the cached branch in the output."""
        return self.cached.share

    def release(self) -> None:
        """See `CachedAttention.release`."""
        self.cached.release()

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        named = dict(zip(self.cached.names, args, strict=False)) | kwargs
        self._refuse_past(named)
        mask = named.get("mask" if "mask" in self.cached.names else "attention_mask")
        return self.cached(hidden_states, *args, valid=self._real(hidden_states, mask), **kwargs)

    def _refuse_past(self, named: dict[str, Any]) -> None:
        """Reject generate() with past keys in training: a decoding step is not a segment."""
        past = next((value for value in named.values() if isinstance(value, Cache)), None)
        if past is None or not self._writes:
            return
        past = past.self_attention_cache if isinstance(past, EncoderDecoderCache) else past
        if int(past.get_seq_length(getattr(self.cached.inner, "layer_idx", None) or 0)) > 0:
            raise ValueError(
                "a call with past keys and values has only part of a sequence, and would write it to the cache of "
                "cached attention: call model.eval() before generate(), and do not use eval_update"
            )

    def _real(self, x: Tensor, mask: Any) -> Tensor | None:
        """Which tokens may enter the cache, (B, T) boolean; None for all."""
        if isinstance(mask, WeftMask):
            if says_causal(mask) and not self.cached.options.delayed:
                raise ValueError(
                    "the layer is causal, and a cache of the current segment would leak the future: set delayed=True"
                )
            if self._writes and packed_numbers(mask) is not None:
                raise ValueError(
                    "cached attention in a transformers model writes one sample per row, and this row has several "
                    "packed documents: pass one document per row"
                )
            mask = read(mask)
            if mask is None:
                return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        if mask is None:
            return None
        B, T = x.shape[:2]
        if isinstance(mask, Tensor) and mask.shape[1:] == (T, T) and B % mask.shape[0] == 0:
            # Several windows per image: the mask separates regions that the shift has joined.
            return torch.ones(B, T, dtype=torch.bool, device=x.device)
        if not isinstance(mask, Tensor) or mask.dim() not in (2, 4) or mask.shape[0] not in (1, B):
            raise ValueError(
                f"cannot read the padding from a {type(mask).__name__} {tuple(getattr(mask, 'shape', ()))}: "
                "use attn_implementation='sdpa' or 'eager'"
            )
        if mask.shape[-1] != T:
            if self._writes:
                raise ValueError(f"the mask has {mask.shape[-1]} keys, but the layer gets {T} tokens to write")
            return torch.ones(B, T, dtype=torch.bool, device=x.device)  # the new tokens of a step of generate()
        allowed = mask if mask.dtype == torch.bool else mask > _hidden(mask)
        if mask.dim() == 2:
            real = allowed.expand(B, -1)
        else:
            real = allowed.any(2).any(1).expand(B, -1)
        self._refuse_to_leak(mask, allowed, real)
        return real

    def _refuse_to_leak(self, mask: Tensor, allowed: Tensor, real: Tensor) -> None:
        """Reject masks that make an unmarked layer causal."""
        if self.cached.options.delayed or self.both_ways:
            return
        if mask.dim() == 4:
            refuse_one_way(allowed, real)
            self.both_ways = not torch.compiler.is_compiling() and bool((real.sum(-1) > 1).any())

    @property
    def _writes(self) -> bool:
        return self.cached.cache.training or self.cached.options.eval_update

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("cached", "inner"):
                raise
            return getattr(self.cached.inner, name)


def uncacheable(layer: Layer) -> str:
    """Why this transformers layer cannot have a cache; "" if it can."""
    if layer.causal is None:
        return layer.trouble
    if layer.rewritten not in (None, type(layer.module)):
        return "it computes attention itself, with a mask of its own: swap it first, for example to 'full'"
    forward = inspect.unwrap(type(layer.module).forward)
    parameters, code = inspect.signature(forward).parameters, forward.__code__
    names = list(parameters)
    if names[1:2] != ["hidden_states"]:
        return "its forward does not take hidden_states"
    masks = [name for name in names if name.endswith("attention_mask")]
    if masks and "attention_mask" not in masks:  # T5Gemma 2, whose decoder attends to the encoder in the same layer
        return f"its mask is {masks[0]}, which a cache does not read"
    if "dict" in str(parameters.get("attention_mask")):
        return "its mask is a dictionary, which a cache does not read"
    if "height" in code.co_varnames[code.co_argcount :]:  # read from the shape of its input
        return "it takes images (B, height, width, dim) instead of tokens"
    if "cu_seqlens" in names:
        return "its tokens have no batch dimension: all images are one row"
    try:
        dim, heads = width_and_heads(layer.module)
    except ValueError as why:
        return str(why)
    return f"its {dim} channels are not divisible by {heads} heads, which mixing needs" if dim % heads else ""


def width_and_heads(layer: Any) -> tuple[int, int]:
    """Channels and heads of a transformers layer, from its projections and config."""
    config = getattr(layer, "config", None)  # BLOOM and MPT have none
    projection: Any = next((getattr(layer, name) for name in QUERIES if hasattr(layer, name)), None)
    if isinstance(projection, nn.Linear):
        dim = projection.in_features
    elif hasattr(projection, "nf"):  # transformers' Conv1D, a linear layer with a transposed weight
        dim = projection.weight.shape[0]
    else:
        dim = getattr(config, "hidden_size", 0)
    own = (getattr(layer, name, None) for name in ("num_heads", "num_attention_heads", "n_heads"))
    heads = next((n for n in own if isinstance(n, int)), getattr(config, "num_attention_heads", 0))
    if not dim or not heads:
        raise ValueError("cannot read its channels and heads")
    return dim, heads


def _hidden(mask: Tensor) -> float:
    """Additive mask values below this hide a pair; a bias may be added on top."""
    return torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else 0
