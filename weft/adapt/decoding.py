"""Decoding states in the caches of transformers.

A cache layer of transformers keeps the keys and values of all tokens; a mechanism that decodes needs only its state. So
after a prompt, `begin` drops the keys and values and turns the cache layer into a `StateLayer`, whatever created the
cache: `generate()`, or `model(ids, use_cache=True)`. From then on attention gets only the new tokens.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from ..attention import Attention
from ..core.contract import PositionBias
from ..core.decoding_state import tree_map
from ..core.heads import spread
from ..core.precision import autocasts
from .masks import HARMLESS, CausalMask, UnpaddedCausalMask
from .past import cache_layer, cache_of_this_call, own_cache

HISTORY = 64  # tokens that `crop` can drop if the cache records its past; assisted generation drafts fewer


class NewKeys(Tensor):
    """The keys of the new tokens, without those before. Only weft's attention functions can read them."""

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

    ordinary: type[CacheLayerMixin]
    attn: Attention
    name: str  # "weft:" and the mechanism
    options: dict[str, Any]
    state: Any
    length: Any  # tokens so far; a tensor in static caches
    new_keys: Tensor | None  # of the current call, until attention has read them
    checks: bool  # one layer of a cache checks its padding mask
    padding: Tensor | None  # (B, length), False for padding; None without padding
    checked: Any  # the choice of attention of the last call, after all checks

    def __getattr__(self, attribute: str) -> Any:
        if attribute in ("keys", "values"):  # Whisper returns those of a finished generation
            raise AttributeError(
                f"this cache of {self.name} keeps a decoding state instead of {attribute}: set use_cache=False, or use "
                "weft:full"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {attribute!r}")

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.new_keys is not None:
            raise ValueError(f"this cache of {self.name} is incomplete, because an earlier call did not finish")
        self.length += key_states.shape[2]
        self.new_keys = key_states
        if not torch.compiler.is_compiling():
            key_states = key_states.as_subclass(NewKeys)
        key_states.weft_layer = self  # type: ignore[attr-defined]
        return key_states, value_states

    @property
    def columns(self) -> int:
        """The number of columns in the mask of the current call."""
        return self.length

    def lengthened(self, mask: Tensor | None, columns: int) -> Tensor | None:
        """The padding mask of all tokens, from that of the last ones: the layer that it was made for may have no state,
        and only a sliding window in its cache."""
        early = self.columns - columns
        if not early or (mask is None and self.padding is None):
            return mask
        if self.padding is None:
            return F.pad(mask, (early, 0), value=True)  # type: ignore[arg-type]
        mask = self.padding.new_ones(self.padding.shape[0], columns) if mask is None else mask
        return torch.cat([self.padding[:, :early], mask], 1)

    def padding_of(self, mask: Tensor | None) -> Tensor | None:
        """The padding mask (B, columns)."""
        self.refuse(pairwise_masks=mask is not None and mask.dim() == 4)
        return mask

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

    def repeats(self, choice: Any, module: nn.Module, q: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> bool:
        """Whether this is another token for the attention of the last call, so that there is nothing new to check."""
        get = kwargs.get
        if self.checked is not choice or q.shape[2] != 1 or module.training or get("output_attentions"):
            return False
        if get("sliding_window") or get("position_bias") is not None or get("cu_seq_lens_q") is not None:
            return False
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or autocasts(q):
            return False
        if type(mask) is UnpaddedCausalMask:
            return self.padding is None
        return type(mask) is CausalMask and not self.checks and hasattr(mask, "weft_row")

    def attend_next(self, q: Tensor, v: Tensor, mask: Any) -> Tensor:
        assert self.new_keys is not None
        k, v = spread(q, self.new_keys, v)
        row = getattr(mask, "weft_row", None)
        out = self.attn.repeat(q, k, v, self.state, row)
        if out is None:
            out, self.state = self.attn.step(q, k, v, self.state, row)
        self.new_keys = None
        return out

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: PositionBias | None) -> Tensor:
        """The outputs of the new tokens (B, H, n, D); `mask` (B, columns) covers all tokens."""
        if torch.is_grad_enabled():
            raise ValueError(f"decoding with {self.name} and a cache needs torch.no_grad()")
        n = q.shape[2]
        if self.checks and not torch.compiler.is_compiling():
            self._check_padding(mask, n)
        new = None if mask is None else self._last(mask, n)
        if n == 1:
            out, self.state = self.attn.step(q, k, v, self.state, None if new is None else new[:, 0], bias)
        else:
            out, self.state = self.attn.prefill(q, k, v, new, bias, state=self.state)
        self.new_keys = None
        return out

    def _last(self, mask: Tensor, n: int) -> Tensor:
        return mask[:, -n:]

    def _check_padding(self, mask: Tensor | None, n: int) -> None:
        """The state cannot change which of the earlier tokens were padding."""
        past = None if mask is None else mask[:, :-n]
        if self.padding is None:
            same = past is None or bool(past.all())
        else:
            same = past is not None and torch.equal(past, self.padding)
        if not same:
            raise ValueError(
                "the attention_mask marks other padding in the cached tokens than when they were processed, and "
                f"{self.name} cannot change its state: pass the same mask, extended by the new tokens, or set "
                "use_cache=False"
            )
        self.padding = mask

    def get_seq_length(self) -> Any:
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
        n = int(-tokens_to_remove if tokens_to_remove <= 0 else max(0, self.length - tokens_to_remove))
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
        self.padding = None if self.padding is None else self.padding[:, :-n]

    def offload(self) -> None:
        """States are small and stay on the device."""

    def prefetch(self) -> None:
        pass

    def reset(self) -> None:
        """Become an ordinary cache layer again, for any model."""
        for name in StateLayer.__annotations__.keys() - {"ordinary"}:
            delattr(self, name)
        self.__class__ = self.ordinary  # type: ignore[assignment]
        self.is_initialized, self.keys, self.values = False, None, None
        self.reset()

    def __deepcopy__(self, memo: dict[int, Any]) -> StateLayer:
        memo[id(self.attn)] = self.attn
        made = type(self).__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made


class StaticStateLayer(StateLayer):
    """A state that is allocated once, with its length in a tensor, so that steps can be compiled."""

    is_compileable = True
    max_cache_len: int

    @property
    def columns(self) -> int:
        return self.max_cache_len

    def padding_of(self, mask: Tensor | None) -> Tensor | None:
        if mask is not None and mask.dim() == 4 and torch.compiler.is_compiling():
            return mask[:, 0, -1]  # it does not see that the mask is marked as ours
        return super().padding_of(mask)

    def get_max_length(self) -> int:
        return self.max_cache_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.max_cache_len, 0

    def _last(self, mask: Tensor, n: int) -> Tensor:
        return mask.index_select(1, self.length - n + torch.arange(n, device=mask.device))


def state_layer(key: Tensor) -> StateLayer | None:
    """The cache layer that `key` comes from, if it keeps a decoding state."""
    return getattr(key, "weft_layer", None)


def begin(
    module: nn.Module,
    attn: Attention,
    name: str,
    options: dict[str, Any],
    key: Tensor,
    value: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: PositionBias | None,
) -> Tensor | None:
    """Process a prompt and keep the mechanism's state in the cache of this call, instead of keys and values.

    None, without effect, if there is no cache of a kind that can hold it. `key` and `value` are as the layer passes
    them.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not attn.info.steps or v.shape != k.shape:
        return None
    cache, n = own_cache(cache_of_this_call(module)), q.shape[2]
    parts = () if cache is None else cache.layers
    # Modules that run several times in a model (HRM, Zamba) use several parts of the cache.
    layer = next((part for part in parts if getattr(part, "keys", None) is key), cache_layer(module, cache))
    kind = KINDS.get(type(layer))
    if kind is None or int(layer.get_seq_length()) != n:
        return None
    config = getattr(module, "config", None)
    if getattr(config, "num_kv_shared_layers", None) or getattr(config, "cross_attention_layers", None):
        return None  # other layers, or the model (Mllama), read these keys
    if not cache.offloading and any(
        mine.untyped_storage().data_ptr() != theirs.untyped_storage().data_ptr()
        for mine, theirs in ((key, layer.keys), (value, layer.values))
    ):
        return None  # the model changes them after the cache
    static = kind is StaticStateLayer
    records = getattr(cache, "weft_records", False) or getattr(layer, "record_past", False)
    room = min(layer.max_cache_len, attn.max_length or layer.max_cache_len) if static else None
    state = attn.start(q.shape[0], max_length=room, history=HISTORY if records else 0)
    mask = None if mask is None else mask[:, :n]
    out, state = attn.prefill(q, k[:, :, :n], v[:, :, :n], mask, bias, state=state)
    if static:  # CUDA graphs may write to these tensors
        tree_map(_fixed, (state.inner, state.place))
    checks = not static and not any(isinstance(other, StateLayer) for other in cache.layers)
    layer.ordinary, layer.is_sliding = type(layer), layer.is_sliding
    layer.length = layer.cumulative_length if static else n
    del layer.keys, layer.values
    layer.__class__ = kind
    layer.attn, layer.name, layer.options, layer.state = attn, name, options, state
    layer.new_keys, layer.checks, layer.padding, layer.checked = None, checks, mask if checks else None, None
    return out


def _fixed(tensor: Tensor) -> Tensor:
    torch._dynamo.mark_static_address(tensor)
    return tensor


KINDS: dict[type, type[StateLayer]] = {
    DynamicLayer: StateLayer,
    DynamicSlidingWindowLayer: StateLayer,
    StaticLayer: StaticStateLayer,
}


def note_recording() -> None:
    """Note on a cache that it must be able to `crop`: ordinary layers always are, and have no such setting."""
    original = Cache.activate_past_recording
    if hasattr(original, "weft"):
        return

    def activate_past_recording(self: Any) -> None:
        self.weft_records = True
        original(self)

    activate_past_recording.weft = True  # type: ignore[attr-defined]
    Cache.activate_past_recording = activate_past_recording  # type: ignore[method-assign]
