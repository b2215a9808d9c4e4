"""Table 5: the Long Range Arena, thirteen attentions.

    weft data make listops && weft data make pathfinder32-medium && weft data get imdb && weft data get cifar10
    weft sweep experiments/combiner/table5.py --only "Combiner*/ListOps*" "Transformer/ListOps*"

Combiner, https://arxiv.org/abs/2107.05768, with the arena's sizes and recipes. The values of the baselines are the
arena's (https://arxiv.org/abs/2011.04006), except for Pathfinder, which the paper ran again ("Pathfinder-32-inter").
Our generator draws images that are similar to the arena's, not equal. Weight decay is on matrices only. The paper
reports the better of CLS and mean pooling, so every cell runs with both (except Sinkhorn, whose blocks leave no room
for a CLS token). Retrieval needs the arena's new_aan_pairs.*.tsv in data/aan (lra_release.gz of
github.com/google-research/long-range-arena, 7.7 GB).
"""

from typing import Any

from weft.lab.sweep import Cell
from weft.tasks import make_config

TITLE = "Table 5: Long Range Arena"
METRIC = "accuracy"
SEEDS = (0,)

HOW: dict[str, Any] = dict(precision="bf16-mixed", compile=True, eval_every=500, checkpoint_every=500)
DECAY: dict[str, Any] = dict(optimizer="adamw", weight_decay=0.1)  # of all the arena's tasks on text
COLUMNS: dict[str, tuple[str, dict[str, Any]]] = {
    "ListOps": ("listops", dict(layers=4, heads=8, mlp_dim=1024, steps=5000, packed=True, **DECAY)),
    "Text": ("imdb-byte", dict(layers=4, heads=4, dim=256, mlp_dim=1024, steps=20_000, packed=True, **DECAY)),
    "Retrieval": ("matching", dict(layers=4, heads=4, steps=5000, **DECAY)),
    "Image": ("cifar10-pixels", {}),
    "Pathfinder": ("pathfinder32-medium", {}),
}
PAPER = {
    "Transformer": ("full", 36.38, 64.27, 57.46, 42.44, 88.81),
    "Local Attention": ("local", 15.95, 52.98, 53.39, 41.46, 84.64),
    "Sparse Trans.": ("sparse", 35.78, 63.58, 59.59, 44.24, 83.90),
    "Longformer": ("longformer", 36.03, 62.85, 56.89, 42.22, 86.68),
    "Linformer": ("linformer", 35.49, 53.94, 52.27, 38.56, 86.17),
    "Reformer": ("reformer", 36.30, 56.10, 53.40, 38.07, 79.18),
    "Sinkhorn Trans.": ("sinkhorn", 34.20, 61.20, 53.83, 41.23, 73.36),
    "Synthesizer": ("synthesizer", 36.50, 61.68, 54.67, 41.61, 81.61),
    "BigBird": ("bigbird", 37.08, 64.02, 59.29, 40.83, 86.75),
    "Linear Trans.": ("linear", 17.15, 65.90, 53.09, 42.34, 88.13),
    "Performer": ("performer", 36.00, 65.40, 53.82, 42.77, 88.76),
    "Combiner-Fixed": ("combiner-fixed", 36.65, 64.99, 59.81, 41.67, 88.59),
    "Combiner-Axial": ("combiner-axial", 36.15, 64.36, 56.10, 41.33, 88.43),
}


def cells() -> list[Cell]:
    return [
        Cell(
            row,
            f"{column}, {pooling}",
            make_config(task, attention=str(attention), pooling=pooling, **{**HOW, **settings}),
            float(figure),
            note="the paper's is the better of the two poolings",
        )
        for row, (attention, *figures) in PAPER.items()
        for (column, (task, settings)), figure in zip(COLUMNS.items(), figures, strict=True)
        for pooling in (("mean",) if attention == "sinkhorn" else ("cls", "mean"))
    ]
