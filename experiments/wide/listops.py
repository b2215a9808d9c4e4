"""ListOps, one wide layer against six of the same heads: the outer columns of Table 4, and combiner-fixed.

    weft data make listops
    weft sweep experiments/wide/listops.py

Wide Attention Is The Way Forward For Transformers?, https://arxiv.org/abs/2210.00640: length 2,000, 10,000 steps of
32, Adam, base rate 0.05 with 1,000 steps of warm-up, the best checkpoint on validation data tested. `combiner-fixed`
is not in the paper and has no attention dropout. Ours: bfloat16, and an evaluation every 500 steps (paper: 200).
"""

from study import SEEDS, deep_and_wide

from weft.lab.sweep import Cell

TITLE = "ListOps, deep 6x8 and wide 1x48"
METRIC = "accuracy"
SCALE, UNIT = 100, "%"
__all__ = ["METRIC", "SCALE", "SEEDS", "TITLE", "UNIT", "cells"]

PAPER: dict[str, tuple[float | None, float | None]] = {
    "full": (35.7, 37.2),
    "linear": (37.1, 37.4),
    "local": (36.8, 37.7),
    "bigbird": (36.7, 37.3),
    "performer": (36.2, 36.6),
    "linformer": (29.9, 37.0),
    "longformer": (36.8, 37.7),
    "sinkhorn": (19.4, 21.7),
    "sparse": (37.0, 36.9),
    "synthesizer": (36.5, 37.3),
    "combiner-fixed": (None, None),
}


def cells() -> list[Cell]:
    return deep_and_wide("listops", PAPER)
