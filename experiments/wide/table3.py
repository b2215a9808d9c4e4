"""Table 3: IMDb by words and by bytes, ten attentions, from six layers of 8 heads to one of 48.

    weft data get imdb
    weft sweep experiments/wide/table3.py --only "byte*" --seeds 0

Wide Attention Is The Way Forward For Transformers?, https://arxiv.org/abs/2210.00640. Its outer columns are the IMDb
part of Table 2. 500 words or 1,000 bytes, 30,000 steps of 32, three runs. The published code validates on the test
reviews; here a tenth of the training reviews is held out.
"""

from study import SEEDS, by_shape

from weft.lab.sweep import Cell

TITLE = "Table 3: IMDb by aspect ratio"
METRIC = "accuracy"
__all__ = ["METRIC", "SEEDS", "TITLE", "cells"]


def cells() -> list[Cell]:
    return by_shape("imdb-token", "imdb-byte")
