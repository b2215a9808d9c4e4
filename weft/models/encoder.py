"""The text encoder of the wide-attention study, with any number of layers and heads (deep or wide).

Wide Attention Is The Way Forward For Transformers?, https://arxiv.org/abs/2210.00640

    x = Embed(ids), with a learned CLS vector first if pooling is "cls"
    x = dropout(x + positions)
    x = EncoderBlock_l(x, mask), l = 1 … layers
    x = LN(x), then pooling: x[0], or the mean over real tokens
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..core.positions import Constant
from ..core.segments import Segments, documents_of, first_tokens
from ..core.sharding import current, first_position, refuse
from ..layers import sinusoids
from ..layers.encoder import make_norm
from .build import AttentionChoice, encoder_blocks


class TextEncoder(nn.Module):
    """`encoder(ids, mask=None)`: ids (B, S), 0 = padding, to one vector per document (B, dim).

    `mask` (B, S) is True for real tokens; the default is `ids > 0`, or without `padded` all of them; `mask=True` means
    that all are real, which is faster.
    `max_length` includes the CLS token: S + 1 with one, else S. `attention` is a registered name (with its options in
    `attention_options`), a list for mixed attention, or a function from the block number to one of these. With
    `segments` (B, S), which numbers packed documents, the result has one row per document, in order; `max_length` is
    then that of a document. In training, or if `only_read` is True, the last block computes only the token that pooling
    reads.
    """

    only_read = False
    padded = True

    def __init__(
        self,
        vocab: int,
        *,
        max_length: int,
        dim: int = 512,
        heads: int = 8,
        head_dim: int = 64,
        layers: int = 6,
        mlp_dim: int = 2048,
        attention: AttentionChoice = "full",
        attention_options: dict[str, Any] | None = None,
        pooling: Literal["cls", "first", "mean"] = "cls",
        positions: Literal["sinusoid", "learned", "rope", "none"] = "sinusoid",
        dropout: float = 0.1,
        attention_dropout: float | None = None,  # defaults to `dropout`
        norm: str = "layer",  # or "rms"
        qk_norm: bool = False,  # see MultiheadAttention
        causal: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if vocab < 2 or layers < 1 or max_length < 1:
            raise ValueError(
                f"vocab must be at least 2 (0 is padding), layers and max_length at least 1; "
                f"got {vocab}, {layers} and {max_length}"
            )
        if pooling not in ("cls", "first", "mean"):
            raise ValueError(f"pooling must be 'cls', 'first' or 'mean', got {pooling!r}")
        if positions not in ("sinusoid", "learned", "rope", "none"):
            raise ValueError(f"positions must be sinusoid, learned, rope or none, got {positions!r}")
        if causal and pooling != "mean":
            raise ValueError("the first token of a causal encoder sees only itself: use pooling='mean'")
        self.vocab, self.dim, self.max_length, self.pooling = vocab, dim, max_length, pooling
        place = {"device": device, "dtype": dtype}
        self.embed = nn.Embedding(vocab, dim, **place)  # N(0, 1), as in PyTorch and the study
        self.cls = None
        if pooling == "cls":
            # Zero, as in the study, if positions are added; else like a token. A norm of a zero vector multiplies its
            # gradient by 1e3, so that clipping would leave nothing of all others.
            start = torch.zeros if positions in ("sinusoid", "learned") else torch.randn
            self.cls = nn.Parameter(start(dim, **place))
        self.positions = None
        if positions == "learned":
            self.positions = nn.Parameter(torch.empty(max_length, dim, **place).normal_(std=0.02))
        # float64, so that casting to any dtype rounds only once.
        self.table = None
        if positions == "sinusoid":
            self.table = Constant(partial(sinusoids, max_length, dim, dtype=torch.float64), device)
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
            norm=norm,
            qk_norm=qk_norm,
            place=place,
        )
        self.norm = make_norm(norm, dim, **place)

    def forward(
        self, ids: Tensor, mask: Tensor | Literal[True] | None = None, segments: Tensor | Segments | None = None
    ) -> Tensor:
        if current() is not None:
            raise ValueError(
                "pooling needs the whole sequence: inside weft.parallel.context call tokens(), and pool the result of "
                "weft.parallel.unshard"
            )
        if self.pooling != "mean":
            x, at, mask, documents = self._embedded(ids, mask, segments)
            first = self.training or self.only_read
            x = self._through(x, at, mask, documents, first=first)
            return self.norm(x if first else first_tokens(x, documents))
        x, mask = self.tokens(ids, mask, segments)
        real = mask[..., None]
        return x.masked_fill(~real, 0).sum(1) / real.sum(1).clamp(min=1)  # exclude padding from the mean

    def tokens(
        self, ids: Tensor, mask: Tensor | Literal[True] | None = None, segments: Tensor | Segments | None = None
    ) -> tuple[Tensor, Tensor]:
        """All tokens (B, N, dim) and their mask (B, N), before pooling; N = S + 1 with a CLS token. Packed documents
        get their own rows, (documents, N, dim)."""
        if segments is not None:
            refuse("TextEncoder with segments")
        x, at, real, documents = self._embedded(ids, mask, segments)
        x = self.norm(self._through(x, at, real, documents))
        if documents is None:
            return x, torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if real is None else real
        if not len(documents):
            return x.new_zeros(0, 1, self.dim), torch.zeros(0, 1, dtype=torch.bool, device=x.device)
        return documents.padded_rows(x, real)

    def _embedded(
        self, ids: Tensor, mask: Tensor | Literal[True] | None, segments: Tensor | Segments | None
    ) -> tuple[Tensor, Any, Tensor | None, Segments | None]:
        """Embeddings, their places in the table of positions, the mask, and where packed documents are."""
        if mask is None and not self.padded:
            mask = True
        if segments is None:
            real = self._check(ids, mask)
            x = self.embed(ids)
            if self.cls is not None:
                if current() is not None:
                    raise ValueError("a model with a CLS token cannot be split over ranks; use pooling='mean'")
                x = torch.cat([self.cls.expand(x.shape[0], 1, -1), x], 1)
                real = torch.cat([real[:, :1], real], 1)  # CLS is real if the document's first token is
            first = first_position(x)
            # kernels are faster without a mask
            return x, slice(first, first + x.shape[1]), None if mask is True else real, None
        documents = documents_of(segments, ids)
        real = self._check(ids, mask, documents.longest)
        mask = None if mask is True else real
        if self.cls is None or not len(documents):
            return self.embed(ids), documents.ready().positions, mask, documents
        documents, source = documents.with_first()
        x = self.embed(ids.flatten()[source][None])
        return x, documents.positions, None if mask is None else mask.flatten()[source][None], documents

    def _through(
        self, x: Tensor, at: Any, mask: Tensor | None, documents: Segments | None, first: bool = False
    ) -> Tensor:
        """All blocks. With `first`, the last one returns only the first token of each document, (documents, dim)."""
        options: dict[str, Any] = {} if documents is None else {"segments": documents}
        if documents is not None and not len(documents):
            return first_tokens(x, documents) if first else x
        x = self._placed(x, at)
        *before, last = self.blocks
        for block in before:
            x = block(x, mask, **options)
        return last(x, mask, **options, **({"first": True} if first else {}))

    def _placed(self, x: Tensor, at: Any) -> Tensor:
        """x with the positions `at`, an index into the table of positions. Packed documents get their CLS here."""
        if self.cls is not None and isinstance(at, Tensor):
            x = torch.where(at[..., None] == 0, self.cls, x)  # what was embedded there gets no gradient
        table = self.positions if self.table is None else self.table(x.device)
        return self.dropout(x if table is None else x + table.to(x.dtype)[at])

    def _check(self, ids: Tensor, mask: Tensor | Literal[True] | None, longest: int | None = None) -> Tensor:
        if ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise ValueError(f"ids must be integers (B, S), got {ids.dtype} {tuple(ids.shape)}")
        extra, S = int(self.cls is not None), ids.shape[1] if longest is None else longest
        if ids.shape[1] < 1:
            raise ValueError("ids must have at least one column; use a row of zeros for an empty document")
        if S + extra > self.max_length:
            with_cls = " and the CLS token" if extra else ""
            raise ValueError(
                f"{S} tokens{with_cls} exceed max_length={self.max_length}: truncate the documents to "
                f"{self.max_length - extra}, or create the model with a larger max_length"
            )
        if mask is None or mask is True:
            return ids > 0 if mask is None else torch.ones_like(ids, dtype=torch.bool)
        if mask.dtype != torch.bool or mask.shape != ids.shape:
            raise ValueError(
                f"mask must be boolean {tuple(ids.shape)} like ids, True for real tokens; "
                f"got {mask.dtype} {tuple(mask.shape)}"
            )
        return mask
