"""A bidirectional Transformer that gives every token a class: `model(ids)`, ids (B, L) with 0 for padding, to logits
(B, L, classes)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .language import LanguageModel


class TokenClassifier(LanguageModel):
    def __init__(self, vocab: int, classes: int, **options: Any):
        super().__init__(vocab, causal=False, **options)
        self.scores = nn.Linear(self.embed.embedding_dim, classes).to(self.embed.weight)
        nn.init.zeros_(self.scores.bias)

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids, ids > 0)
