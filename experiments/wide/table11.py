"""Table 11: is it the width? One layer with the deep model's number of heads, against the deepest and the widest model.

    weft sweep experiments/wide/table11.py --only "ListOps*"

Wide Attention Is The Way Forward For Transformers?, https://arxiv.org/abs/2210.00640, full attention.
"""

from study import SEEDS, cell, figures

from weft.lab.sweep import Cell
from weft.models import presets

TITLE = "Table 11: deepest, widest and small, full attention"
METRIC = "accuracy"
__all__ = ["METRIC", "SEEDS", "TITLE", "cells"]

SMALL = {"imdb-token": (1, 8, 84.0), "imdb-byte": (1, 8, 59.6), "listops": (1, 8, 36.9), "matching": (1, 4, 62.4)}


def cells() -> list[Cell]:
    found = []
    for task, small in SMALL.items():
        paper, shapes = figures(task, "full"), presets.TASKS[task].shapes
        found += [cell(task, "full", *shapes[at], paper[at]) for at in (0, -1)] + [cell(task, "full", *small)]
    return found
