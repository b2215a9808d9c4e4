"""Text matching: two documents to class logits.

e = encoder(document), one encoder for both;  logits = MLP([e₁ ; e₂]) with mlp_dim and mlp_dim / 2 hidden units
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..core.segments import Segments
from .encoder import TextEncoder
from .heads import classifier_head


class TextMatcher(nn.Module):
    """`model(first, second, first_mask=None, second_mask=None)`: ids (B, S₁) and (B, S₂) to logits (B, classes).

    By default, the first token's vector represents a document (see `pooling`). All other options go to TextEncoder.
    With `first_segments` and `second_segments`, the n-th packed documents of both form a pair.
    """

    def __init__(
        self,
        vocab: int,
        classes: int = 2,
        *,
        max_length: int,
        dim: int = 128,
        mlp_dim: int = 512,
        pooling: Literal["cls", "first", "mean"] = "first",
        device: Any = None,
        dtype: torch.dtype | None = None,
        **encoder: Any,
    ):
        super().__init__()
        place = {"device": device, "dtype": dtype}
        self.encoder = TextEncoder(
            vocab, max_length=max_length, dim=dim, mlp_dim=mlp_dim, pooling=pooling, **place, **encoder
        )
        self.head = classifier_head(2 * dim, [mlp_dim, mlp_dim // 2], classes, **place)

    def forward(
        self,
        first: Tensor,
        second: Tensor,
        first_mask: Tensor | None = None,
        second_mask: Tensor | None = None,
        first_segments: Tensor | Segments | None = None,
        second_segments: Tensor | Segments | None = None,
    ) -> Tensor:
        pair = self.encoder(first, first_mask, first_segments), self.encoder(second, second_mask, second_segments)
        if len(pair[0]) != len(pair[1]):
            counts = f"{len(pair[0])} and {len(pair[1])}"
            raise ValueError(f"first and second need the same number of documents, got {counts}")
        return self.head(torch.cat(pair, -1))
