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


def cells() -> list[Cell]:
    attentions = "full linear local bigbird performer linformer longformer sinkhorn sparse synthesizer"
    return deep_and_wide("listops", *attentions.split())
