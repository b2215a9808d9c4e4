"""Tiny-ImageNet-50 at 64 pixels: ViT, Swin and PVT from scratch, plain and with a cache, ten minutes each.

    weft sweep experiments/cached/tiny_imagenet.py

Cached Transformers, https://arxiv.org/abs/2312.12742, whose image models train on ImageNet (`table1.py`).
Models and caches as there, with patches of 8 (ViT) and windows of 4 (Swin) because of the smaller images. Each trains
for as many steps as fit into ten minutes: the cached models get fewer. AdamW 5e-4, batch 256, 5 % warm-up, cosine,
smoothing 0.1, crops and flips. Images in data/tiny-imagenet-50.parquet (`weft/tasks/tiny_imagenet.py`).
"""

from typing import Any

from hosts import host

from weft.lab.sweep import Cell

TITLE = "Tiny-ImageNet-50 in ten minutes, plain and cached"
METRIC = "accuracy"

ROWS: dict[str, dict[str, Any]] = {
    "ViT-S": dict(model_options='{"patch_size": 8}'),
    "Swin-T": dict(model_options='{"window_size": 4}'),
    "PVT-Tiny": {},
}


def cells() -> list[Cell]:
    recipe: dict[str, Any] = dict(
        task="tiny-imagenet-50", time_budget=10, steps=1000, warmup=50, eval_every=100, checkpoint_every=100,
        batch_size=256, learning_rate=5e-4, label_smoothing=0.1, augmentation="",
    )  # fmt: skip
    return [
        Cell(row, column, host(row, ratio, **recipe, **settings))
        for row, settings in ROWS.items()
        for column, ratio in (("plain", 0.0), ("cached", 0.5))
    ]
