"""CIFAR-10 as a density: a decoder over 32 x 32 pixels, its sources sampled from rows above by a two-dimensional
shuffle.

    weft data get cifar10
    python -m experiments.subsampled.cifar10_generation --data data

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

from experiments.table import Row, run
from weft.layers import RelativeBias2d
from weft.models.build import encoder_blocks
from weft.tasks import Task, TaskData, get_task
from weft.tasks.base import Columns
from weft.tasks.config import TrainConfig

RECIPE: dict[str, Any] = dict(
    layers=16, heads=8, head_dim=64, dim=512, mlp_dim=2048, dropout=0.0, steps=100_000, batch_size=128, warmup=4000,
    learning_rate=2e-3, schedule="cosine", optimizer="adam", beta2=0.999, eps=1e-8, clip=1.0, augment=False,
    precision="bf16-mixed", eval_every=2000, eval_batches=20, checkpoint_every=1000,
)  # fmt: skip


class PixelModel(nn.Module):
    """`model(images)`: nats of every colour value, (B, pixels, 3)."""

    def __init__(self, side: int, config: TrainConfig, sampled: bool):
        super().__init__()
        dim, cells = config.dim, side * side
        self.colours = nn.ModuleList([nn.Embedding(256, dim) for _ in range(3)])
        self.start = nn.Parameter(torch.randn(dim) * 0.02)
        self.positions = nn.Parameter(torch.randn(cells, dim) * 0.02)
        self.bias = RelativeBias2d(config.heads, side, side)
        choice: Any = "full"
        if sampled:
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
    metric, higher_is_better, about = "bits_per_dimension", False, "a row of a table"

    def __init__(self, name: str, sampled: bool):
        self.name, self.sampled = name, sampled  # type: ignore[misc]

    def load(self, config: TrainConfig) -> TaskData:
        from weft.tasks.config import make_config

        return get_task("cifar10").load(make_config("cifar10", data=config.data, patch=1))

    def model(self, config: TrainConfig, data: TaskData) -> nn.Module:
        return PixelModel(data.train["image"].shape[-1], config, self.sampled)

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


def rows() -> list[Row]:
    sampled = {"attention": "subsampled"}  # so that the lab knows what to make dense
    return [
        Row("S0, dense", lambda: Pixels("pixels-dense", False)),
        Row("S16-L4", lambda: Pixels("pixels-sampled", True), config=sampled),
        Row("S16-L4 +FT", lambda: Pixels("pixels-finish", True), config={**sampled, "finetune_dense_at": 0.82}),
    ]


if __name__ == "__main__":
    run(
        "Subsampled, CIFAR-10 generation",
        rows(),
        about=__doc__ or "",
        metrics={"bits_per_dimension": 1},
        recipe=RECIPE,
    )
