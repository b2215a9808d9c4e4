"""A language model over a large vocabulary of words: adaptive input and adaptive softmax with tied weights.

Baevski and Auli, Adaptive Input Representations for Neural Language Modeling, https://arxiv.org/abs/1809.10853

Words are numbered by frequency and cut into bands [0, c_1), [c_1, c_2), ... Band b has a table E_b (words x dim / 4^b)
and a projection P_b to dim:

    x      = √dim · P_b E_b[word]
    log p  = log softmax([E_0 h, C h])[word]                                     word in band 0
    log p  = log softmax([E_0 h, C h])[band b] + log softmax(E_b P_bᵀ h)[word]   word in band b > 0

Input and output share the tables, and the bands after the first their projections.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers import ALiBi, MultiheadAttention
from .build import check_takes_bias, encoder_blocks

CUTOFFS = (20_000, 60_000)


class AdaptiveWords(nn.Module):
    """`words(ids)` -> (…, dim); `words.nll(x, targets)` -> (…): the negative log-likelihood of each target."""

    def __init__(self, vocab: int, dim: int, cutoffs: tuple[int, ...] = CUTOFFS, dropout: float = 0.0):
        super().__init__()
        self.dim, self.cuts = dim, [0, *(c for c in cutoffs if c < vocab), vocab]
        widths = [max(1, dim // 4**b) for b in range(len(self.cuts) - 1)]
        sizes = [end - start for start, end in zip(self.cuts[:-1], self.cuts[1:], strict=True)]
        self.tables = nn.ModuleList([nn.Embedding(n, w) for n, w in zip(sizes, widths, strict=True)])
        self.widen = nn.ModuleList([nn.Linear(w, dim, bias=False) for w in widths])
        self.bands = nn.Linear(dim, len(sizes) - 1, bias=False) if len(sizes) > 1 else None
        self.dropout = nn.Dropout(dropout)  # inside the later bands
        for table, widen in zip(self.tables, self.widen, strict=True):
            nn.init.normal_(table.weight, std=table.embedding_dim**-0.5)  # type: ignore[arg-type, operator]
            nn.init.xavier_uniform_(widen.weight)  # type: ignore[arg-type]

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor | float = 0.0
        for table, widen, a, b in zip(self.tables, self.widen, self.cuts[:-1], self.cuts[1:], strict=True):
            here = ((ids >= a) & (ids < b))[..., None]
            x = x + widen(table((ids - a).clamp(0, b - a - 1))) * here
        assert isinstance(x, Tensor)
        return x * math.sqrt(self.dim)

    def nll(self, x: Tensor, targets: Tensor) -> Tensor:
        flat, words = x.flatten(0, -2), targets.flatten()
        first: Any = self.tables[0]
        head = F.linear(flat, first.weight)
        if self.bands is not None:
            head = torch.cat([head, self.bands(flat)], 1)
        wide = torch.promote_types(head.dtype, torch.float32)
        head = head.to(wide).log_softmax(1)
        found = head.gather(1, words.clamp(max=self.cuts[1] - 1)[:, None])[:, 0]
        for band in range(1, len(self.tables)):
            table: Any = self.tables[band]
            widen: Any = self.widen[band]
            rows = torch.nonzero((words >= self.cuts[band]) & (words < self.cuts[band + 1]))[:, 0]
            inside = self.dropout(F.linear(flat[rows], widen.weight.T))
            inside = F.linear(inside, table.weight).to(wide).log_softmax(1)
            tail = inside.gather(1, (words[rows] - self.cuts[band])[:, None])[:, 0]
            found = found.index_copy(0, rows, tail + head[rows, self.cuts[1] + band - 1])
        return -found.view_as(targets)


class ScaledEmbedding(nn.Embedding):
    """Embeddings of standard deviation 1/√dim, times √dim: of unit size, with gradients of the size that Adam's steps
    were tuned for."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.embedding_dim**-0.5)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * math.sqrt(self.embedding_dim)


def small_projections(model: nn.Module) -> None:
    """Queries, keys and values start at 1/√2 of Xavier's scale."""
    for layer in model.modules():
        if isinstance(layer, MultiheadAttention):
            for linear in (layer.q, layer.k, layer.v):
                if linear is not None:
                    nn.init.xavier_uniform_(linear.weight, gain=0.5**0.5)


class WordModel(nn.Module):
    """`model(ids, targets)`: the negative log-likelihood of every target (B, L), by a causal Transformer with ALiBi.

    Pre-norm without a norm after the last block, and queries, keys and values that start at 1/√2 of Xavier's scale, as
    in the subsampled paper's model for WikiText-103.
    """

    def __init__(self, vocab: int, length: int, *, cutoffs: tuple[int, ...] = CUTOFFS, **options: Any):
        super().__init__()
        self.words = AdaptiveWords(vocab, options["dim"], cutoffs, dropout=0.2 if options["dropout"] else 0.0)
        self.bias, self.dropout = ALiBi(options["heads"]), nn.Dropout(options["dropout"])
        self.blocks = encoder_blocks(
            options["layers"],
            options["attention"],
            options["dim"],
            options["heads"],
            options=options.get("attention_options"),
            head_dim=options["head_dim"],
            causal=True,
            max_length=length,
            mlp_dim=options["mlp_dim"],
            dropout=options["dropout"],
            attention_dropout=options["attention_dropout"],
            mlp_dropout=options.get("mlp_dropout"),
            place={},
        )
        check_takes_bias(self.blocks, "use full, local, longformer or subsampled")
        small_projections(self.blocks)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.dropout(self.words(ids))
        for block in self.blocks:
            x = block(x, None, self.bias)
        return self.words.nll(x, targets)
