"""ListOps and IMDb bytes with a modern recipe instead of the study's, six layers of eight heads.

    weft data make listops && weft data get imdb
    weft sweep experiments/wide/modern.py

The models of Wide Attention Is The Way Forward For Transformers?, https://arxiv.org/abs/2210.00640, trained with
`--preset modern`: rotary positions, RMSNorm, QK-norm, AdamW, clipping, cosine decay, batches of 64 (README.md has the
search). As many examples as in the study, in half as many steps. The paper does not have these runs. bfloat16, packed
documents.
"""

from study import SEEDS, cell

from weft.lab.sweep import Cell

TITLE = "ListOps and IMDb bytes with a modern recipe"
METRIC = "accuracy"
__all__ = ["METRIC", "SEEDS", "TITLE", "cells"]

ATTENTIONS = ("full", "combiner-fixed", "linear", "local", "longformer", "performer")


def cells() -> list[Cell]:
    return [
        cell(task, attention, 6, 8, None, preset="modern")
        for task in ("listops", "imdb-byte")
        for attention in ATTENTIONS
    ]
