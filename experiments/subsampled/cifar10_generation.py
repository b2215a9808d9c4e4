"""CIFAR-10 density estimation: a decoder over 32 x 32 pixels of three tokens, its sources sampled from rows above by a
two-dimensional shuffle.

    weft data get cifar10
    weft sweep experiments/subsampled/cifar10_generation.py

The Information Pathways Hypothesis, https://arxiv.org/abs/2306.01705 (a table that we could not access; other listings
give 2.774 bits per dimension as its best value). 16 layers, 2-D relative bias, 4 windows of 8 rows, σ = 0.25 of the
side, 100,000 steps of 128, learning rate 2e-3 after 4,000 steps of warm-up, cosine decay, no dropout, distribution
augmentation (`cifar10-density-augmented`). The width is not given; Table 7 fixes it: a forward pass over 3,072 tokens
in 16 layers of width 1,024 costs 23.8 exaFLOP for 100,000 steps of 128. The dense finish takes the last 18 % of the
steps.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from weft.lab.sweep import Cell
from weft.layers import RelativeBias2d
from weft.models.language import LanguageModel
from weft.tasks import TaskData, TrainConfig, make_config
from weft.tasks.base import block_options
from weft.tasks.density import AugmentedDensity

TITLE = "CIFAR-10 generation, sampled in two dimensions"
METRIC = "bits_per_dimension"

RECIPE: dict[str, Any] = dict(
    layers=16, heads=8, head_dim=128, dim=1024, mlp_dim=4096, dropout=0.0, steps=100_000, batch_size=128, warmup=4000,
    learning_rate=2e-3, schedule="cosine", optimizer="adam", beta2=0.999, eps=1e-8, clip=1.0, positions="none",
    precision="bf16-mixed", checkpoint_activations=True, eval_every=2000, eval_batches=20, checkpoint_every=1000,
)  # fmt: skip
SAMPLED = '{"layout": [32, 32], "channels": 3, "windows": 4, "sigma": 0.25}'


class Pixels(AugmentedDensity):
    """Positions by a relative bias over pixels and colours."""

    defaults = RECIPE

    def model(self, config: TrainConfig, data: TaskData) -> nn.Module:
        model = LanguageModel(data.facts["vocab"], max_length=data.length, positions="none", **block_options(config))
        model.bias = RelativeBias2d(config.heads, self.side, self.side, channels=3)
        return model


TASKS = [Pixels("cifar10-pixels-2d", "bits per dimension of CIFAR-10 with a 2-D relative bias", 32)]


def cells() -> list[Cell]:
    sampled = dict(attention="subsampled", attention_options=SAMPLED)
    rows: dict[str, dict[str, Any]] = {
        "S0, dense": {},
        "S16-L4": sampled,
        "S16-L4 +FT": {**sampled, "finetune_dense_at": 0.82},
    }
    note = "best value of the paper, from other listings: 2.774"
    return [Cell(row, "CIFAR-10", make_config("cifar10-pixels-2d", **how), note=note) for row, how in rows.items()]
