"""Table 3: IMDb by words and by bytes, ten attentions, from six layers of 8 heads to one of 48.

    weft data get imdb
    weft sweep experiments/wide/table3.py --only "byte*" --seeds 0

Wide Attention Is The Way Forward For Transformers?, https://arxiv.org/abs/2210.00640. Its outer columns are the IMDb
part of Table 2. 500 words or 1,000 bytes, 30,000 steps of 32, three runs. The published code validates on the test
reviews; here a tenth of the training reviews is held out.
"""

from study import SEEDS, cell

from weft.lab.sweep import Cell

TITLE = "Table 3: IMDb by aspect ratio"
METRIC = "accuracy"
__all__ = ["METRIC", "SEEDS", "TITLE", "cells"]

SHAPES = ((6, 8), (3, 16), (2, 24), (1, 48))
PAPER = {  # four by words, four by bytes
    "bigbird": (86.0, 85.7, 85.8, 85.3, 62.7, 63.5, 63.8, 62.4),
    "linear": (86.7, 86.9, 87.3, 88.0, 64.5, 64.5, 64.6, 64.7),
    "linformer": (84.2, 82.4, 81.1, 84.1, 56.3, 52.8, 53.0, 52.6),
    "local": (74.2, 74.1, 74.2, 73.9, 55.5, 57.1, 57.5, 57.0),
    "longformer": (86.0, 85.8, 85.7, 84.1, 61.6, 61.8, 60.5, 57.5),
    "performer": (87.0, 87.3, 87.0, 87.0, 64.4, 64.7, 64.7, 64.8),
    "sinkhorn": (86.1, 86.4, 86.4, 86.5, 62.3, 62.0, 61.9, 61.6),
    "sparse": (85.7, 85.6, 85.8, 85.7, 61.2, 61.5, 62.1, 62.9),
    "synthesizer": (86.7, 87.2, 87.1, 86.5, 61.4, 61.2, 61.1, 61.1),
    "full": (85.8, 85.8, 85.9, 85.5, 62.6, 63.4, 63.3, 62.4),
}


def cells() -> list[Cell]:
    columns = [(task, *shape) for task in ("imdb-token", "imdb-byte") for shape in SHAPES]
    return [
        cell(task, attention, layers, heads, figure)
        for attention, figures in PAPER.items()
        for (task, layers, heads), figure in zip(columns, figures, strict=True)
    ]
