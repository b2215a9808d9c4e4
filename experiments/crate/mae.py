"""CRATE as a masked autoencoder on CIFAR-10, then a linear probe and fine-tuning of its encoder.

    weft data get cifar10
    weft sweep experiments/crate/mae.py

From the authors' code, not the paper (White-Box Transformers via Sparse Rate Reduction,
https://arxiv.org/abs/2306.01129). Pre-training hides three quarters of the patches (AdamW, no labels). The probe
trains one linear layer on the frozen encoder; fine-tuning trains all of it as published (AdamW, learning rate 5e-5,
decay 0.01, crops, flips and RandAugment with n = 2, m = 14), but at 32 pixels. Both start from the pre-trained
run; its ten minutes and the 2,000 steps of 512 are our choice. "not pre-trained" is fine-tuning from random weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weft.lab.sweep import Cell
from weft.models import CRATEMAE
from weft.models.crate_mae import normalise, random_patches
from weft.models.image import Normalised
from weft.tasks import TaskData, TrainConfig, make_config
from weft.tasks.base import Columns, crate_options
from weft.tasks.cifar import CIFAR10

TITLE = "CRATE as a masked autoencoder on CIFAR-10"
METRIC = "accuracy"


def autoencoder(config: TrainConfig, data: TaskData) -> CRATEMAE:
    options: dict[str, Any] = {key: value for key, value in crate_options(config).items() if key != "dropout"}
    return CRATEMAE(image_size=data.facts["size"], patch=config.patch, **options)


SIZE: dict[str, Any] = dict(model="crate", layers=12, heads=6, head_dim=64, dim=384, patch=4)


class Losses(nn.Module):
    """The autoencoder's loss of every image (B,)."""

    def __init__(self, mae: CRATEMAE):
        super().__init__()
        self.mae = mae

    def forward(self, images: Tensor, hidden: Tensor) -> Tensor:
        _, prediction, _ = self.mae(images, hidden)
        error = (prediction.float() - normalise(self.mae.patches.cut(images))).pow(2).mean(-1)
        return (error * hidden).sum(1) / hidden.sum(1)


class Pretraining(CIFAR10):
    """Reconstruct hidden patches, without labels."""

    defaults = {**CIFAR10.defaults, **SIZE}
    name, about = "cifar10-mae", "reconstruct hidden patches of CIFAR-10 with CRATE's masked autoencoder"
    metric, higher_is_better = "loss", False

    def model(self, config: TrainConfig, data: TaskData) -> nn.Module:
        return Normalised(Losses(autoencoder(config, data)), data.facts["mean"], data.facts["std"])

    def batch(self, rows: Columns, config: TrainConfig, generator: torch.Generator, training: bool) -> Columns:
        """With the patches to hide. Compiled code would draw others than eager code, and could not be compared."""
        batch = super().batch(rows, config, generator, training)
        B, _, side, _ = batch["image"].shape
        hidden = random_patches(B, (side // config.patch) ** 2, 0.75, batch["image"].device, generator)
        return {**batch, "hidden": hidden}

    def loss(self, model: nn.Module, batch: Columns, config: TrainConfig) -> Tensor:
        return model(batch["image"], batch["hidden"]).mean()

    def score(self, model: nn.Module, batch: Columns) -> dict[str, Tensor]:
        loss = model(batch["image"], batch["hidden"])
        return {"loss": loss, "count": torch.ones_like(loss)}

    def summary(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {"loss": sums["loss"] / sums["count"]}


class Classifier(CIFAR10):
    """The encoder of a pre-trained run with a new head: a linear probe, or full fine-tuning."""

    defaults = {**CIFAR10.defaults, **SIZE}

    def __init__(self, probe: bool):
        self.probe, self.name = probe, f"cifar10-mae-{'probe' if probe else 'finetune'}"  # type: ignore[misc]
        self.about = "a linear probe of the autoencoder" if probe else "the autoencoder, fine-tuned"  # type: ignore[misc]

    def model(self, config: TrainConfig, data: TaskData) -> nn.Module:
        model = autoencoder(config, data).classifier(data.facts["classes"], pooling="mean")
        if self.probe:
            model.new_head(data.facts["classes"], probe=True)
        return Normalised(model, data.facts["mean"], data.facts["std"])

    def begin(self, model: nn.Module, weights: Columns) -> bool:
        encoder = {k.replace("model.mae.", "model."): v for k, v in weights.items() if k.startswith("model.mae.")}
        own = model.state_dict()
        model.load_state_dict({**own, **{k: v for k, v in encoder.items() if k in own and "norm" not in k.split(".")}})
        return bool(encoder)  # otherwise it is a run of the same model


TASKS = [Pretraining(), Classifier(probe=True), Classifier(probe=False)]


def cells() -> list[Cell]:
    same: dict[str, Any] = dict(batch_size=512, optimizer="adamw", clip=0.0, precision="bf16-mixed", compile=True)
    pretrained = make_config(
        "cifar10-mae",
        **{**same, "compile": False},  # as its result was measured
        time_budget=10,
        steps=10_000,  # only for the fractions of warm-up, evaluations and checkpoints
        warmup=500,
        checkpoint_every=500,
        learning_rate=8e-5,  # with 2e-4 and 5e-4, all encodings become equal
        beta2=0.95,
        weight_decay=0.05,
    )
    found = [Cell("pre-training", "CIFAR-10", pretrained)]
    randaugment = "rand-m5-n2-p1"  # 14 of 30 is 5 of timm's 10
    for row, task, rate, augmentation, start in (
        ("probe", "cifar10-mae-probe", 1e-3, "", "pre-training-cifar-10"),
        ("fine-tuned", "cifar10-mae-finetune", 5e-5, randaugment, "pre-training-cifar-10"),
        ("not pre-trained", "cifar10-mae-finetune", 5e-5, randaugment, ""),
    ):
        options: dict[str, Any] = dict(learning_rate=rate, weight_decay=0.01, augmentation=augmentation)
        config = make_config(task, **same, steps=2000, warmup=100, **options)
        found.append(Cell(row, "CIFAR-10", config, start=start))
    return found
