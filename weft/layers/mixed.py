"""Mixed attention: several mechanisms in parallel in one layer.

Wide Attention Is The Way Forward For Transformers?, https://arxiv.org/abs/2210.00640, section on mixed attention

    Mixed(x) = (1/n) Σ_m MultiheadAttention_m(x)          H/n heads each, every block with its own projections
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import attention_info
from ..core.contract import PositionBias
from ..core.decoding_state import DecodingState, check_crops
from ..core.segments import Segments
from .multihead import MultiheadAttention


class MixedAttention(nn.Module):
    """One multi-head block per mechanism, with an equal number of heads; the outputs are averaged.

    An entry of `attentions` is a name, or (name, {options}). A position bias has `heads` heads in total: mechanism m
    of n gets heads m, m + n, m + 2n, …, so that each covers the whole range of ALiBi's slopes. All mechanisms must
    then support a position bias.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        attentions: Sequence[str | tuple[str, dict[str, Any]]],
        *,
        head_dim: int | None = None,
        causal: bool = False,
        max_length: int | None = None,
        dropout: float = 0.0,
        **layer_options: Any,
    ):
        super().__init__()
        if not attentions:
            raise ValueError("attentions must name at least one mechanism")
        if heads < 1 or heads % len(attentions):
            raise ValueError(f"heads={heads} must be divisible by the number of mechanisms, {len(attentions)}")
        if head_dim is None:
            if dim % heads:
                raise ValueError(f"dim={dim} is not divisible by heads={heads}: set head_dim")
            head_dim = dim // heads
        self.heads = heads
        self.blocks = nn.ModuleList()
        for entry in attentions:
            name, options = (entry, {}) if isinstance(entry, str) else entry
            attention_info(name)  # raises an error for unknown names before anything is built
            self.blocks.append(
                MultiheadAttention(
                    dim,
                    heads // len(attentions),
                    head_dim=head_dim,
                    attention=name,
                    causal=causal,
                    max_length=max_length,
                    dropout=dropout,
                    **layer_options,
                    **options,
                )
            )

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        bias: PositionBias | None = None,
        *,
        segments: Tensor | Segments | None = None,
    ) -> Tensor:
        pairs = zip(self.blocks, self._shares(bias), strict=True)
        return sum(block(x, mask, share, segments=segments) for block, share in pairs) / len(self.blocks)

    def _shares(self, bias: PositionBias | None) -> list[PositionBias | None]:
        n = len(self.blocks)
        return [None if bias is None else _Share(bias, self.heads, m, n) for m in range(n)]

    def start(self, batch: int, *, max_length: int | None = None, history: int = 0) -> list[DecodingState]:
        """The states before the first token, one per mechanism; see `Attention.start`."""
        return [block.start(batch, max_length=max_length, history=history) for block in self._each()]

    def prefill(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        bias: PositionBias | None = None,
        state: list[DecodingState] | None = None,
        max_length: int | None = None,
    ) -> tuple[Tensor, list[DecodingState]]:
        """Process a prompt x (B, L, dim), or the next L tokens after `state`; returns its output and the next state."""
        states: list[Any] = [None] * len(self.blocks) if state is None else state
        parts = zip(self._each(), self._shares(bias), states, strict=True)
        return self._mean([block.prefill(x, mask, share, inner, max_length) for block, share, inner in parts])

    def step(
        self, x: Tensor, state: list[DecodingState], mask: Tensor | None = None, bias: PositionBias | None = None
    ) -> tuple[Tensor, list[DecodingState]]:
        """Decode one token x (B, 1, dim); returns its output and the next state."""
        parts = zip(self._each(), self._shares(bias), state, strict=True)
        return self._mean([block.step(x, inner, mask, share) for block, share, inner in parts])

    def reorder(self, state: list[DecodingState], rows: Tensor) -> list[DecodingState]:
        """The state with its rows in another order; see `Attention.reorder`."""
        return [block.reorder(inner, rows) for block, inner in zip(self._each(), state, strict=True)]

    def crop(self, state: list[DecodingState], n: int) -> list[DecodingState]:
        """The state without its last n tokens; see `Attention.crop`."""
        check_crops(state, n)
        return [block.crop(inner, n) for block, inner in zip(self._each(), state, strict=True)]

    def _each(self) -> list[Any]:
        return list(self.blocks)

    def _mean(self, results: list[tuple[Tensor, DecodingState]]) -> tuple[Tensor, list[DecodingState]]:
        return torch.stack([out for out, _ in results]).mean(0), [state for _, state in results]


class _Share:
    """Every n-th head of a position bias, starting with head m."""

    def __init__(self, bias: PositionBias, heads: int, m: int, n: int):
        found = getattr(bias, "heads", heads)
        if found != heads:
            raise ValueError(f"the position bias has {found} heads, but the layer has {heads}")
        self.bias, self.m, self.n = bias, m, n
        self.shared_heads = getattr(bias, "shared_heads", False)
        self.max_length = getattr(bias, "max_length", None)

    def __call__(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        if self.shared_heads:
            return self.bias(query_positions, key_positions)
        by_head = [p if p.shape[1] == 1 else p.repeat_interleave(self.n, 1) for p in (query_positions, key_positions)]
        return self.bias(*by_head)[:, self.m :: self.n]
