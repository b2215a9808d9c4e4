"""Token-by-token decoding of layers with projections around a mechanism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..attention import Attention
from ..core.contract import PositionBias, quiet_padding, quiet_token
from ..core.decoding_state import DecodingState


class DecodingLayer(nn.Module):
    """`start`, `prefill`, `step`, `reorder` and `crop` of a layer that defines `project` and `merge`."""

    dim: int
    attention: Attention

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, each (B, H, L, head_dim)."""
        raise NotImplementedError

    def project_next(self, x: Tensor, state: DecodingState | None) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of the tokens x that follow `state`."""
        return self.project(x)

    def merge(self, heads: Tensor) -> Tensor:
        """(B, H, L, head_dim) -> (B, L, dim)."""
        raise NotImplementedError

    def start(self, batch: int, *, max_length: int | None = None, history: int = 0) -> DecodingState:
        """The state before the first token; see `Attention.start`."""
        return self.attention.start(batch, max_length=max_length, history=history)

    def prefill(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        bias: PositionBias | None = None,
        state: DecodingState | None = None,
        max_length: int | None = None,
    ) -> tuple[Tensor, DecodingState]:
        """Process a prompt x (B, L, dim), or the next L tokens after `state`; returns its output and the next state."""
        heads, state = self.prefill_heads(x, mask, bias, state, max_length)
        return self.merge(heads), state

    def step(
        self, x: Tensor, state: DecodingState, mask: Tensor | None = None, bias: PositionBias | None = None
    ) -> tuple[Tensor, DecodingState]:
        """Decode one token x (B, 1, dim); returns its output and the next state."""
        heads, state = self.step_heads(x, state, mask, bias)
        return self.merge(heads), state

    def prefill_heads(self, x, mask=None, bias=None, state=None, max_length=None) -> tuple[Tensor, DecodingState]:
        """`prefill` before the output projection, (B, H, L, head_dim)."""
        self.check_input(x)
        x = quiet_padding(x, mask)
        return self.attention.prefill(*self.project_next(x, state), mask, bias, state, max_length, **self.input(x))

    def step_heads(self, x, state, mask=None, bias=None) -> tuple[Tensor, DecodingState]:
        self.check_input(x)
        x = quiet_token(x, mask) if torch.is_grad_enabled() else x  # otherwise the mechanism's own mask is enough
        return self.attention.step(*self.project_next(x, state), state, mask, bias, **self.input(x))

    def reorder(self, state: DecodingState, rows: Tensor) -> DecodingState:
        """The state with its rows in another order; see `Attention.reorder`."""
        return self.attention.reorder(state, rows)

    def crop(self, state: DecodingState, n: int) -> DecodingState:
        """The state without its last n tokens; see `Attention.crop`."""
        return self.attention.crop(state, n)

    def input(self, x: Tensor) -> dict[str, Any]:
        """x, for the few mechanisms that read the layer's input in addition to q, k and v."""
        return {"x": x} if getattr(self.attention, "needs_input", False) else {}

    def check_input(self, x: Tensor) -> None:
        if x.dim() != 3 or x.shape[-1] != self.dim:
            raise ValueError(f"x must be (B, L, {self.dim}), got {tuple(x.shape)}")
