"""Table 10: PVT-Tiny by the ratio of channels that is cached.

    python -m experiments.cached.table10 --data data

Cached Transformers, https://arxiv.org/abs/2312.12742; data and recipe as in Table 1. FLOPs: `weft size pvt`.
"""

from experiments.cached.models import cached, plain
from experiments.cached.table1 import RECIPE, row, sources
from experiments.table import Row, run

PAPER = {0.0: 75.1, 0.125: 75.7, 0.25: 76.8, 0.5: 78.4, 1.0: 78.5}


def rows(source: str = "imagenet", size: int = 224) -> list[Row]:
    return [
        row(
            f"PVT-Tiny, ratio {ratio:g}",
            cached("PVT-Tiny", ratio) if ratio else plain("PVT-Tiny"),
            source,
            size,
            "cached10",
            accuracy=figure,
        )
        for ratio, figure in PAPER.items()
    ]


if __name__ == "__main__":
    source, size, rest = sources()
    metrics = {"accuracy": 100}
    run("Cached, Table 10", rows(source, size), about=__doc__ or "", metrics=metrics, recipe=RECIPE, arguments=rest)
