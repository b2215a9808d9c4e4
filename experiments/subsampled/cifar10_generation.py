"""CIFAR-10 as a density: a decoder over 32 x 32 pixels, its sources sampled from rows above by a two-dimensional
shuffle.

    weft data get cifar10
    weft sweep experiments/subsampled/cifar10_generation.py

The Information Pathways Hypothesis, https://arxiv.org/abs/2306.01705 (a table of its body that we have not seen; its
best figure, by other listings, is 2.774 bits per dimension). 16 layers, 2-D relative bias, 4 windows of 8 rows, σ =
0.25 of the side, 100,000 steps of 128, rate 2e-3 after 4,000 of warm-up, cosine, no dropout. How colours become tokens
and how wide the model is, is not known: here a pixel is a token of width 512, its three colours predicted one after
the other, and there is no distribution augmentation. The dense finish takes the last 18 % of the steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.lab.sweep import Cell
from weft.layers import RelativeBias2d
from weft.models.build import encoder_blocks
from weft.tasks import Task, TaskData, TrainConfig, get_task, make_config
from weft.tasks.base import Columns

TITLE = "CIFAR-10 generation, sampled in two dimensions"
METRIC = "bits_per_dimension"

RECIPE: dict[str, Any] = dict(
    layers=16, heads=8, head_dim=64, dim=512, mlp_dim=2048, dropout=0.0, steps=100_000, batch_size=128, warmup=4000,
    learning_rate=2e-3, schedule="cosine", optimizer="adam", beta2=0.999, eps=1e-8, clip=1.0,
    precision="bf16-mixed", eval_every=2000, eval_batches=20, checkpoint_every=1000,
)  # fmt: skip


class PixelModel(nn.Module):
    """`model(images)`: nats of every colour value, (B, pixels, 3)."""

    def __init__(self, side: int, config: TrainConfig):
        super().__init__()
        dim, cells = config.dim, side * side
        self.colours = nn.ModuleList([nn.Embedding(256, dim) for _ in range(3)])
        self.start = nn.Parameter(torch.randn(dim) * 0.02)
        self.positions = nn.Parameter(torch.randn(cells, dim) * 0.02)
        self.bias = RelativeBias2d(config.heads, side, side)
        choice: Any = "full"
        if config.attention == "subsampled":
            choice = ("subsampled", {"layout": (side, side), "windows": (4, 1), "sigma": 0.25})
        self.blocks = encoder_blocks(
            config.layers,
            choice,
            dim,
            config.heads,
            options=None,
            head_dim=config.head_dim,
            causal=True,
            max_length=cells,
            mlp_dim=config.mlp_dim,
            dropout=config.dropout,
            attention_dropout=0.0,
            place={},
        )
        self.norm = nn.LayerNorm(dim)
        self.known = nn.ModuleList([nn.Embedding(256, dim) for _ in range(2)])  # red for green, both for blue
        self.scores = nn.ModuleList([nn.Linear(dim, 256) for _ in range(3)])

    def forward(self, images: Tensor) -> Tensor:
        values = images.flatten(2).transpose(1, 2).long()  # (B, pixels, 3)
        x = sum(embed(values[..., c]) for c, embed in enumerate(self.colours))
        x = torch.cat([self.start.to(x.dtype).expand(x.shape[0], 1, -1), x[:, :-1]], 1) + self.positions
        for block in self.blocks:
            x = block(x, None, self.bias)
        x, found = self.norm(x), []
        for c, scores in enumerate(self.scores):
            found.append(F.cross_entropy(scores(x).float().transpose(1, 2), values[..., c], reduction="none"))
            if c < 2:
                x = x + self.known[c](values[..., c])
        return torch.stack(found, -1)


class Pixels(Task):
    name, about = "cifar10-pixel-density", "bits per dimension of CIFAR-10, a token for every pixel"
    metric, higher_is_better, defaults = "bits_per_dimension", False, RECIPE

    def load(self, config: TrainConfig) -> TaskData:
        return get_task("cifar10").load(make_config("cifar10", data=config.data, patch=1))

    def model(self, config: TrainConfig, data: TaskData) -> nn.Module:
        return PixelModel(data.train["image"].shape[-1], config)

    def inputs(self, batch: Columns) -> tuple[Tensor, ...]:
        return (batch["image"],)

    def loss(self, model: nn.Module, batch: Columns, config: TrainConfig) -> Tensor:
        return model(batch["image"]).mean()

    def score(self, model: nn.Module, batch: Columns) -> dict[str, Tensor]:
        found = model(batch["image"]).flatten(1)
        return {"loss": found.sum(1), "count": torch.full_like(found[:, 0], found.shape[1])}

    def summary(self, sums: Mapping[str, float]) -> dict[str, float]:
        loss = sums["loss"] / sums["count"]
        return {"loss": loss, "bits_per_dimension": loss / math.log(2)}


TASKS = [Pixels()]


def cells() -> list[Cell]:
    rows: dict[str, dict[str, Any]] = {
        "S0, dense": {},
        "S16-L4": dict(attention="subsampled"),
        "S16-L4 +FT": dict(attention="subsampled", finetune_dense_at=0.82),
    }
    note = "the paper's best, by other listings: 2.774"
    return [Cell(row, "CIFAR-10", make_config("cifar10-pixel-density", **how), note=note)
            for row, how in rows.items()]  # fmt: skip
