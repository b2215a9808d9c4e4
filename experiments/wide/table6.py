"""Table 6: mixed attention, eight mechanisms side by side in every layer, deep and wide.

    weft sweep experiments/wide/table6.py --only "ListOps*"

Wide Attention Is The Way Forward For Transformers?, https://arxiv.org/abs/2210.00640. The table's other columns are
the mean and the best of Table 2's. Matching in its deepest shape has four heads, too few for eight mechanisms.
"""

from study import SEEDS, cell

from weft.lab.sweep import Cell

TITLE = "Table 6: mixed attention"
METRIC = "accuracy"
__all__ = ["METRIC", "SEEDS", "TITLE", "cells"]

PAPER = {
    ("imdb-token", 6, 8): 87.3,
    ("imdb-token", 1, 48): 86.8,
    ("imdb-byte", 6, 8): 60.1,
    ("imdb-byte", 1, 48): 63.0,
    ("listops", 6, 8): 37.1,
    ("listops", 1, 48): 38.0,
    ("matching", 1, 16): 66.9,
}


def cells() -> list[Cell]:
    return [cell(task, "mixed", layers, heads, figure) for (task, layers, heads), figure in PAPER.items()]
