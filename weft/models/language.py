"""A Transformer over bytes or tokens with logits at every position: causal, or bidirectional for masked modelling.

x = dropout(Embed(ids) + positions)
x = EncoderBlock_l(x, bias), l = 1 … layers
logits = LN(x) · W
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..core.decoding_state import check_crops, next_positions
from ..core.positions import Constant
from ..core.precision import precise
from ..core.segments import Segments, documents_of
from ..core.sharding import first_position, refuse
from ..layers import ALiBi, sinusoids
from ..layers.encoder import decoding_layer, make_norm
from .build import AttentionChoice, check_takes_bias, encoder_blocks
from .generate import generate

CHUNK = 8192  # tokens whose logits exist at the same time, if `targets` are given


class LanguageModel(nn.Module):
    """`model(ids, mask=None)`: ids (B, L) to logits (B, L, vocab). With `targets` (B, L), the cross-entropy (B, L) of
    each target, 0 where it is -100, without storing the logits of a long sequence.

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
        mlp_dropout: float | None = None,  # likewise
        norm: str = "layer",  # or "rms"
        qk_norm: bool = False,  # see MultiheadAttention
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
            mlp_dropout=mlp_dropout,
            norm=norm,
            qk_norm=qk_norm,
            place=place,
        )
        if self.bias is not None:
            check_takes_bias(self.blocks, "choose positions rope, learned, sinusoid or none")
        self.norm = make_norm(norm, dim, **place)
        self.scores = nn.Linear(dim, vocab, **place)
        nn.init.normal_(self.scores.weight, std=0.02)
        nn.init.zeros_(self.scores.bias)

    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        segments: Tensor | Segments | None = None,
        *,
        targets: Tensor | None = None,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        self._check(ids)
        documents = None if segments is None else documents_of(segments, ids)
        length = ids.shape[1] if documents is None else documents.longest
        if length > self.max_length:
            raise ValueError(
                f"{length} tokens exceed max_length={self.max_length}: create the model with a larger max_length"
            )
        if documents is None:
            first = first_position(ids)
            at: Any = slice(first, first + length)
        else:
            at = documents.positions
        x = self._embedded(ids, at)
        for block in self.blocks:
            x = block(x, mask, self.bias, segments=documents)
        x = self.norm(x)
        return self.scores(x) if targets is None else self._losses(x, targets, label_smoothing)

    def _losses(self, x: Tensor, targets: Tensor, label_smoothing: float) -> Tensor:
        """Cross-entropy (B, L), CHUNK tokens of each row at a time; the backward pass computes the logits again."""

        def losses(x: Tensor, targets: Tensor) -> Tensor:
            logits, wanted = precise(self.scores(x)).flatten(0, 1), targets.flatten()
            each = F.cross_entropy(logits, wanted, reduction="none", label_smoothing=label_smoothing)
            return each.view_as(targets)

        if targets.shape != x.shape[:2]:
            raise ValueError(f"targets must be (B, L) = {tuple(x.shape[:2])} like ids, got {tuple(targets.shape)}")
        if x.shape[1] <= CHUNK:
            return losses(x, targets)
        parts = zip(x.split(CHUNK, 1), targets.split(CHUNK, 1), strict=True)
        return torch.cat([checkpoint(losses, *part, use_reentrant=False) for part in parts], 1)

    def _embedded(self, ids: Tensor, at: Any) -> Tensor:
        """Tokens with the positions `at`, an index into the table of positions."""
        x = self.embed(ids)
        table = self.positions if self.table is None else self.table(x.device)
        return self.dropout(x if table is None else x + table[at].to(x.dtype))

    # Generation: the state is a list with the state of every block.

    def start(self, batch: int, *, max_length: int | None = None, history: int = 0) -> list[Any]:
        """The state before the first token; see `Attention.start`."""
        self._check_causal()
        return [layer.start(batch, max_length=max_length, history=history) for layer in self._layers()]

    def prefill(
        self, ids: Tensor, mask: Tensor | None = None, state: list[Any] | None = None, max_length: int | None = None
    ) -> tuple[Tensor, list[Any]]:
        """Process prompts ids (B, L), or the next L tokens after `state`; returns logits (B, L, vocab) and the next
        state. Padding, where `mask` (B, L) is False, belongs on the left."""
        x, state = self._prefilled(ids, mask, state, max_length)
        return self.scores(self.norm(x)), state

    def _prefilled(
        self, ids: Tensor, mask: Tensor | None, state: list[Any] | None, max_length: int | None = None
    ) -> tuple[Tensor, list[Any]]:
        self._check(ids)
        state = self.start(ids.shape[0], max_length=max_length) if state is None else state
        x, states = self._embedded(ids, self._next(state, ids.shape[1])), []
        for block, inner in zip(self.blocks, state, strict=True):
            x, inner = block.prefill(x, mask, self.bias, inner, max_length)  # type: ignore[operator]
            states.append(inner)
        return x, states

    def step(self, ids: Tensor, state: list[Any], mask: Tensor | None = None) -> tuple[Tensor, list[Any]]:
        """Process one token per row, ids (B, 1); returns logits (B, 1, vocab) and the next state."""
        self._check(ids)
        x, states = self._embedded(ids, self._next(state, 1)), []
        for block, inner in zip(self.blocks, state, strict=True):
            x, inner = block.step(x, inner, mask, self.bias)  # type: ignore[operator]
            states.append(inner)
        return self.scores(self.norm(x)), states

    def reorder(self, state: list[Any], rows: Tensor) -> list[Any]:
        """The state with its rows in another order, for beam search; see `Attention.reorder`."""
        return [layer.reorder(inner, rows) for layer, inner in zip(self._layers(), state, strict=True)]

    def crop(self, state: list[Any], n: int) -> list[Any]:
        """The state without its last n tokens; see `Attention.crop`."""
        check_crops(state, n)
        return [layer.crop(inner, n) for layer, inner in zip(self._layers(), state, strict=True)]

    def generate(
        self,
        ids: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: int | Sequence[int] | None = None,
        stream: Callable[[Tensor], Any] | None = None,
        *,
        mask: Tensor | None = None,
        generator: torch.Generator | None = None,
        seed: int | None = None,
    ) -> Tensor:
        """Continue the prompts ids (B, L); returns ids (B, L + new). See `weft.models.generate.generate`."""
        chosen = (temperature, top_k, top_p, stop, stream)
        return generate(self, ids, max_new_tokens, *chosen, mask=mask, generator=generator, seed=seed)

    def _check(self, ids: Tensor) -> None:
        if ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise ValueError(f"ids must be integers (B, L), got {ids.dtype} {tuple(ids.shape)}")

    def _layers(self) -> list[Any]:
        return [decoding_layer(block.attention) for block in self.blocks]  # type: ignore[arg-type]

    def _next(self, state: list[Any], n: int) -> Tensor:
        if not isinstance(state, list):
            raise TypeError(f"state must be the second result of prefill() or step(), got {type(state).__name__}")
        first = state[0] if state else None
        while isinstance(first, list):  # mixed attention
            first = first[0]
        at = next_positions(first, n, self.embed.weight.device)
        if first is not None and first.place is None and first.count + n > self.max_length:
            raise ValueError(
                f"{first.count + n} tokens exceed max_length={self.max_length}: create the model with a larger "
                "max_length, or use generate(), which drops the oldest tokens"
            )
        return at

    def _check_causal(self) -> None:
        if not self.causal:
            raise ValueError("a model with causal=False cannot generate: train one with causal=True")


class TwoSegments(LanguageModel):
    """`model(ids, kinds)`: bidirectional, with an embedding for each of two segments.

    `kinds` (B, L) is 1 or 2, and 0 for padding. Both segments attend to each other, and positions run through both.
    """

    def __init__(self, vocab: int, **options: Any):
        super().__init__(vocab, causal=False, **options)
        self.kind = nn.Embedding(3, self.embed.embedding_dim, padding_idx=0).to(self.embed.weight)
        nn.init.normal_(self.kind.weight, std=0.02)

    def forward(self, ids: Tensor, kinds: Tensor) -> Tensor:  # type: ignore[override]
        return self.scores(self.tokens(ids, kinds))

    def tokens(self, ids: Tensor, kinds: Tensor) -> Tensor:
        """The tokens after the last block, (B, L, dim)."""
        refuse("TwoSegments")
        x = self._embedded(ids, slice(0, ids.shape[1])) + self.kind(kinds)
        for block in self.blocks:
            x = block(x, kinds > 0, self.bias)
        return self.norm(x)


class SegmentClassifier(nn.Module):
    """`model(ids, kinds)` -> logits (B, classes): the mean of the real tokens of `TwoSegments`, then a linear layer."""

    def __init__(self, vocab: int, classes: int, *, dropout: float = 0.1, **options: Any):
        super().__init__()
        self.encoder = TwoSegments(vocab, dropout=dropout, **options)
        del self.encoder.scores
        embed = self.encoder.embed
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(embed.embedding_dim, classes).to(embed.weight)

    def forward(self, ids: Tensor, kinds: Tensor) -> Tensor:
        real = (kinds > 0)[..., None]
        x = self.encoder.tokens(ids, kinds).masked_fill(~real, 0)
        return self.head(self.dropout(x.sum(1) / real.sum(1).clamp(min=1)))
