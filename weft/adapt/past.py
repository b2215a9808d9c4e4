"""What a causal layer of a transformers model must remember when it decodes with a cache of keys and values.

The cache keeps keys and values; a mechanism that pools queries (combiner), hashes them (reformer) or sorts them needs
the earlier queries too. They are kept on the cache's own layer, so they live as long as the cache does, are copied
with it, and two generations side by side do not meet. The output of the new tokens is the last rows of the parallel
form over all tokens: the same numbers as without a cache.

A cache that was reordered (beam search), cropped or repeated since is recognised by its keys: each row of the cache
is looked for among the rows that we remember.
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
    keys: Tensor  # the keys that the cache held when q was noted

    def queries_for(self, keys: Tensor) -> Tensor | None:
        """The queries that belong to these cached keys (B', H, P', D); None where some row was never seen."""
        if keys is self.keys:
            return self.q
        length = keys.shape[2]
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
    """What weft keeps beside an attention layer of transformers; none of it is in the state dict."""

    choice: Any = None  # the mechanism that weft.swap chose for this layer
    mechanisms: dict[Any, nn.Module] = field(default_factory=dict)
    cross: bool | None = None  # whether the layer reads another sequence
    hook: Any = None  # the handle of `note_cache`, once it is in place
    cache: Any = None  # the cache of the call under way, and the keys it held when the call began
    cached_keys: Tensor | None = None


def layer_state(module: nn.Module) -> LayerState:
    state = module.__dict__.get("_weft")
    if state is None:
        state = module.__dict__["_weft"] = LayerState()
    return state


def remember(module: nn.Module, q: Tensor) -> None:
    """Note the queries of a call without a past, in case a cache goes on from here."""
    if torch.compiler.is_compiling():
        return
    state = layer_state(module)
    if state.hook is None:
        state.hook = module.register_forward_pre_hook(note_cache, with_kwargs=True)
        state.cache = _cache_of_this_call(module)
    layer = _cache_layer(module, state.cache)
    state.cache = state.cached_keys = None
    if layer is not None and not torch.is_grad_enabled():
        layer.weft_past = Past(q, layer.keys)


def all_queries(module: nn.Module, name: str, q: Tensor, total: int) -> Tensor:
    """The queries of all `total` positions, of which `q` are the newest; noted again for the next call."""
    state = layer_state(module)
    layer = _cache_layer(module, state.cache)
    if torch.is_grad_enabled():
        raise ValueError(f"decoding with {name} and a cache is for inference: wrap it in torch.no_grad()")
    known = getattr(layer, "weft_past", None)
    past = None
    if known is not None and state.cached_keys is not None:
        past = known.queries_for(state.cached_keys)
    if past is None or past.shape[2] + q.shape[2] != total:
        raise ValueError(
            f"{name} needs the queries of the {total - q.shape[2]} cached tokens, and the cache was not filled by this "
            "model under torch.no_grad(), or does not grow by appending, as the default cache of generate() does; run "
            "the prompt through this model, or use use_cache=False, or weft:full"
        )
    q = torch.cat([past, q], 2)
    layer.weft_past = Past(q, layer.keys)
    state.cache = state.cached_keys = None
    return q


def note_cache(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: which cache this call goes on from, and its keys before they grow."""
    if torch.compiler.is_compiling():
        return
    state = layer_state(module)
    state.cache = next((a for a in (*args, *kwargs.values()) if isinstance(a, Cache)), None)
    layer = _cache_layer(module, state.cache)
    state.cached_keys = None if layer is None else layer.keys


def is_cross_attention(module: nn.Module) -> bool:
    """Whether this layer reads another sequence, whatever the two lengths; found once, in an eager call."""
    state = layer_state(module)
    if state.cross is None:
        told = getattr(module, "is_cross_attention", False) or "cross" in type(module).__name__.lower()
        cross = bool(told or (getattr(module, "is_decoder", False) and not getattr(module, "is_causal", True)))
        if torch.compiler.is_compiling():
            return cross
        given = _forward_locals(module)
        state.cross = cross or any(given.get(n) is not None for n in ("key_value_states", "encoder_hidden_states"))
    return state.cross


def _cache_of_this_call(module: nn.Module) -> Any:
    """In a layer's first call the hook came too late."""
    return next((v for v in _forward_locals(module).values() if isinstance(v, Cache)), None)


def _forward_locals(module: nn.Module) -> dict[str, Any]:
    """What the layer's forward, which has called us, holds: an attention function is not told all it needs."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_locals.get("self") is not module:
        frame = frame.f_back
    return {} if frame is None else frame.f_locals


def _cache_layer(module: nn.Module, cache: Any) -> Any:
    """The layer of the cache that grows by appending; None where there is none, or it is of another kind."""
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    index = getattr(module, "layer_idx", None)
    if cache is None or index is None or index >= len(cache.layers):
        return None
    layer = cache.layers[index]
    return layer if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.keys.dim() == 4 else None
