"""A CRATE and a ViT of the same size, from scratch on CIFAR-10 and Tiny-ImageNet-50, ten minutes each.

    weft data get cifar10
    weft sweep experiments/crate/cifar10.py
    weft inspect experiments/crate/runs/cifar10/crate-cifar-10-s0

White-Box Transformers via Sparse Rate Reduction, https://arxiv.org/abs/2306.01129, which trains on ImageNet first and
has no such table. A CRATE of width 384 (3 d² weights per layer) and a ViT of half that width (12 d²), each for the
number of steps that fits into ten minutes. 64 patches, of 4 or 8 pixels. Both use the same recipe: Lion 2.4e-4,
decay 0.5, smoothing 0.1, crops and flips, batch 512, 5 % warm-up, cosine decay, bfloat16; the last weights are tested.
Tiny-ImageNet-50 (`weft/tasks/tiny_imagenet.py`) is read from data/tiny-imagenet-50.parquet.
"""

from typing import Any

from weft.lab.sweep import Cell
from weft.tasks import make_config

TITLE = "CRATE and ViT from scratch in ten minutes"
METRIC = "accuracy"

COLUMNS = {"CIFAR-10": ("cifar10", 4), "Tiny-ImageNet-50": ("tiny-imagenet-50", 8)}


def models(patch: int) -> dict[str, dict[str, Any]]:
    return {
        "CRATE": dict(model="crate", layers=12, heads=6, head_dim=64, dim=384),
        "ViT": dict(model="timm:vit_tiny_patch16_224", model_options=f'{{"patch_size": {patch}}}'),
    }


def cells() -> list[Cell]:
    return [
        Cell(
            row,
            column,
            make_config(
                task,
                preset="lion",
                time_budget=10,
                steps=1000,  # only for the fractions of warm-up, evaluations and checkpoints
                warmup=50,
                eval_every=125,
                checkpoint_every=125,
                keep=8,
                patch=patch,
                batch_size=512,
                clip=0.0,
                test_on="last",
                precision="bf16-mixed",
                compile=True,
                **settings,
            ),
        )
        for column, (task, patch) in COLUMNS.items()
        for row, settings in models(patch).items()
    ]
