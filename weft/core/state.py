"""Buffers for step-by-step decoding: the keys and values that later tokens may attend to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .contract import Attention
from .decoding_state import Place
from .softmax import attend_one, softmax_attention

LONG = 1024  # slots from which a masked query is computed with matrix products on a GPU


@dataclass
class KeyValues:
    """Keys and values (B, H, slots, D), and which of them belong to real tokens (B, slots)."""

    k: Tensor
    v: Tensor
    valid: Tensor

    @classmethod
    def empty(cls, k: Tensor, slots: int) -> KeyValues:
        """`slots` empty slots for keys and values like k (B, H, any, D)."""
        B, H, _, D = k.shape
        return cls(k.new_zeros(B, H, slots, D), k.new_zeros(B, H, slots, D), k.new_zeros(B, slots, dtype=torch.bool))

    @classmethod
    def of(cls, k: Tensor, v: Tensor, mask: Tensor | None, slots: int) -> KeyValues:
        """The tokens (B, H, L, D) in the first L slots."""
        room = slots - k.shape[2]
        mask = k.new_ones(k.shape[0], k.shape[2], dtype=torch.bool) if mask is None else mask
        # F.pad returns its input if there is nothing to pad, but the caller may change that.
        k, v, mask = (
            (F.pad(k, (0, 0, 0, room)), F.pad(v, (0, 0, 0, room)), F.pad(mask, (0, room)))
            if room
            else (
                k.clone(memory_format=torch.contiguous_format),
                v.clone(memory_format=torch.contiguous_format),
                mask.clone(),
            )
        )
        return cls(k, v, mask)

    @property
    def slots(self) -> int:
        return self.k.shape[2]

    def put(self, at: Place, k: Tensor, v: Tensor, mask: Tensor | None, slot: Any) -> KeyValues:
        """Write the token (B, H, 1, D) with its mask (B,) to a slot, or several with (B, L) from a slot on."""
        B, L = k.shape[0], k.shape[2]
        real = k.new_ones(B, L, dtype=torch.bool) if mask is None else mask.view(B, L)
        return KeyValues(at.put(self.k, k, slot), at.put(self.v, v, slot), at.put(self.valid, real, slot, 1))

    def read(self, at: Place, count: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values and which count (None: all), of the first `count` slots."""
        n, some = at.filled(count, self.slots)
        k, v = self.k[:, :, :n], self.v[:, :, :n]
        return k, v, at.allowed(self.valid[:, :n], some)

    def attend(self, q: Tensor, at: Place, count: Any, bias: Any, positions: Callable[[Tensor], Tensor]) -> Tensor:
        """Attention of the newest token to the first `count` slots; `positions` maps slots to positions."""
        k, v, valid = self.read(at, count)
        logits = None
        if bias is not None:
            j = positions(at.first(k.shape[2])).clamp(min=0).minimum(at.tensor)
            logits = bias(at.tensor.view(1, 1, 1, 1), j.view(1, 1, 1, -1))
        allowed = None if valid is None else valid[:, None, None]
        long = k.shape[2] >= LONG and q.is_cuda and not torch.compiler.is_compiling()
        if long and allowed is not None and at.in_place:
            return attend_one(q, k, v, allowed, logits)
        return softmax_attention(q, k, v, allowed=allowed, bias=logits)


class KeepsAll(Attention):
    """Decoding of mechanisms whose state is all keys and values."""

    crops = True

    def empty_state(self, k: Tensor, capacity: int) -> KeyValues:
        return KeyValues.empty(k, capacity)

    def state_after(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, capacity: int) -> KeyValues:
        return KeyValues.of(k, v, mask, capacity)


def attend_to(q: Tensor, state: KeyValues, at: Place, seen: Tensor, allowed: Tensor, bias: Any) -> Tensor:
    """Attention of the newest token to the positions `seen` (n,) where `allowed` (n,)."""
    i = at.tensor
    seen = seen.clamp(min=0).minimum(i)
    k, v = state.k.index_select(2, seen), state.v.index_select(2, seen)
    allowed = (state.valid.index_select(1, seen) & allowed)[:, None, None]
    values = None if bias is None else bias(i.view(1, 1, 1, 1), seen.view(1, 1, 1, -1))
    return softmax_attention(q, k, v, allowed=allowed, bias=values)


def state_size(state: object) -> int:
    """Count the floating point numbers in a decoding state, for comparison with a full key-value cache."""
    if isinstance(state, Tensor):
        return state.numel() if state.is_floating_point() else 0
    if is_dataclass(state) and not isinstance(state, type):
        return sum(state_size(getattr(state, f.name)) for f in fields(state))
    if isinstance(state, (list, tuple)):
        return sum(state_size(s) for s in state)
    if isinstance(state, dict):
        return sum(state_size(s) for s in state.values())
    return 0
