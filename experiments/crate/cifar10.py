"""A CRATE and a ViT of the same size, from scratch on CIFAR-10.

    weft data get cifar10
    weft sweep experiments/crate/cifar10.py
    weft inspect experiments/crate/runs/cifar10/crate-62-s-s0

White-Box Transformers via Sparse Rate Reduction, https://arxiv.org/abs/2306.01129, which trains on ImageNet first and
has no such table. A CRATE of width 384 (3 d² weights per layer) and a ViT of half that width (12 d²), each for the
number of steps that fits into a minute on one H200. Both use the same recipe: Lion 2.4e-4, decay 0.5, smoothing 0.1,
crops and flips, batch 512, 5 % warm-up, cosine decay, bfloat16; the last weights are tested.
"""

from typing import Any

from weft.lab.sweep import Cell
from weft.tasks import make_config

TITLE = "CRATE and ViT from scratch on CIFAR-10"
METRIC = "accuracy"

ROWS: dict[str, dict[str, Any]] = {
    "CRATE": dict(model="crate", layers=12, heads=6, head_dim=64, dim=384, steps=2940),
    "ViT": dict(model="timm:vit_tiny_patch16_224", model_options='{"patch_size": 4}', steps=2828),
}


def cells() -> list[Cell]:
    return [
        Cell(
            row,
            "62 s",
            make_config(
                "cifar10",
                preset="lion",
                patch=4,
                batch_size=512,
                warmup=round(0.05 * settings["steps"]),
                clip=0.0,
                eval_every=settings["steps"] // 8,
                checkpoint_every=settings["steps"] // 8,
                keep=8,
                test_on="last",
                precision="bf16-mixed",
                compile=True,
                **settings,
            ),
        )  # fmt: skip
        for row, settings in ROWS.items()
    ]
