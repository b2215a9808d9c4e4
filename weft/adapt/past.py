"""Earlier queries of causal transformers layers, for mechanisms that have no decoding state (see `decoding.py`).

The cache keeps keys and values, but a mechanism that pools queries (combiner), hashes them (reformer) or sorts them
needs the earlier queries too. They are stored on the cache layer, so they live as long as the cache, are copied with
it, and are separate for parallel generations. The output for new tokens is the last rows of the parallel form over all
tokens: the same numbers as without a cache.

If a cache was reordered (beam search), cropped or repeated, each of its rows is identified by its keys.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache


@dataclass
class Past:
    q: Tensor  # (B, H, P, D), scaled
    keys: Tensor  # the keys in the cache when q was stored

    def queries_for(self, keys: Tensor) -> Tensor | None:
        """The queries of these cached keys (B', H, P', D); None if some row is unknown."""
        if keys is self.keys:
            return self.q
        length = keys.shape[2]
        if self.q.shape[2] != self.keys.shape[2]:  # the cache has dropped those outside of a sliding window
            return None
        if length > self.keys.shape[2] or keys.shape[1] != self.keys.shape[1] or keys.shape[3] != self.keys.shape[3]:
            return None
        ours = self.keys[:, :, :length].to(keys.device)
        row = torch.full((keys.shape[0],), -1, device=keys.device)
        for candidate in range(ours.shape[0]):
            same = (keys == ours[candidate]).flatten(1).all(1)
            row = torch.where(same, candidate, row)
        if bool((row < 0).any()):
            return None
        return self.q[row.to(self.q.device), :, :length]


@dataclass
class LayerState:
    """weft's state for a transformers attention layer; not part of the state dict."""

    choice: Any = None  # the mechanism that weft.swap chose for this layer
    mechanisms: dict[Any, nn.Module] = field(default_factory=dict)
    cross: bool | None = None  # whether the layer reads another sequence
    hook: Any = None  # the handle of `note_cache`, once registered
    cache: Any = None  # the cache of the current call, and its keys before the call
    cached_keys: Tensor | None = None


def layer_state(module: nn.Module) -> LayerState:
    state = module.__dict__.get("_weft")
    if state is None:
        state = module.__dict__["_weft"] = LayerState()
    return state


def remember(module: nn.Module, q: Tensor) -> None:
    """Store the queries of a call without a past, in case a cache continues from here."""
    if torch.compiler.is_compiling():
        return
    state = layer_state(module)
    if state.hook is None:
        state.hook = module.register_forward_pre_hook(note_cache, with_kwargs=True)
        state.cache = cache_of_this_call(module)
    layer = _appending(module, state.cache)
    state.cache = state.cached_keys = None
    if layer is not None and not torch.is_grad_enabled():
        layer.weft_past = Past(q, layer.keys)


def all_queries(module: nn.Module, name: str, q: Tensor, total: int) -> Tensor:
    """The queries of all `total` positions, ending with `q`; stored for the next call."""
    state = layer_state(module)
    layer = _appending(module, state.cache if state.cache is not None else cache_of_this_call(module))
    if torch.is_grad_enabled():
        raise ValueError(f"decoding with {name} and a cache needs torch.no_grad()")
    known = getattr(layer, "weft_past", None)
    if known is not None and known.keys is layer.keys and torch.equal(known.q[:, :, -q.shape[2] :], q):
        return known.q  # the layer attends twice, with other values (DiffLlama)
    past = None
    if known is not None and state.cached_keys is not None:
        past = known.queries_for(state.cached_keys)
    if past is None or past.shape[2] + q.shape[2] != total:
        raise ValueError(
            f"{name} needs the queries of the {total - q.shape[2]} cached tokens, but the cache was not filled by this "
            "model under torch.no_grad(), is not the default cache of generate(), or has layers that share "
            "their keys (Zamba): run the prompt through this model, set use_cache=False, or use weft:full"
        )
    q = torch.cat([past, q], 2)
    layer.weft_past = Past(q, layer.keys)
    state.cache = state.cached_keys = None
    return q


def note_cache(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: store the cache of this call and its keys before they grow."""
    if torch.compiler.is_compiling():
        return
    state = layer_state(module)
    state.cache = next((a for a in (*args, *kwargs.values()) if isinstance(a, Cache)), None)
    layer = _appending(module, state.cache)
    state.cached_keys = None if layer is None else layer.keys


def is_cross_attention(module: nn.Module) -> bool:
    """Whether this layer reads another sequence, for any lengths; determined once, in an eager call."""
    state = layer_state(module)
    if state.cross is None:
        told = getattr(module, "is_cross_attention", False) or "cross" in type(module).__name__.lower()
        cross = bool(told or (getattr(module, "is_decoder", False) and not getattr(module, "is_causal", True)))
        if torch.compiler.is_compiling():
            return cross
        given = _forward_locals(module)
        state.cross = cross or any(given.get(n) is not None for n in ("key_value_states", "encoder_hidden_states"))
    return state.cross


def cache_of_this_call(module: nn.Module) -> Any:
    """The cache of a layer's first call, which the hook was too late for."""
    return next((v for v in _forward_locals(module).values() if isinstance(v, Cache)), None)


def _forward_locals(module: nn.Module) -> dict[str, Any]:
    """The local variables of the layer's forward, because attention functions do not get everything they need."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_locals.get("self") is not module:
        frame = frame.f_back
    return {} if frame is None else frame.f_locals


def own_cache(cache: Any) -> Any:
    """The cache of self-attention."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def cache_layer(module: nn.Module, cache: Any) -> Any:
    """The part of the cache that belongs to this layer, or None."""
    cache = own_cache(cache)
    index = getattr(module, "layer_idx", None)
    return None if cache is None or index is None or index >= len(cache.layers) else cache.layers[index]


def _appending(module: nn.Module, cache: Any) -> Any:
    """The cache layer that grows by appending; None if there is none, or if it is of another kind."""
    layer = cache_layer(module, cache)
    return layer if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.keys.dim() == 4 else None
