"""A pre-norm Transformer block around any attention layer.

x ← x + dropout(Attn(Norm(x), mask))
x ← x + dropout(FFN(Norm(x)))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..core.contract import PositionBias, quiet_padding, quiet_token
from ..core.segments import Segments, documents_of, first_tokens
from .feedforward import FeedForward
from .multihead import MultiheadAttention

NORM_EPS = 1e-6


def make_norm(kind: str, dim: int, **place: Any) -> nn.Module:
    if kind not in ("layer", "rms"):
        raise ValueError(f"norm must be 'layer' or 'rms', got {kind!r}")
    return (nn.LayerNorm if kind == "layer" else nn.RMSNorm)(dim, eps=NORM_EPS, **place)


class EncoderBlock(nn.Module):
    """`block(x, mask=None, bias=None, segments=None)`, x (B, L, dim). `attention` takes the same arguments.

    `norm` is "layer" or "rms". `mlp_dropout`, inside the MLP, defaults to `dropout`. `first=True` returns only the
    first token of each row or packed document, (rows or documents, dim), and computes the others as far as these need
    them.
    """

    def __init__(
        self,
        dim: int,
        attention: nn.Module,
        *,
        mlp_dim: int,
        dropout: float = 0.0,
        mlp_dropout: float | None = None,
        norm: str = "layer",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.attention_norm = make_norm(norm, dim, device=device, dtype=dtype)
        self.attention = attention
        self.feedforward_norm = make_norm(norm, dim, device=device, dtype=dtype)
        inside = dropout if mlp_dropout is None else mlp_dropout
        self.feedforward = FeedForward(dim, mlp_dim, dropout=inside, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        bias: PositionBias | None = None,
        *,
        segments: Tensor | Segments | None = None,
        first: bool = False,
    ) -> Tensor:
        options: dict[str, Any] = {}
        found = None if segments is None else documents_of(segments, x)  # read them once for all layers
        if found is not None:  # layers without packing do not get the argument
            x, options = quiet_padding(x, found.mask), {"segments": found}
        x = quiet_padding(x, mask)
        if first:
            return self.first(x, self.attention_norm(x), mask, bias, found)
        return self.finish(x, self.attention(self.attention_norm(x), mask, bias, **options))

    def first(
        self,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None = None,
        bias: PositionBias | None = None,
        documents: Segments | None = None,
    ) -> Tensor:
        """The output for the first tokens of x, the normalised x of which is y."""
        itself = isinstance(self.attention, MultiheadAttention)
        options: dict[str, Any] = {"first": True} if itself else {}
        if documents is not None:
            options["segments"] = documents
        y = self.attention(y, mask, bias, **options)
        return self.finish(first_tokens(x, documents), y if itself else first_tokens(y, documents))

    def prefill(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        bias: PositionBias | None = None,
        state: Any = None,
        max_length: int | None = None,
    ) -> tuple[Tensor, Any]:
        """Process a prompt x (B, L, dim), or the next L tokens after `state`; returns its output and the next state."""
        x, attention = quiet_padding(x, mask), decoding_layer(self.attention)
        y, state = attention.prefill(self.attention_norm(x), mask, bias, state, max_length)
        return self.finish(x, y), state

    def step(
        self, x: Tensor, state: Any, mask: Tensor | None = None, bias: PositionBias | None = None
    ) -> tuple[Tensor, Any]:
        """Decode one token x (B, 1, dim); returns its output and the next state."""
        x = quiet_token(x, mask)
        y, state = decoding_layer(self.attention).step(self.attention_norm(x), state, mask, bias)
        return self.finish(x, y), state

    def finish(self, x: Tensor, y: Tensor) -> Tensor:
        """The output for the input x, of which the attention layer made y."""
        x = x + self.dropout(y)
        return x + self.dropout(self.feedforward(self.feedforward_norm(x)))


def decoding_layer(layer: nn.Module) -> Any:
    """The layer, if it can decode."""
    if not hasattr(layer, "prefill"):
        raise ValueError(
            f"{type(layer).__name__} has no prefill() and step(), so this model cannot generate; use a "
            "weft.MultiheadAttention, a MixedAttention or a CachedAttention"
        )
    return layer
