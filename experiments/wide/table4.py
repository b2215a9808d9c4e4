"""Table 4: ListOps and document matching, ten attentions, from the deepest shape to one layer.

    weft data make listops
    weft sweep experiments/wide/table4.py --only "ListOps*" --seeds 0

Wide Attention Is The Way Forward For Transformers?, https://arxiv.org/abs/2210.00640. Its outer columns are the rest
of Table 2; `listops.py` runs part of it. Matching needs the Long Range Arena's new_aan_pairs.*.tsv
(lra_release.gz of github.com/google-research/long-range-arena, 7.7 GB) in data/aan.
"""

from study import SEEDS, cell

from weft.lab.sweep import Cell

TITLE = "Table 4: ListOps and document matching by aspect ratio"
METRIC = "accuracy"
__all__ = ["METRIC", "SEEDS", "TITLE", "cells"]

COLUMNS = (
    ("listops", 6, 8),
    ("listops", 3, 16),
    ("listops", 2, 24),
    ("listops", 1, 48),
    ("matching", 4, 4),
    ("matching", 2, 8),
    ("matching", 1, 16),
)
PAPER = {
    "bigbird": (36.7, 37.0, 37.1, 37.3, 63.9, 64.7, 64.0),
    "linear": (37.1, 37.5, 37.3, 37.4, 64.2, 63.8, 63.9),
    "linformer": (29.9, 36.9, 36.7, 37.0, 64.5, 62.7, 63.1),
    "local": (36.8, 37.1, 37.2, 37.7, 58.0, 58.4, 58.1),
    "longformer": (36.8, 36.9, 36.9, 37.7, 61.2, 60.3, 58.1),
    "performer": (36.2, 34.1, 32.0, 36.6, 65.0, 65.1, 66.3),
    "sinkhorn": (19.4, 18.0, 17.9, 21.7, 64.0, 64.1, 65.7),
    "sparse": (37.0, 37.1, 37.6, 36.9, 63.2, 64.3, 63.6),
    "synthesizer": (36.5, 36.7, 32.9, 37.3, 71.1, 72.0, 72.3),
    "full": (35.7, 36.4, 36.7, 37.2, 64.0, 64.6, 64.4),
}


def cells() -> list[Cell]:
    return [
        cell(task, attention, layers, heads, figure)
        for attention, figures in PAPER.items()
        for (task, layers, heads), figure in zip(COLUMNS, figures, strict=True)
    ]
