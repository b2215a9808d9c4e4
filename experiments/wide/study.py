"""A cell of the study's tables, with the settings of weft/models/presets.py."""

from dataclasses import replace
from typing import Any

from weft.lab.sweep import Cell
from weft.tasks import make_config

SEEDS = (0, 1, 2)  # as in the paper
COLUMN = {"imdb-token": "token", "imdb-byte": "byte", "listops": "ListOps", "matching": "matching"}


SHAPES = {"deep 6x8": (6, 8), "wide 1x48": (1, 48)}


def deep_and_wide(task: str, paper: dict[str, tuple[float | None, float | None]]) -> list[Cell]:
    """The outer columns of a table, for some of its attentions. `combiner-fixed`, which is not in the paper, has no
    attention dropout: its kernel had none when the first cells were run."""
    return [
        replace(
            cell(task, attention, *shape, figure, attention_dropout=0.0 if attention == "combiner-fixed" else None),
            column=column,
        )
        for attention, figures in paper.items()
        for (column, shape), figure in zip(SHAPES.items(), figures, strict=True)
    ]


def cell(task: str, attention: str, layers: int, heads: int, paper: float | None, row: str = "", **given: Any) -> Cell:
    """bfloat16, fewer evaluations than the published code (every 200 steps), and packed documents, which give the
    losses of padded ones; `mixed`, in which the pattern of `bigbird` depends on the padding, is padded. Padded and deep
    models are compiled; a packed one of one layer gains nothing."""
    packed = task != "matching" and attention != "mixed"
    every = {"imdb-token": 2000, "imdb-byte": 1000}.get(task, 500)  # a checkpoint of imdb-token has 0.7 GB
    config = make_config(
        task,
        attention=attention,
        layers=layers,
        heads=heads,
        eval_every=every,
        checkpoint_every=every,
        precision="bf16-mixed",
        compile=not packed or layers > 1,
        packed=packed,
        **given,
    )
    return Cell(row=row or attention, column=f"{COLUMN[task]} {layers}x{heads}", config=config, paper=paper)
