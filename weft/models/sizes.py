"""Parameter counts and checkpoint sizes of the study's models, compared with the paper (Table 8)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from .presets import STUDY_ATTENTIONS, TASKS, lra

BYTES_PER_PARAMETER = 12  # float32: the weight and Adam's two moments

# Table 8, MiB: deepest and widest shape of each task.
PRINTED: dict[str, dict[str, tuple[str, str]]] = {
    "imdb-token": {
        "linformer": ("780", "659"),
        "longformer": ("833", "713"),
        "sinkhorn": ("767", "647"),
        "synthesizer": ("761", "641"),
        "others": ("779", "659"),
    },
    "imdb-byte": {
        "linformer": ("232", "110"),
        "longformer": ("284", "164"),
        "sinkhorn": ("218", "98"),
        "synthesizer": ("230", "109"),
        "others": ("230", "110"),
    },
    "listops": {
        "linformer": ("231", "109"),
        "longformer": ("283", "163"),
        "sinkhorn": ("217", "97"),
        "synthesizer": ("300", "179"),
        "others": ("229", "109"),
    },
    "matching": {
        "linformer": ("16", "8.7"),
        "longformer": ("15", "11"),
        "sinkhorn": ("13", "8.0"),
        "synthesizer": ("60", "55"),
        "others": ("13", "8.0"),
    },
}


@dataclass(frozen=True)
class SizeRow:
    """One model: the size of ours, of the published code's checkpoint, and in the paper."""

    model: str
    shape: str
    parameters: int
    published: int
    printed: str = ""


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def checkpoint_size(count: int) -> str:
    """MiB of a checkpoint with Adam's state, rounded up as the paper does: to 0.1 below 10, else to 1."""
    mebibytes = count * BYTES_PER_PARAMETER / 2**20
    return f"{math.ceil(mebibytes * 10) / 10:.1f}" if mebibytes <= 9.9 else str(math.ceil(mebibytes))


PUBLISHED_EXTRAS = {
    "longformer": "has projections for global tokens, which the study does not use",
    "sinkhorn": "always has 25 columns in its sort network; ours has one for every block",
}


def published_difference(task: str, attention: str, layers: int, heads: int) -> int:
    """Parameters of the published code minus parameters of our model of the same name."""
    found = TASKS[task]
    if attention == "longformer":
        return layers * 3 * found.dim * heads * found.head_dim
    if attention == "sinkhorn":
        return layers * found.head_dim * (25 - math.ceil(found.length / 20))
    return 0


def study_rows(
    task: str, attentions: Iterable[str] = STUDY_ATTENTIONS, shapes: Iterable[tuple[int, int]] | None = None
) -> list[SizeRow]:
    """The rows of a task; `shapes` (layers, heads) default to the two in Table 8."""
    found = TASKS[task]
    rows = []
    for attention in attentions:
        for layers, heads in shapes or (found.deepest, found.widest):
            with torch.device("meta"):  # shapes without memory
                count = parameters(lra(task, attention, layers, heads))
            published = count + published_difference(task, attention, layers, heads)
            printed = _printed(task, attention, (layers, heads))
            rows.append(SizeRow(attention, f"{layers}x{heads}", count, published, printed))
    return rows


def _printed(task: str, attention: str, shape: tuple[int, int]) -> str:
    found = TASKS[task]
    if attention not in STUDY_ATTENTIONS or shape not in (found.deepest, found.widest):
        return ""
    cells = PRINTED[task].get(attention, PRINTED[task]["others"])
    return cells[int(shape == found.widest)]
