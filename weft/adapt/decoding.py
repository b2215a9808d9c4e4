"""Decoding states in the caches of transformers.

A cache layer of transformers keeps the keys and values of all tokens; a mechanism that decodes needs only its state. So
after a prompt, `begin` drops the keys and values and turns the cache layer into a `StateLayer`, whatever created the
cache: `generate()`, or `model(ids, use_cache=True)`. From then on attention gets only the new tokens.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from ..attention import Attention
from ..core.contract import PositionBias
from .masks import HARMLESS
from .past import cache_layer, cache_of_this_call

HISTORY = 64  # tokens that `crop` can drop, if the cache records its past: assisted generation drafts fewer


class NewKeys(Tensor):
    """The keys of the new tokens, without those before. Only weft's attention functions can read them."""

    weft_layer: StateLayer

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in HARMLESS or getattr(func, "__name__", "") == "__get__":
            return super().__torch_function__(func, types, args, kwargs or {})
        raise ValueError(
            "this cache holds decoding states of weft instead of keys and values, and another attention reads it: run "
            "the prompt again with a new cache"
        )


class StateLayer(CacheLayerMixin):
    """A cache layer with the decoding state of a mechanism. `begin` gives this class to an ordinary cache layer."""

    attn: Attention
    name: str  # the mechanism, as weft:<name>
    options: dict[str, Any]
    state: Any
    length: int
    unread: bool  # the tokens of the last update have not reached attention
    padding: Tensor | None  # (B, length), False for padding; None without padding
    ordinary: type[CacheLayerMixin]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.unread:
            raise ValueError(f"a call of the model did not finish and left this cache of {self.name} incomplete")
        self.unread = True
        self.length += key_states.shape[2]
        if not torch.compiler.is_compiling():
            key_states = key_states.as_subclass(NewKeys)
        key_states.weft_layer = self  # type: ignore[attr-defined]
        return key_states, value_states

    def refuse_other(self, name: str, options: dict[str, Any]) -> None:
        if (name, options) != (self.name, self.options):
            raise ValueError(
                f"this cache was filled by {self.name} with {self.options}, but the layer uses {name} with {options}: "
                "run the prompt again with a new cache"
            )

    def refuse(self, **unsupported: Any) -> None:
        """Reject what only the keys of all tokens would allow."""
        for what, value in unsupported.items():
            if value:
                raise ValueError(
                    f"{self.name} with a cache keeps a decoding state instead of keys, which does not support {what}: "
                    "set use_cache=False"
                )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: PositionBias | None = None) -> Tensor:
        """The outputs of the new tokens (B, H, n, D); `mask` (B, length) covers all tokens."""
        n = q.shape[2]
        if torch.is_grad_enabled():
            raise ValueError(f"decoding with {self.name} and a cache needs torch.no_grad()")
        self._check_padding(mask, self.length - n)
        self.padding = mask
        new = None if mask is None else mask[:, -n:]
        if n == 1:
            out, self.state = self.attn.step(q, k, v, self.state, None if new is None else new[:, 0], bias)
        else:
            out, self.state = self.attn.prefill(q, k, v, new, bias, state=self.state)
        self.unread = False
        return out

    def _check_padding(self, mask: Tensor | None, past: int) -> None:
        """The state cannot change which of the earlier tokens were padding."""
        if mask is None and self.padding is None or torch.compiler.is_compiling():
            return
        before, now = self.padding, None if mask is None else mask[:, :past]
        same = bool(now.all()) if before is None else now is not None and torch.equal(before, now)  # type: ignore[union-attr]
        if not same:
            raise ValueError(
                f"the attention_mask marks other padding in the {past} cached tokens than when they were processed, "
                f"and {self.name} cannot change its state: pass the same mask, extended by the new tokens, or "
                "use_cache=False"
            )

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.state = self.attn.reorder(self.state, beam_idx)
        if self.padding is not None:
            self.padding = self.padding[beam_idx.to(self.padding.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(self.state.batch, device=self.state.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(torch.arange(self.state.batch, device=indices.device)[indices])

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -`tokens_to_remove` tokens. Up to transformers 5.17, a positive number is the new length."""
        n = -tokens_to_remove if tokens_to_remove <= 0 else max(0, self.length - tokens_to_remove)
        if n == 0:
            return
        try:
            self.state = self.attn.crop(self.state, n)
        except ValueError as error:
            raise ValueError(
                f"this cache of {self.name} cannot remove {n} tokens: call cache.activate_past_recording() before "
                f"the prompt, and remove at most {HISTORY} at once; or use weft:full"
            ) from error
        self.length -= n
        self.padding = None if self.padding is None else self.padding[:, : self.length]

    def offload(self) -> None:
        """States are small and stay on the device."""

    def prefetch(self) -> None:
        pass

    def reset(self) -> None:
        """Become an ordinary cache layer again, for any model."""
        for name in ("attn", "name", "options", "state", "length", "unread", "padding", "is_sliding"):
            delattr(self, name)
        self.__class__ = self.ordinary  # type: ignore[assignment]
        self.reset()

    def __deepcopy__(self, memo: dict[int, Any]) -> StateLayer:
        memo[id(self.attn)] = self.attn
        made = type(self).__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made


def state_layer(key: Tensor) -> StateLayer | None:
    """The cache layer that `key` comes from, if it keeps a decoding state."""
    return getattr(key, "weft_layer", None)


def plain_keys(key: Tensor) -> Tensor:
    return key.as_subclass(Tensor) if isinstance(key, NewKeys) else key


def begin(
    module: nn.Module,
    attn: Attention,
    name: str,
    options: dict[str, Any],
    key: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: PositionBias | None,
) -> Tensor | None:
    """Process a prompt and keep the mechanism's state in the cache of this call, instead of its keys and values.

    None, without effect, if there is no cache of a kind that can hold it.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not attn.info.steps or v.shape != k.shape:
        return None
    cache = cache_of_this_call(module)
    layer = cache_layer(module, cache)
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) or layer.get_seq_length() != q.shape[2]:
        return None
    if getattr(getattr(module, "config", None), "num_kv_shared_layers", None):
        return None  # other layers read these keys
    own = layer.keys.untyped_storage().data_ptr() == key.untyped_storage().data_ptr()
    if not own and not cache.offloading:
        return None  # the layer changes the keys after the cache
    records = getattr(cache, "weft_records", False) or getattr(layer, "record_past", False)
    out, state = attn.prefill(q, k, v, mask, bias, state=attn.start(q.shape[0], history=HISTORY if records else 0))
    layer.ordinary, layer.is_sliding = type(layer), layer.is_sliding
    layer.__class__ = StateLayer
    layer.keys = layer.values = None
    layer.attn, layer.name, layer.options = attn, name, options
    layer.state, layer.length = state, q.shape[2]
    layer.unread, layer.padding = False, mask
    return out


def note_recording() -> None:
    """Note on a cache that it must be able to `crop`: ordinary layers can always, and have no such setting."""
    original = Cache.activate_past_recording
    if hasattr(original, "weft"):
        return

    def activate_past_recording(self: Any) -> None:
        self.weft_records = True
        original(self)

    activate_past_recording.weft = True  # type: ignore[attr-defined]
    Cache.activate_past_recording = activate_past_recording  # type: ignore[method-assign]
