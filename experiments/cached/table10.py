"""Table 10: PVT-Tiny by the ratio of cached channels.

    weft sweep experiments/cached/table10.py

Cached Transformers, https://arxiv.org/abs/2312.12742; data and recipe are in hosts.py. FLOPs: `weft size pvt`.
"""

from hosts import host

from weft.lab.sweep import Cell

TITLE = "Table 10: PVT-Tiny by caching ratio"
METRIC = "accuracy"

PAPER = {0.0: 75.1, 0.125: 75.7, 0.25: 76.8, 0.5: 78.4, 1.0: 78.5}


def cells() -> list[Cell]:
    return [Cell("PVT-Tiny", f"ratio {ratio:g}", host("PVT-Tiny", ratio), paper) for ratio, paper in PAPER.items()]
