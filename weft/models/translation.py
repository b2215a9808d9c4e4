"""An encoder-decoder Transformer for translation, with beam search.

Vaswani et al., Attention Is All You Need, https://arxiv.org/abs/1706.03762, pre-norm

    memory = LN(EncoderBlock_l(√dim · Embed(source) + sinusoids)), l = 1 … layers
    y      = y + SelfAttn(LN(y));  y = y + CrossAttn(LN(y), memory);  y = y + FFN(LN(y))
    logits = LN(y) · Embedᵀ                                       one table for source, target and output

Beam search keeps the keys and values of earlier tokens, and those of the memory. A finished translation of n tokens
has the score log p / n^length_penalty. The search ends when this is better than that of every unfinished one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..core.softmax import without_cudnn
from ..layers import EncoderBlock, MultiheadAttention, sinusoids
from ..layers.encoder import NORM_EPS

PAD, BEGIN, END = 0, 1, 2


class DecoderBlock(nn.Module):
    def __init__(self, dim: int, heads: int, mlp_dim: int, dropout: float):
        super().__init__()
        self.cross_norm = nn.LayerNorm(dim, eps=NORM_EPS)
        self.cross = MultiheadAttention(dim, heads, dropout=dropout, qkv_bias=True, out_bias=True)
        self.cross.is_cross_attention = True
        attention = MultiheadAttention(dim, heads, causal=True, dropout=dropout, qkv_bias=True, out_bias=True)
        self.block = EncoderBlock(dim, attention, mlp_dim=mlp_dim, dropout=dropout)

    def forward(self, y: Tensor, source: tuple[Tensor, Tensor], mask: Tensor | None = None) -> Tensor:
        """`source` is the memory and which of its tokens are real. `mask`, of y's, matters only for inspection:
        padding follows the real tokens, which do not see it."""
        memory, real = source
        own = self.block.attention(self.block.attention_norm(y), mask)
        return self._finish(y, own, self.keys(memory), real)

    def step(self, y: Tensor, keys: tuple[Tensor, Tensor], real: Tensor, state: Any) -> tuple[Tensor, Any]:
        """One token y (B, 1, dim)."""
        attention: Any = self.block.attention
        own, state = attention.step(self.block.attention_norm(y), state)
        return self._finish(y, own, keys, real), state

    def keys(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the memory."""
        _, k, v = self.cross.project(memory[:, :1], memory)
        return k, v

    def _finish(self, y: Tensor, own: Tensor, keys: tuple[Tensor, Tensor], real: Tensor) -> Tensor:
        y = y + self.block.dropout(own)
        project: Any = self.cross.q
        q = torch.unflatten(project(self.cross_norm(y)), -1, (self.cross.heads, -1)).transpose(1, 2)
        y = y + self.block.dropout(self.cross.merge(self.cross.attention(q, *keys, real)))
        return y + self.block.dropout(self.block.feedforward(self.block.feedforward_norm(y)))


class Translator(nn.Module):
    """`model(source, target)` -> logits (B, T, vocab) of the pieces after each of target's; `model(source)` -> ids of a
    translation by beam search, (B, T), END and PAD after its end. Ids are 0 for padding."""

    def __init__(
        self,
        vocab: int,
        *,
        dim: int = 512,
        heads: int = 4,
        layers: int = 6,
        mlp_dim: int = 1024,
        dropout: float = 0.3,
        beam: int = 5,
        length_penalty: float = 1.0,
    ):
        super().__init__()
        if beam < 1 or 2 * beam > vocab:
            raise ValueError(f"beam must be between 1 and half the vocabulary, {vocab // 2}, got {beam}")
        self.beam, self.length_penalty = beam, length_penalty
        self.embed = nn.Embedding(vocab, dim, padding_idx=PAD)
        nn.init.normal_(self.embed.weight, std=dim**-0.5)
        self.encoder = nn.ModuleList()
        for _ in range(layers):
            attention = MultiheadAttention(dim, heads, dropout=dropout, qkv_bias=True, out_bias=True)
            self.encoder.append(EncoderBlock(dim, attention, mlp_dim=mlp_dim, dropout=dropout))
        self.decoder = nn.ModuleList([DecoderBlock(dim, heads, mlp_dim, dropout) for _ in range(layers)])
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(dim, eps=NORM_EPS), nn.LayerNorm(dim, eps=NORM_EPS)
        self.dropout = nn.Dropout(dropout)

    def forward(self, source: Tensor, target: Tensor | None = None) -> Tensor:
        if target is None:
            return self.translate(source)
        with without_cudnn(source):  # nearly every batch has new lengths
            read, y = (self.read(source), source != PAD), self._tokens(target)
            mask = None if self.training else target != PAD  # causal attention without a mask is faster
            for block in self.decoder:
                y = block(y, read, mask)
        return self._scores(y)

    def read(self, source: Tensor) -> Tensor:
        x, real = self._tokens(source), source != PAD
        for block in self.encoder:
            x = block(x, real)
        return self.encoder_norm(x)

    @torch.no_grad()
    def translate(self, source: Tensor, beam: int = 0, length_penalty: float | None = None, longest: int = 0) -> Tensor:
        """The best translation found, at most `longest` pieces, by default 10 more than 1.5 times the source."""
        K, B, device = beam or self.beam, source.shape[0], source.device
        power = self.length_penalty if length_penalty is None else length_penalty
        # The limit of a line does not depend on the padding, which comes from other lines.
        most = source.new_full((B,), longest) if longest else 3 * (source != PAD).sum(1) // 2 + 10
        longest = longest or 3 * source.shape[1] // 2 + 10
        memory, real = self.read(source).repeat_interleave(K, 0), (source != PAD).repeat_interleave(K, 0)
        keys = [block.keys(memory) for block in self.decoder]  # type: ignore[operator]
        layers: list[Any] = [block.block.attention for block in self.decoder]  # type: ignore[union-attr]
        state = [layer.start(B * K, max_length=longest) for layer in layers]
        total = torch.full((B, K), -torch.inf, device=device)
        total[:, 0] = 0.0
        found = source.new_full((B, K, longest), PAD)
        best, best_score = found[:, 0].clone(), torch.full((B,), -torch.inf, device=device)
        over = torch.zeros(B, dtype=torch.bool, device=device)  # a finished line is better than all unfinished ones
        token = source.new_full((B * K, 1), BEGIN)
        first = torch.arange(B, device=device)[:, None] * K
        for t in range(longest):
            y = self._tokens(token, t)
            for i, block in enumerate(self.decoder):
                y, state[i] = block.step(y, keys[i], real, state[i])  # type: ignore[operator]
            p = self._scores(y)[:, 0].float().log_softmax(-1)
            p[:, [PAD, BEGIN]] = -torch.inf
            score, at = (total[..., None] + p.view(B, K, -1)).flatten(1).topk(2 * K)  # at most K of them are END
            row, piece = at // p.shape[1], at % p.shape[1]
            lines = found.gather(1, row[..., None].expand(-1, -1, longest))
            lines[:, :, t] = piece
            ends = piece == END
            final = torch.where(ends & (torch.arange(2 * K, device=device) < K), score / (t + 1) ** power, -torch.inf)
            top, which = final.max(1)
            better = (top > best_score) & ~over
            best = torch.where(better[:, None], lines[torch.arange(B, device=device), which], best)
            best_score = torch.where(better, top, best_score)
            go = ends.long().sort(dim=1, stable=True).indices[:, :K]  # the best K that have not ended
            total, token = score.gather(1, go), piece.gather(1, go).view(-1, 1)
            found = lines.gather(1, go[..., None].expand(-1, -1, longest))
            last = ~over & (t + 1 == most)
            best = torch.where((last & (best_score == -torch.inf))[:, None], found[:, 0], best)
            over = over | last | (total[:, 0] / (t + 1) ** power <= best_score)
            if bool(over.all()):
                break
            rows = (first + row.gather(1, go)).flatten()
            state = [layer.reorder(one, rows) for layer, one in zip(layers, state, strict=True)]
        return best

    def _tokens(self, ids: Tensor, start: int = 0) -> Tensor:
        width, L = self.embed.embedding_dim, ids.shape[1]
        places = sinusoids(start + L, width, device=ids.device)[start:]
        return self.dropout(math.sqrt(width) * self.embed(ids) + places)

    def _scores(self, y: Tensor) -> Tensor:
        return self.decoder_norm(y) @ self.embed.weight.T
