"""Table 5: Transformer-XL on WikiText-103, with its own memory or a replacement.

    weft sweep experiments/cached/table5.py --only "base/*"
    weft sweep experiments/cached/table5.py --only "base/GRC" --data data/ptb --steps 5000

Cached Transformers, https://arxiv.org/abs/2312.12742; test perplexity. Kinds: `baseline` (the last M tokens of every
layer), `MT` (learned memory tokens in front, in addition to that memory), `RMT` (instead, memory tokens that each
segment reads and writes, with gradients over two segments), `GRC` (instead, a gated recurrent cache per stream, delayed
so that no token sees its future). The paper only mentions "default configurations": base 16 layers, width 410, 10
heads, MLP 2,100, segments and memory of 150, dropout 0.1; large 18, 1,024, 16, 4,096, 384, dropout 0.2; Adam 2.5e-4
with cosine. Words with adaptive softmax (20,000, 40,000, 200,000); input and output embeddings are not tied. Text as
DATA/wikitext-103/{train,valid,test}.txt (huggingface.co/datasets/Salesforce/wikitext), or any folder with such files,
such as the Penn Treebank for a short run.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import weft
from weft.lab.sweep import Cell
from weft.layers import FeedForward, TransformerXLAttention
from weft.layers.transformer_xl import SegmentMemory
from weft.tasks import Known, TaskData, TrainConfig, make_config
from weft.tasks.streams import Streams
from weft.tasks.tokens import PARTS, Likelihoods

TITLE = "Table 5: Transformer-XL on WikiText-103"
METRIC = "perplexity"

PAPER: dict[str, dict[str, float | None]] = {
    "base": {"baseline": 24.0, "MT": 23.99, "RMT": 23.95, "GRC": 22.9},
    "large": {"baseline": 18.3, "GRC": 17.9},
}
SIZES: dict[str, dict[str, Any]] = {
    "base": dict(layers=16, dim=410, heads=10, mlp_dim=2100, max_length=150, dropout=0.1),
    "large": dict(layers=18, dim=1024, heads=16, mlp_dim=4096, max_length=384, dropout=0.2),
}
TOKENS = 10  # memory tokens of MT and RMT
CUTOFFS = (20_000, 40_000, 200_000)


class Block(nn.Module):
    def __init__(self, attention: nn.Module, dim: int, mlp_dim: int, dropout: float):
        super().__init__()
        self.attention, self.feedforward = attention, FeedForward(dim, mlp_dim, dropout=dropout)
        self.norms, self.dropout = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)]), nn.Dropout(dropout)

    def forward(self, x: Tensor, *memory: Any) -> tuple[Tensor, Any]:
        found = self.attention(self.norms[0](x), *memory)
        y, following = found if isinstance(found, tuple) else (found, None)
        x = x + self.dropout(y)
        return x + self.dropout(self.feedforward(self.norms[1](x))), following


class XL(nn.Module):
    """`model(ids, targets)`: the negative log-likelihood of every target (B, L); segments are consecutive.

    The memory, (layers, B, M, dim), or (1, B, TOKENS, dim) for RMT, is state of the model and saved with it.
    """

    remembers = True

    def __init__(self, kind: str, vocab: int, config: TrainConfig, segment: int):
        super().__init__()
        dim, self.kind, self.segment = config.dim, kind, segment
        self.fifo = kind in ("baseline", "MT")
        self.embed, self.dropout = nn.Embedding(vocab, dim), nn.Dropout(config.dropout)
        nn.init.normal_(self.embed.weight, std=dim**-0.5)
        self.tokens = nn.Parameter(torch.randn(TOKENS, dim) * 0.02) if kind in ("MT", "RMT") else None
        self.blocks = nn.ModuleList()
        for _ in range(config.layers):
            attention: nn.Module = TransformerXLAttention(
                dim, config.heads, segment if self.fifo else 0, dropout=config.dropout
            )
            if kind == "GRC":
                options: dict[str, Any] = dict(delayed=True, scope="stream", eval_update=True)
                attention = weft.CachedAttention(attention, config.cache, segment, **options)
            self.blocks.append(Block(attention, dim, config.mlp_dim, config.dropout))
        self.norm = nn.LayerNorm(dim)
        cutoffs = [c for c in CUTOFFS if c < vocab] or [max(1, vocab // 2)]
        self.head = nn.AdaptiveLogSoftmaxWithLoss(dim, vocab, cutoffs, div_value=1.0)
        self.reset()

    def reset(self) -> None:
        self.memory = torch.empty(0)

    def get_extra_state(self) -> Tensor:
        return self.memory

    def set_extra_state(self, state: Tensor) -> None:
        self.memory = state.to(self.embed.weight.device)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        found = torch.cat([self.read(part) for part in ids.split(self.segment, 1)], 1)
        self.memory = self.memory.detach()
        with torch.autocast(ids.device.type, enabled=False):  # the adaptive head sorts targets into tables
            return -self.head(found.float().flatten(0, 1), targets.flatten()).output.view_as(targets)

    def read(self, ids: Tensor) -> Tensor:
        """The vectors of one segment, (B, L, dim). Updates the memory."""
        x = self.dropout(self.embed(ids) * math.sqrt(self.embed.embedding_dim))
        (B, L), front = ids.shape, 0
        if self.tokens is not None:
            own = self.tokens.to(x.dtype).expand(B, -1, -1)
            written = self.memory[0].to(x.dtype) if self.kind == "RMT" and len(self.memory) else own
            x = torch.cat([written, x, written] if self.kind == "RMT" else [own, x], 1)
            front = TOKENS
        kept = []
        for i, block in enumerate(self.blocks):
            memory = []
            if self.fifo:
                tokens = self.memory[i].to(x.dtype) if len(self.memory) else x[:, :0]
                memory = [SegmentMemory(tokens, torch.ones(tokens.shape[:2], dtype=torch.bool, device=x.device))]
            x, following = block(x, *memory)
            kept.append(following)
        x = self.norm(x)
        if self.fifo:
            self.memory = torch.stack([memory.tokens for memory in kept])
        elif self.kind == "RMT":
            self.memory = x[None, :, front + L :]
        return x[:, front : front + L]


class TransformerXL(Streams, Likelihoods):
    def __init__(self, kind: str):
        self.kind, self.segments = kind, 2 if kind == "RMT" else 1  # the next segment reads what RMT writes
        super().__init__(f"transformer-xl-{kind.lower()}", "wikitext-103", length=150 * self.segments, pieces=0)
        self.defaults = {
            **SIZES["base"], "max_length": self.length, "cache": 0.5 if kind == "GRC" else 0.0, "clip": 0.25,
            "steps": 200_000 // self.segments, "batch_size": 60, "learning_rate": 2.5e-4, "warmup": 1000,
            "schedule": "cosine", "optimizer": "adam", "beta2": 0.999, "eps": 1e-8, "eval_every": 4000,
            "checkpoint_every": 1000, "precision": "bf16-mixed",
        }  # fmt: skip
        self.about = f"words of WikiText-103 by Transformer-XL, memory: {kind}"  # type: ignore[misc]

    def texts(self, config: TrainConfig, known: Known | None) -> tuple[list[np.ndarray], dict[str, Any]]:
        ids, code = self.ids(config, known)
        meaning = {"facts": {"vocab": len(code)}, "vocabulary": code.vocabulary, "tokenizer": code.tokenizer}
        return [ids[part] for part in PARTS], meaning

    def model(self, config: TrainConfig, data: TaskData) -> nn.Module:
        return XL(self.kind, data.facts["vocab"], config, data.length // self.segments)


TASKS = [TransformerXL(kind) for kind in PAPER["base"]]


def cells() -> list[Cell]:
    found = []
    for size, figures in PAPER.items():
        for kind, figure in figures.items():
            settings = {**SIZES[size], "max_length": SIZES[size]["max_length"] * (2 if kind == "RMT" else 1)}
            found.append(Cell(size, kind, make_config(f"transformer-xl-{kind.lower()}", **settings), figure))
    return found
