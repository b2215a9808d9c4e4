"""Mixed attention: several mechanisms in parallel in one layer.

Wide Attention Is The Way Forward For Transformers?, https://arxiv.org/abs/2210.00640, section on mixed attention

    Mixed(x) = (1/n) Σ_m MultiheadAttention_m(x)          H/n heads each, every block with its own projections
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..attention import attention_info
from ..core.contract import PositionBias
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
                raise ValueError(f"dim={dim} is not divisible by heads={heads}: give head_dim")
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
        n = len(self.blocks)
        shares = [None if bias is None else _Share(bias, self.heads, m, n) for m in range(n)]
        total = sum(block(x, mask, share, segments=segments) for block, share in zip(self.blocks, shares, strict=True))
        return total / len(self.blocks)


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
