"""A cell of the study's tables: its settings are the tasks' own (weft/models/presets.py), ours only how it is run."""

from typing import Any

from weft.lab.config import make_config
from weft.lab.sweep import Cell

SEEDS = (0, 1, 2)  # the paper has three runs
COLUMN = {"imdb-token": "token", "imdb-byte": "byte", "listops": "ListOps", "matching": "matching"}


def cell(task: str, attention: str, layers: int, heads: int, paper: float | None, row: str = "", **given: Any) -> Cell:
    """bfloat16, compiled, and fewer evaluations than the published code's one in 200 steps."""
    every = 1000 if task.startswith("imdb") else 500
    config = make_config(
        task,
        attention=attention,
        layers=layers,
        heads=heads,
        eval_every=every,
        checkpoint_every=every,
        precision="bf16-mixed",
        compile=True,
        **given,
    )
    return Cell(row=row or attention, column=f"{COLUMN[task]} {layers}x{heads}", config=config, paper=paper)
