"""State for step-by-step decoding: the keys and values that later tokens may attend to."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class KeyValueState:
    """Keys, values and masks, appended one token at a time to buffers that double when full.

    `position` counts all tokens; `dropped` counts the tokens removed at the front, so slot s of the buffers holds
    position `dropped + s`. Successive states share the buffers and `written`, the number of used slots. If decoding
    branched and the next slot is already used, a state appends to a copy.
    """

    k: Tensor | None
    v: Tensor | None
    valid: Tensor | None
    position: int = 0
    dropped: int = 0
    written: list[int] = field(default_factory=lambda: [0])

    @classmethod
    def empty(cls) -> KeyValueState:
        return cls(None, None, None)

    def append(self, k: Tensor, v: Tensor, mask: Tensor | None = None) -> KeyValueState:
        """Append the token (B, H, 1, D) without copying it. A masked token gets a position but no attention."""
        if mask is None:
            mask = torch.ones(k.shape[0], dtype=torch.bool, device=k.device)
        used, written = self.position - self.dropped, [self.position - self.dropped + 1]
        if self.k is None or self.v is None or self.valid is None:
            buffers = k, v, mask[:, None]
        elif used == self.written[0] < self.k.shape[2] and not torch.is_grad_enabled():
            self.k[:, :, used], self.v[:, :, used], self.valid[:, used] = k[:, :, 0], v[:, :, 0], mask
            buffers, written = (self.k, self.v, self.valid), self.written
            written[0] += 1
        else:
            room = 0 if torch.is_grad_enabled() else used  # in-place writes would break autograd's saved tensors
            buffers = (
                F.pad(torch.cat([self.k[:, :, :used], k], 2), (0, 0, 0, room)),
                F.pad(torch.cat([self.v[:, :, :used], v], 2), (0, 0, 0, room)),
                F.pad(torch.cat([self.valid[:, :used], mask[:, None]], 1), (0, room)),
            )
        return replace(self, k=buffers[0], v=buffers[1], valid=buffers[2], position=self.position + 1, written=written)

    def read(self, last: int | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return keys, values, their validity (B, n) and positions (n,): all stored tokens, or the `last` few."""
        assert self.k is not None and self.v is not None and self.valid is not None
        used = self.position - self.dropped
        first = 0 if last is None else max(0, used - last)
        j = torch.arange(self.dropped + first, self.position, device=self.k.device)
        return self.k[:, :, first:used], self.v[:, :, first:used], self.valid[:, first:used], j

    def keep_last(self, n: int) -> KeyValueState:
        """Drop all but the last n tokens. Memory is released only once at least 2n tokens are stored."""
        used = self.position - self.dropped
        if self.k is None or self.v is None or self.valid is None or used < 2 * max(n, 1):
            return self
        cut = slice(used - n, used)
        return replace(
            self,
            k=self.k[:, :, cut].clone(),
            v=self.v[:, :, cut].clone(),
            valid=self.valid[:, cut].clone(),
            dropped=self.position - n,
            written=[n],
        )


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
