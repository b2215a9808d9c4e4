"""A Transformer over bytes or tokens with logits at every position: causal, or bidirectional for masked modelling.

x = dropout(Embed(ids) + positions)
x = EncoderBlock_l(x, bias), l = 1 … layers
logits = LN(x) · W
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..core.positions import Constant
from ..core.segments import Segments, documents_of
from ..core.sharding import first_position
from ..layers import ALiBi, sinusoids
from ..layers.encoder import NORM_EPS
from .build import AttentionChoice, encoder_blocks


class LanguageModel(nn.Module):
    """`model(ids, mask=None)`: ids (B, L) to logits (B, L, vocab).

    `positions`: "alibi" adds a bias to the attention logits and "rope" rotates queries and keys, if the mechanism
    supports it; "learned" and "sinusoid" are added to the embeddings; "none" relies on causality alone. `segments`
    (B, L) numbers packed documents, 0 for padding: positions start again, and `max_length` is that of a document.
    """

    def __init__(
        self,
        vocab: int,
        *,
        max_length: int,
        causal: bool = True,
        dim: int = 512,
        heads: int = 8,
        head_dim: int = 64,
        layers: int = 6,
        mlp_dim: int = 2048,
        attention: AttentionChoice = "full",
        attention_options: dict[str, Any] | None = None,
        positions: Literal["alibi", "rope", "learned", "sinusoid", "none"] = "alibi",
        dropout: float = 0.1,
        attention_dropout: float | None = None,  # defaults to `dropout`
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if positions not in ("alibi", "rope", "learned", "sinusoid", "none"):
            raise ValueError(f"positions must be alibi, rope, learned, sinusoid or none, got {positions!r}")
        place = {"device": device, "dtype": dtype}
        self.vocab, self.max_length, self.causal = vocab, max_length, causal
        self.embed = nn.Embedding(vocab, dim, **place)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.positions = None
        if positions == "learned":
            self.positions = nn.Parameter(torch.empty(max_length, dim, **place).normal_(std=0.02))
        self.table = None
        if positions == "sinusoid":
            self.table = Constant(partial(sinusoids, max_length, dim, dtype=torch.float64), device)
        self.bias = ALiBi(heads) if positions == "alibi" else None
        self.dropout = nn.Dropout(dropout)
        self.blocks = encoder_blocks(
            layers,
            attention,
            dim,
            heads,
            options=attention_options,
            head_dim=head_dim,
            causal=causal,
            max_length=max_length,
            rope=positions == "rope",
            mlp_dim=mlp_dim,
            dropout=dropout,
            attention_dropout=attention_dropout,
            place=place,
        )
        self.norm = nn.LayerNorm(dim, eps=NORM_EPS, **place)
        self.scores = nn.Linear(dim, vocab, **place)
        nn.init.normal_(self.scores.weight, std=0.02)
        nn.init.zeros_(self.scores.bias)

    def forward(self, ids: Tensor, mask: Tensor | None = None, segments: Tensor | Segments | None = None) -> Tensor:
        if ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise ValueError(f"ids must be integers (B, L), got {ids.dtype} {tuple(ids.shape)}")
        documents = None if segments is None else documents_of(segments, ids)
        length = ids.shape[1] if documents is None else documents.longest
        if length > self.max_length:
            raise ValueError(
                f"{length} tokens exceed max_length={self.max_length}: create the model with a larger max_length"
            )
        x = self.embed(ids)
        table = self.positions if self.table is None else self.table(x.device)
        if table is not None:
            first = first_position(x)
            at = slice(first, first + length) if documents is None else documents.positions
            x = x + table[at].to(x.dtype)
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, mask, self.bias, segments=documents)
        return self.scores(self.norm(x))
