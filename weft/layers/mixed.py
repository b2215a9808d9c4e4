"""Mixed attention: several mechanisms side by side in one layer.

Wide Attention Is The Way Forward For Transformers?, https://arxiv.org/abs/2210.00640, section on mixed attention

    Mixed(x) = (1/n) Σ_m MultiheadAttention_m(x)          H/n heads each, every block with its own projections
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..attention import attention_info
from ..attention.contract import PositionBias
from .multihead import MultiheadAttention


class MixedAttention(nn.Module):
    """One multi-head block per mechanism, heads shared out equally, outputs averaged.

    An entry of `attentions` is a name, or (name, {options}). A position bias goes to the mechanisms that can take
    one, which must then be all of them.
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
        if heads % len(attentions):
            raise ValueError(f"{heads} heads cannot be shared out equally among {len(attentions)} mechanisms")
        if head_dim is None:
            if dim % heads:
                raise ValueError(f"dim={dim} does not divide into {heads} heads; give head_dim")
            head_dim = dim // heads
        self.blocks = nn.ModuleList()
        for entry in attentions:
            name, options = (entry, {}) if isinstance(entry, str) else entry
            attention_info(name)  # an unknown name is refused before anything is built
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

    def forward(self, x: Tensor, mask: Tensor | None = None, bias: PositionBias | None = None) -> Tensor:
        total = sum(block(x, mask, bias) for block in self.blocks)
        return total / len(self.blocks)
