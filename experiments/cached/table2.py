"""Table 2: a gated recurrent cache against an attention-based one, which keeps the previous step's tokens.

    python -m experiments.cached.table2 --data data --rows PVT-Tiny

Cached Transformers, https://arxiv.org/abs/2312.12742; data and recipe as in Table 1. How the paper pairs samples in
the attention-based cache is not said: here row by row of consecutive batches, and without a cache in evaluation.
"""

from experiments.cached.models import attention_cached, cached, plain
from experiments.cached.table1 import RECIPE, row, sources
from experiments.table import Row, run

PAPER = {"ViT-S": (79.9, 80.0, 81.3), "PVT-Tiny": (75.1, 74.8, 78.4), "PVT-Small": (79.9, 79.6, 81.8)}
KINDS = {"no cache": plain, "attention-based cache": attention_cached, "GRC": cached}


def rows(source: str = "imagenet", size: int = 224) -> list[Row]:
    return [
        row(f"{name}, {kind}", make(name), source, size, "cached2", accuracy=figure)
        for name, figures in PAPER.items()
        for (kind, make), figure in zip(KINDS.items(), figures, strict=True)
    ]


if __name__ == "__main__":
    source, size, rest = sources()
    metrics = {"accuracy": 100}
    run("Cached, Table 2", rows(source, size), about=__doc__ or "", metrics=metrics, recipe=RECIPE, arguments=rest)
