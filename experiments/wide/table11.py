"""Table 11: is it the width? One layer with the deep model's number of heads, against the deepest and the widest model.

    weft sweep experiments/wide/table11.py --only "ListOps*"

Wide Attention Is The Way Forward For Transformers?, https://arxiv.org/abs/2210.00640, full attention.
"""

from study import SEEDS, cell

from weft.lab.sweep import Cell

TITLE = "Table 11: deepest, widest and small, full attention"
METRIC = "accuracy"
__all__ = ["METRIC", "SEEDS", "TITLE", "cells"]

PAPER = {
    ("imdb-token", 6, 8): 85.8,
    ("imdb-token", 1, 48): 85.5,
    ("imdb-token", 1, 8): 84.0,
    ("imdb-byte", 6, 8): 62.6,
    ("imdb-byte", 1, 48): 62.4,
    ("imdb-byte", 1, 8): 59.6,
    ("listops", 6, 8): 35.7,
    ("listops", 1, 48): 37.2,
    ("listops", 1, 8): 36.9,
    ("matching", 4, 4): 64.0,
    ("matching", 1, 16): 64.4,
    ("matching", 1, 4): 62.4,
}


def cells() -> list[Cell]:
    return [cell(task, "full", layers, heads, figure) for (task, layers, heads), figure in PAPER.items()]
