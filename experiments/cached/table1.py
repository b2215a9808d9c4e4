"""Table 1: ImageNet-1k with and without a gated recurrent cache around every attention.

    weft sweep experiments/cached/table1.py --only "PVT-Tiny/*"
    weft train cifar10 --image-size 32 --model pvt-tiny --cache 0.5          a cached model on CIFAR-10

Cached Transformers, https://arxiv.org/abs/2312.12742; data and recipe are in hosts.py.
"""

from hosts import HOSTS, host

from weft.lab.sweep import Cell

TITLE = "Table 1: ImageNet-1k, plain and cached"
METRIC = "accuracy"

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


def cells() -> list[Cell]:
    return [
        Cell(name, column, host(name, ratio), PAPER[name][i], note=f"top-5 in the paper: {PAPER[name][i + 1]}")
        for name in HOSTS
        for column, ratio, i in (("plain", 0.0, 0), ("cached", 0.5, 2))
    ]
