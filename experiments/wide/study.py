"""The study's results, and cells with the settings of weft/models/presets.py."""

from dataclasses import replace
from typing import Any

from weft.lab.sweep import Cell
from weft.models import presets
from weft.tasks import make_config

SEEDS = (0, 1, 2)  # as in the paper
COLUMN = {"imdb-token": "token", "imdb-byte": "byte", "listops": "ListOps", "matching": "matching"}

# Tables 3 and 4: accuracy in the tasks of COLUMN, from the deepest to the widest shape
PAPER = {
    "bigbird": ((86.0, 85.7, 85.8, 85.3), (62.7, 63.5, 63.8, 62.4), (36.7, 37.0, 37.1, 37.3), (63.9, 64.7, 64.0)),
    "linear": ((86.7, 86.9, 87.3, 88.0), (64.5, 64.5, 64.6, 64.7), (37.1, 37.5, 37.3, 37.4), (64.2, 63.8, 63.9)),
    "linformer": ((84.2, 82.4, 81.1, 84.1), (56.3, 52.8, 53.0, 52.6), (29.9, 36.9, 36.7, 37.0), (64.5, 62.7, 63.1)),
    "local": ((74.2, 74.1, 74.2, 73.9), (55.5, 57.1, 57.5, 57.0), (36.8, 37.1, 37.2, 37.7), (58.0, 58.4, 58.1)),
    "longformer": ((86.0, 85.8, 85.7, 84.1), (61.6, 61.8, 60.5, 57.5), (36.8, 36.9, 36.9, 37.7), (61.2, 60.3, 58.1)),
    "performer": ((87.0, 87.3, 87.0, 87.0), (64.4, 64.7, 64.7, 64.8), (36.2, 34.1, 32.0, 36.6), (65.0, 65.1, 66.3)),
    "sinkhorn": ((86.1, 86.4, 86.4, 86.5), (62.3, 62.0, 61.9, 61.6), (19.4, 18.0, 17.9, 21.7), (64.0, 64.1, 65.7)),
    "sparse": ((85.7, 85.6, 85.8, 85.7), (61.2, 61.5, 62.1, 62.9), (37.0, 37.1, 37.6, 36.9), (63.2, 64.3, 63.6)),
    "synthesizer": ((86.7, 87.2, 87.1, 86.5), (61.4, 61.2, 61.1, 61.1), (36.5, 36.7, 32.9, 37.3), (71.1, 72.0, 72.3)),
    "full": ((85.8, 85.8, 85.9, 85.5), (62.6, 63.4, 63.3, 62.4), (35.7, 36.4, 36.7, 37.2), (64.0, 64.6, 64.4)),
}


def figures(task: str, attention: str) -> tuple[float, ...]:
    return PAPER[attention][list(COLUMN).index(task)]


def by_shape(*tasks: str) -> list[Cell]:
    """All attentions in all shapes of these tasks."""
    return [
        cell(task, attention, *shape, figure)
        for attention in PAPER
        for task in tasks
        for shape, figure in zip(presets.TASKS[task].shapes, figures(task, attention), strict=True)
    ]


def deep_and_wide(task: str, *attentions: str) -> list[Cell]:
    """The deepest and the widest shape with some attentions, and with `combiner-fixed`, which is not in the paper. It
    has no attention dropout: its kernel had none when the first cells were run."""
    found = []
    for attention in (*attentions, "combiner-fixed"):
        ours = attention not in PAPER
        for kind, at in (("deep", 0), ("wide", -1)):
            layers, heads = presets.TASKS[task].shapes[at]
            made = cell(
                task, attention, layers, heads, None if ours else figures(task, attention)[at],
                attention_dropout=0.0 if ours else None,
            )  # fmt: skip
            note = "`combiner-fixed` has no attention dropout" if ours else ""
            found.append(replace(made, column=f"{kind} {layers}x{heads}", note=note))
    return found


def cell(task: str, attention: str, layers: int, heads: int, paper: float | None, **given: Any) -> Cell:
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
    return Cell(row=attention, column=f"{COLUMN[task]} {layers}x{heads}", config=config, paper=paper)
