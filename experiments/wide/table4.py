"""Table 4: ListOps and document matching, ten attentions, from the deepest shape to one layer.

    weft data make listops
    weft sweep experiments/wide/table4.py --only "ListOps*" --seeds 0

Wide Attention Is The Way Forward For Transformers?, https://arxiv.org/abs/2210.00640. Its outer columns are the rest
of Table 2; `listops.py` runs part of it. Matching needs the Long Range Arena's new_aan_pairs.*.tsv
(lra_release.gz of github.com/google-research/long-range-arena, 7.7 GB) in data/aan.
"""

from study import SEEDS, by_shape

from weft.lab.sweep import Cell

TITLE = "Table 4: ListOps and document matching by aspect ratio"
METRIC = "accuracy"
__all__ = ["METRIC", "SEEDS", "TITLE", "cells"]


def cells() -> list[Cell]:
    return by_shape("listops", "matching")
