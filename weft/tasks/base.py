"""What a task is: data, a model for it, a loss, a metric, and the papers' hyper-parameters."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from ..lab.config import TrainConfig

Columns = dict[str, Tensor]


class DataMissing(Exception):
    """The data is not there, or is not what it should be; the message says what to do."""


@dataclass
class TaskData:
    """The splits of a task, each a dictionary of tensors with one row per example."""

    train: Columns
    val: Columns
    test: Columns
    length: int  # tokens per example
    facts: dict[str, Any] = field(default_factory=dict)  # what the model must know: vocab, classes, size
    vocabulary: list[str] | None = None  # words by id, where they come from the data

    def rows(self, split: str) -> int:
        return len(next(iter(getattr(self, split).values())))


class Task:
    """Base of all tasks. `batch` and `loss` see rows that are already on the device."""

    name: ClassVar[str]
    about: ClassVar[str]
    metric: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True
    defaults: ClassVar[Mapping[str, Any]] = {}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def load(self, config: TrainConfig) -> TaskData:
        raise NotImplementedError

    def model(self, config: TrainConfig, data: TaskData) -> nn.Module:
        raise NotImplementedError

    def batch(self, rows: Columns, config: TrainConfig, generator: torch.Generator, training: bool) -> Columns:
        """What is done to rows fresh from the data: augmentation, masking. The generator depends on the step alone."""
        return rows

    def loss(self, model: nn.Module, batch: Columns, config: TrainConfig) -> Tensor:
        """The mean training loss."""
        raise NotImplementedError

    def score(self, model: nn.Module, batch: Columns) -> dict[str, Tensor]:
        """Per example (B,): what `summary` needs the sums of, "loss" and "count" among them."""
        raise NotImplementedError

    def summary(self, sums: Mapping[str, float]) -> dict[str, float]:
        """From sums over all examples to the metrics."""
        raise NotImplementedError

    def inputs(self, batch: Columns) -> tuple[Tensor, ...]:
        """What the model is called with."""
        raise NotImplementedError


class Classification(Task):
    """Tasks whose batches have a "label" and whose models answer with class scores."""

    def loss(self, model: nn.Module, batch: Columns, config: TrainConfig) -> Tensor:
        logits = model(*self.inputs(batch))
        return F.cross_entropy(logits.float(), batch["label"].long(), label_smoothing=config.label_smoothing)

    def score(self, model: nn.Module, batch: Columns) -> dict[str, Tensor]:
        logits, label = model(*self.inputs(batch)).float(), batch["label"].long()
        return {
            "loss": F.cross_entropy(logits, label, reduction="none"),
            "correct": logits.argmax(-1) == label,
            "count": torch.ones_like(label),
        }

    def summary(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {"loss": sums["loss"] / sums["count"], "accuracy": sums["correct"] / sums["count"]}


class TextClassification(Classification):
    """Ids in (0 = padding), one class out, through `weft.models.TextClassifier`."""

    def inputs(self, batch: Columns) -> tuple[Tensor, ...]:
        return (batch["ids"].long(),)

    def model(self, config: TrainConfig, data: TaskData) -> nn.Module:
        from ..models import TextClassifier

        pooling = config.pooling or "cls"
        return TextClassifier(
            data.facts["vocab"],
            data.facts["classes"],
            max_length=data.length + (pooling == "cls"),
            pooling=pooling,
            **encoder_options(config),
        )


def encoder_options(config: TrainConfig) -> dict[str, Any]:
    """The config's fields as the text models take them."""
    if config.positions not in ("", "sinusoid", "learned"):
        raise ValueError(f"this model has positions 'sinusoid' or 'learned', got {config.positions!r}")
    return dict(
        dim=config.dim,
        heads=config.heads,
        head_dim=config.head_dim,
        layers=config.layers,
        mlp_dim=config.mlp_dim,
        attention=config.mechanisms(),
        attention_options=config.options() or None,
        positions=config.positions or "sinusoid",
        dropout=config.dropout,
        attention_dropout=config.attention_dropout,
    )


_tasks: dict[str, Task] = {}


def add_task(task: Task) -> Task:
    if task.name in _tasks:
        raise ValueError(f"a task named {task.name!r} is already there")
    _tasks[task.name] = task
    return task


def tasks() -> list[str]:
    """The names of all tasks."""
    return sorted(_tasks)


def get_task(name: str) -> Task:
    if name not in _tasks:
        near = difflib.get_close_matches(str(name), list(_tasks), n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"the tasks: {', '.join(tasks())}"
        raise ValueError(f"there is no task {name!r}; {hint}")
    return _tasks[name]


def wide_presets(deep: Mapping[str, Any], ratios: list[tuple[int, int]]) -> dict[str, dict[str, Any]]:
    """The rows of the wide-attention study: one preset per layers x heads, "6x8" and so on."""
    return {f"{layers}x{heads}": {**deep, "layers": layers, "heads": heads} for layers, heads in ratios}
