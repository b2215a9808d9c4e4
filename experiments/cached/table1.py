"""Table 1: ImageNet-1k with and without a gated recurrent cache around every attention.

    python -m experiments.cached.table1 --data data --rows PVT-Tiny

Cached Transformers, https://arxiv.org/abs/2312.12742: 224 pixels, 300 epochs, ratio 0.5, as many slots as tokens,
weight decay 0.05, cosine; batch and rate are the hosts' (1,024 and 1e-3 here). Pictures in data/imagenet/{train,val}
(image-net.org, after registration). The paper augments as timm does (colour jitter and more), this file only crops and
mirrors: compare plain with cached, not with the paper's figures. `--source cifar10` in place of ImageNet, `--size 32`.
"""

from __future__ import annotations

import argparse

from experiments.cached.models import cached, plain
from experiments.images import Images, Make
from experiments.table import Row, run

# top-1 and top-5, plain and cached
PAPER = {
    "ViT-S": (79.9, 95.0, 81.3, 95.5),
    "PVT-Tiny": (75.1, 92.3, 78.4, 94.2),
    "PVT-Small": (79.9, 95.0, 81.8, 95.9),
    "PVT-Medium": (81.2, 95.7, 83.0, 96.4),
    "Swin-T": (81.2, 95.5, 82.1, 95.9),
    "PVTv2-B2": (82.0, 95.9, 82.6, 96.2),
    "PVTv2-B3": (83.2, 96.3, 83.7, 96.4),
    "PVTv2-B4": (83.6, 96.3, 84.1, 96.6),
}
RECIPE = dict(
    epochs=300, batch_size=1024, optimizer="adamw", learning_rate=1e-3, weight_decay=0.05, schedule="cosine",
    warmup=6250, precision="bf16-mixed", compile=True, eval_every=1250, checkpoint_every=1250,
)  # fmt: skip
METRICS = {"accuracy": 100, "top5": 100}


def row(name: str, make: Make, source: str, size: int, table: str, **paper: float) -> Row:
    slug = f"{table}-{name}".lower().replace(" ", "-")
    return Row(name, lambda: Images(slug, make, source=source, size=size), paper=paper)


def rows(source: str = "imagenet", size: int = 224) -> list[Row]:
    found = []
    for name, (top1, top5, with_cache1, with_cache5) in PAPER.items():
        found.append(row(name, plain(name), source, size, "cached1", accuracy=top1, top5=top5))
        found.append(
            row(f"{name} (Cached)", cached(name), source, size, "cached1", accuracy=with_cache1, top5=with_cache5)
        )
    return found


def sources(arguments: list[str] | None = None) -> tuple[str, int, list[str]]:
    """--source and --size; the rest is the table's."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--source", default="imagenet")
    parser.add_argument("--size", type=int, default=224)
    given, rest = parser.parse_known_args(arguments)
    return given.source, given.size, rest


if __name__ == "__main__":
    source, size, rest = sources()
    run("Cached, Table 1", rows(source, size), about=__doc__ or "", metrics=METRICS, recipe=RECIPE, arguments=rest)
