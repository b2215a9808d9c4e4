"""What a task is: data, a model for it, a loss, a metric, and the papers' hyper-parameters."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import TrainConfig

Columns = dict[str, Tensor]


class DataMissing(Exception):
    """The data is not there, or is not what it should be; the message says what to do."""


@dataclass
class TaskData:
    """The splits of a task, each a dictionary of tensors with one row per example."""

    train: Columns
    val: Columns
    test: Columns
    length: int  # tokens per document
    facts: dict[str, Any] = field(default_factory=dict)  # what the model must know: vocab, classes, size
    vocabulary: list[str] | None = None  # words by id, where they come from the data
    documents: int = 1  # per example
    classes: list[str] | None = None  # names by label, where they come from the data
    tokenizer: str | None = None  # as text, where it was made from the data

    def rows(self, split: str) -> int:
        return len(next(iter(getattr(self, split).values())))


@dataclass
class Known:
    """What ids and labels mean to a model that was trained: a run keeps it, for data read later may say otherwise."""

    facts: dict[str, Any]
    vocabulary: list[str] | None = None
    classes: list[str] | None = None
    tokenizer: str | None = None
    length: int = 0


class Task:
    """Base of all tasks. `batch` and `loss` see rows that are already on the device."""

    name: ClassVar[str]
    about: ClassVar[str]
    metric: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True
    defaults: Mapping[str, Any] = {}
    presets: Mapping[str, Mapping[str, Any]] = {}
    models: ClassVar[tuple[str, ...]] = ("transformer",)  # what config.model may be
    streams: ClassVar[bool] = False  # rows are consecutive pieces of parallel texts: trained on in order
    answers: ClassVar[str] = "logits"  # what the model returns: logits, values, or nll (of each target); for ensembles
    # Of the config's fields that only some tasks have a use for, those that this one reads; others are refused.
    reads: frozenset[str] = frozenset({"max_length", "pooling", "image_size", "patch", "mask_rate", "augment"})

    def check(self, config: TrainConfig) -> None:
        """Raise ValueError for settings that this task cannot train, before its data is loaded."""
        if config.model not in self.models:
            raise ValueError(f"{self.name} takes --model {', '.join(self.models)}; got {config.model!r}")

    def load(self, config: TrainConfig) -> TaskData:
        raise NotImplementedError

    def load_again(self, config: TrainConfig, known: Known) -> TaskData:
        """Load for a run that exists: with its vocabulary, classes and tokenizer, not with those of the data. Tasks
        that make any of these from the data override it."""
        return self.load(config)

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

    def begin(self, model: nn.Module, weights: Columns) -> bool:
        """Start from the weights of another run, for tasks whose model may differ from that run's.

        False: the models must be the same, and the lab loads all of the state.
        """
        return False

    def restart(self, model: nn.Module) -> None:
        """The streams begin again: empty what the model remembers of them."""

    def evaluating(self, model: nn.Module) -> AbstractContextManager[None]:
        """Around an evaluation: what it must leave as it was."""
        return nullcontext()


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


class StudyTask(Classification):
    """A task of the wide-attention study, whose models and options `weft.models.presets` knows.

    An option of the config that is given wins over the study's; mechanisms the study does not have take their own
    defaults.
    """

    models = ("transformer", "crate")
    reads = frozenset({"max_length", "pooling"})

    def __init__(self) -> None:
        from ..models.presets import TASKS

        study = TASKS[self.name]
        layers, heads = study.deepest
        self.length = study.length
        self.defaults = dict(
            layers=layers, heads=heads, dim=study.dim, head_dim=study.head_dim, mlp_dim=study.mlp_dim,
            steps=study.steps, warmup=study.warmup, batch_size=32, dropout=0.1, optimizer="adam",
            learning_rate=0.05, schedule="inverse_sqrt", beta1=0.9, beta2=0.98, eps=1e-9, eval_every=200,
        )  # fmt: skip
        self.presets = {f"{n}x{h}": {"layers": n, "heads": h} for n, h in study.shapes}
        # The published code, which differs from the paper: decoupled weight decay.
        self.presets["code"] = {"optimizer": "adamw", "weight_decay": 0.1}

    def inputs(self, batch: Columns) -> tuple[Tensor, ...]:
        return (batch["ids"].long(),)

    def model(self, config: TrainConfig, data: TaskData) -> nn.Module:
        from ..models.presets import lra

        if config.model == "crate":
            return crate_text(config, data)
        if config.positions not in ("", "sinusoid", "learned"):
            raise ValueError(f"the study's encoder has positions 'sinusoid' or 'learned', got {config.positions!r}")
        if isinstance(config.mechanisms(), list):
            raise ValueError("the study's mixture is --attention mixed; lists are for the other tasks")
        options: dict[str, Any] = {
            key: value
            for key, value in dict(
                pooling=config.pooling,
                positions=config.positions,
                attention_dropout=config.attention_dropout,
                attention_options=config.options(),
            ).items()
            if value not in ("", None, {})
        }
        pooling = options.get("pooling", "mean" if config.attention == "sinkhorn" else "cls")
        options["max_length"] = data.length + (pooling == "cls" and data.documents == 1)
        for name in ("dim", "head_dim", "mlp_dim", "dropout"):
            options[name] = getattr(config, name)
        return lra(
            self.name,
            config.attention,
            config.layers,
            config.heads,
            vocab=data.facts["vocab"],
            classes=data.facts["classes"],
            **options,
        )


class TextClassification(Classification):
    """Ids in (0 = padding), one class out, through `weft.models.TextClassifier`."""

    models = ("transformer", "crate")

    def inputs(self, batch: Columns) -> tuple[Tensor, ...]:
        return (batch["ids"].long(),)

    def model(self, config: TrainConfig, data: TaskData) -> nn.Module:
        from ..models import TextClassifier

        if config.model == "crate":
            return crate_text(config, data)
        if config.positions not in ("", "sinusoid", "learned"):
            raise ValueError(f"a text classifier has positions 'sinusoid' or 'learned', got {config.positions!r}")
        pooling = config.pooling or "cls"
        return TextClassifier(
            data.facts["vocab"],
            data.facts["classes"],
            max_length=data.length + (pooling == "cls"),
            pooling=pooling,
            positions=config.positions or "sinusoid",
            **block_options(config),
        )


def crate_text(config: TrainConfig, data: TaskData) -> nn.Module:
    """The white-box classifier of single documents."""
    from ..models import CRATEText

    if data.documents != 1:
        raise ValueError("--model crate classifies single documents; matching takes --model transformer")
    pooling = config.pooling or "cls"
    return CRATEText(
        data.facts["vocab"],
        data.facts["classes"],
        max_length=data.length + 1,
        pooling=pooling,
        **crate_options(config),
    )


def crate_options(config: TrainConfig) -> dict[str, Any]:
    """The config's fields as CRATE models take them; they have no MLP, and one mechanism for all layers."""
    attention = config.mechanisms()
    if not isinstance(attention, str) or attention == "mixed":
        raise ValueError("--model crate takes one mechanism: its query, key and value are one projection")
    if config.positions:
        raise ValueError("--model crate has positions of its own: leave --positions out")
    options = dict(dim=config.dim, heads=config.heads, head_dim=config.head_dim, layers=config.layers)
    return {**options, "dropout": config.dropout, "attention": attention, **config.options()}


def block_options(config: TrainConfig) -> dict[str, Any]:
    """The config's fields as models with blocks take them."""
    if config.attention == "mixed":
        raise ValueError("'mixed' is the study's mixture, for its four tasks; here join names with '+'")
    return dict(
        dim=config.dim,
        heads=config.heads,
        head_dim=config.head_dim,
        layers=config.layers,
        mlp_dim=config.mlp_dim,
        attention=config.mechanisms(),
        attention_options=config.options() or None,
        dropout=config.dropout,
        attention_dropout=config.attention_dropout,
    )
