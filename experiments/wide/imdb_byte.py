"""IMDb byte by byte, one wide layer against six of the same heads: the outer columns of Table 3 for four attentions.

    weft data get imdb
    weft sweep experiments/wide/imdb_byte.py

Wide Attention Is The Way Forward For Transformers?, https://arxiv.org/abs/2210.00640: the first 1,000 bytes, 30,000
steps of 32, Adam, base rate 0.05 with 8,000 steps of warm-up, the best checkpoint on validation data tested. The
published code validates on the test reviews; here a tenth of the training reviews is held out. `combiner-fixed` is not
in the paper and has no attention dropout. Ours: bfloat16, and an evaluation every 1,000 steps.
"""

from study import SEEDS, deep_and_wide

from weft.lab.sweep import Cell

TITLE = "IMDb bytes, deep 6x8 and wide 1x48"
METRIC = "accuracy"
SCALE, UNIT = 100, "%"
__all__ = ["METRIC", "SCALE", "SEEDS", "TITLE", "UNIT", "cells"]


def cells() -> list[Cell]:
    return deep_and_wide("imdb-byte", "full", "linear", "local")
