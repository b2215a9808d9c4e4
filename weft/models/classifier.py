"""Text classifier: one document to class logits."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..core.segments import Segments
from .encoder import TextEncoder
from .heads import classifier_head


class TextClassifier(nn.Module):
    """`model(ids, mask=None)`: ids (B, S), 0 = padding, to logits (B, classes).

    The head is Linear → ReLU → Linear with `head_width` hidden units (default `mlp_dim`); 0 means a single linear
    layer. All other options (layers, heads, attention, pooling, …) go to TextEncoder. With `segments` (B, S) there is
    one row of logits per packed document, in order.
    """

    def __init__(
        self,
        vocab: int,
        classes: int,
        *,
        max_length: int,
        dim: int = 512,
        mlp_dim: int = 2048,
        head_width: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **encoder: Any,
    ):
        super().__init__()
        place = {"device": device, "dtype": dtype}
        self.encoder = TextEncoder(vocab, max_length=max_length, dim=dim, mlp_dim=mlp_dim, **place, **encoder)
        width = mlp_dim if head_width is None else head_width
        self.head = classifier_head(dim, [width] if width else [], classes, **place)

    def forward(
        self, ids: Tensor, mask: Tensor | Literal[True] | None = None, segments: Tensor | Segments | None = None
    ) -> Tensor:
        return self.head(self.encoder(ids, mask, segments))
