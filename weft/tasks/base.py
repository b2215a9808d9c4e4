"""The base classes of tasks: data, model, loss, metrics, and the papers' hyper-parameters."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..pages import Part, gallery
from .config import TrainConfig

Columns = dict[str, Tensor]
# Config fields that models with sizes of their own do not read.
SIZES = ("layers", "heads", "head_dim", "dim", "mlp_dim", "dropout", "attention_dropout", "positions", "pooling",
         "norm", "qk_norm")  # fmt: skip


class DataMissing(Exception):
    """Data is missing or invalid; the message says what to do."""


@dataclass
class TaskData:
    """The splits of a task, each a dictionary of tensors with one row per example."""

    train: Columns
    val: Columns
    test: Columns
    length: int  # tokens per document
    facts: dict[str, Any] = field(default_factory=dict)  # settings of the model: vocab, classes, size
    vocabulary: list[str] | None = None  # words by id, if built from the data
    documents: int = 1  # per example
    classes: list[str] | None = None  # names by label, if built from the data
    tokenizer: str | None = None  # as text, if built from the data
    whole: bool = False  # the test part is all of it, see `Known.whole`
    tokens: dict[str, list[int]] = field(default_factory=dict)  # of each text by split, before it is cut to `length`

    def rows(self, split: str) -> int:
        return len(next(iter(getattr(self, split).values())))


@dataclass
class Known:
    """The meaning of ids and labels for a trained model. A run stores it, because the data may change later."""

    facts: dict[str, Any]
    vocabulary: list[str] | None = None
    classes: list[str] | None = None
    tokenizer: str | None = None
    length: int = 0
    whole: bool = False  # for evaluations of other data: hold nothing out, data without parts is one test part


@dataclass
class Gallery:
    """Images for the pages of `weft report` and `weft inspect`: (height, width, 3) bytes with a caption each."""

    title: str
    note: str
    images: list[tuple[Tensor, str]]

    def part(self) -> Part:
        """The gallery as a part of a page."""
        return gallery(self.title, [(_png(image), caption) for image, caption in self.images], self.note)


def _png(image: Tensor) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image.cpu().numpy()).save(buffer, "png")
    return buffer.getvalue()


class Task:
    """Base class of all tasks. `batch` and `loss` get rows that are already on the device."""

    name: ClassVar[str]
    about: ClassVar[str]
    metric: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True
    defaults: Mapping[str, Any] = {}
    presets: Mapping[str, Mapping[str, Any]] = {}
    models: ClassVar[tuple[str, ...]] = ("transformer",)  # allowed values of config.model
    splits: ClassVar[bool] = False  # whether it has `part` and `count`, for context parallelism
    uneven: ClassVar[bool] = False  # examples differ in their number of targets: `count` weighs the parts of a step
    streams: ClassVar[bool] = False  # rows are consecutive pieces of parallel texts, used in order
    hosts: ClassVar[str] = ""  # AutoModelFor… of transformers, if --model hf:NAME is supported
    answers: ClassVar[str] = "logits"  # what the model returns: logits, values, or nll (of each target); for ensembles
    draws: ClassVar[bool] = False  # a complete run keeps its galleries for `weft report`
    class_names: ClassVar[Sequence[str]] = ()  # the names of the classes, if they do not come from the data
    # The task-specific config fields that this task reads; others raise an error.
    reads: frozenset[str] = frozenset({"max_length", "pooling", "image_size", "patch", "mask_rate", "augment"})

    def check(self, config: TrainConfig) -> None:
        """Raise ValueError for invalid settings, before the data is loaded."""
        if self.hosts and config.hosted:
            from .hosts import check_hosted

            check_hosted(config)
        elif config.model not in self.models:
            known = [*self.models, *(["hf:NAME"] if self.hosts else [])]
            raise ValueError(f"{self.name} supports --model {', '.join(known)}; got {config.model!r}")

    def unread(self, config: TrainConfig) -> tuple[str, ...]:
        """Config fields that the model of this config does not read; values other than the task's raise an error."""
        if config.hosted:
            return *SIZES, "drop_path"
        return {"transformer": ("model_options",), "crate": ("attention_dropout",)}.get(config.model, ())

    def load(self, config: TrainConfig) -> TaskData:
        raise NotImplementedError

    def load_again(self, config: TrainConfig, known: Known) -> TaskData:
        """Load data for an existing run, with its vocabulary, classes and tokenizer instead of new ones. Tasks that
        build any of these from the data derive from `BuiltFromData`."""
        return self.load(config)

    def model(self, config: TrainConfig, data: TaskData) -> nn.Module:
        raise NotImplementedError

    def batch(self, rows: Columns, config: TrainConfig, generator: torch.Generator, training: bool) -> Columns:
        """Prepare rows from the data: augmentation, masking. The generator depends only on the step."""
        return rows

    def on_host(self, config: TrainConfig) -> bool:
        """Whether training rows go through `ahead` before `batch`."""
        return False

    def ahead(self, rows: Columns, config: TrainConfig, generator: torch.Generator) -> Callable[[], Columns]:
        """Start slow work on the training rows of the next step, on the CPU; the returned function gives its result,
        which `batch` gets on the device."""
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Columns, config: TrainConfig) -> Tensor:
        """The mean training loss."""
        raise NotImplementedError

    def part(self, batch: Columns, tokens: slice) -> Columns:
        """The batch with only these tokens of every sequence. Their losses must add up to those of the whole."""
        raise NotImplementedError

    def count(self, batch: Columns) -> Tensor:
        """The number of targets whose losses `loss` averages."""
        raise NotImplementedError

    def score(self, model: nn.Module, batch: Columns) -> dict[str, Tensor]:
        """Values per example (B,), whose sums `summary` needs, including "loss" and "count"."""
        raise NotImplementedError

    def summary(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Compute the metrics from sums over all examples."""
        raise NotImplementedError

    def inputs(self, batch: Columns) -> tuple[Tensor, ...]:
        """The model's arguments."""
        raise NotImplementedError

    def encode(self, examples: Sequence[Any], known: Known) -> Columns:
        """Examples of the user, such as texts, as rows for `inputs`, without labels. If long ones are cut, the column
        "tokens" has the number of tokens that each example had."""
        raise ValueError(f"the task {self.name} does not support predictions on your own examples")

    def overlapping(self, rows: Columns, stride: int) -> Columns:
        """Rows of a text as overlapping windows, for evaluation with more context."""
        raise ValueError(f"{self.name} has no text that could be cut into overlapping windows: remove --stride")

    def galleries(self, model: nn.Module, data: TaskData, config: TrainConfig) -> list[Gallery]:
        """Images that show what the model does."""
        return []

    def decode(self, out: Tensor, rows: Columns, known: Known) -> list[dict[str, Any]]:
        """The model's output for the rows of `encode`, as a dictionary per example."""
        raise ValueError(f"{self.name} is not a classifier; use `weft generate` for language models")

    def own_gallery(self, model: nn.Module, files: Sequence[Path], known: Known) -> Gallery | None:
        """What the model finds in image files of the user, if it is not a classifier."""
        return None

    def next_command(self, run: str) -> str:
        """What to do with a finished run, whose folder is given as a shell needs it."""
        return f"weft inspect {run}"

    def begin(self, model: nn.Module, weights: Columns) -> bool:
        """Initialise from another run's weights, for tasks whose model may differ from that run's.

        Return False if the models must be the same; the lab then loads the whole state.
        """
        return False

    def restart(self, model: nn.Module) -> None:
        """The streams start again: clear the model's memory."""

    def evaluating(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context manager around an evaluation, to preserve state such as memories."""
        return nullcontext()


def cut_note(tokens: Sequence[int], most: int) -> str:
    """What is left out of texts with these numbers of tokens; empty if nothing is."""
    over = [count for count in tokens if count > most]
    if not over:
        return ""
    share = (sum(over) - most * len(over)) / sum(tokens)
    return (
        f"note: {len(over):,} of {len(tokens):,} texts have more than {most:,} tokens (up to {max(over):,}) and are "
        f"cut, which leaves out {share:.1%} of all tokens; --max-length of weft train sets this limit"
    )


class BuiltFromData:
    """Mixin for tasks that build their vocabulary, classes or tokenizer from the data: they define `read`."""

    def read(self, config: TrainConfig, known: Known | None) -> TaskData:
        """Load the data; with `known`, use its meaning of ids and labels."""
        raise NotImplementedError

    def load(self, config: TrainConfig) -> TaskData:
        return self.read(config, None)

    def load_again(self, config: TrainConfig, known: Known) -> TaskData:
        return self.read(config, known)


class Classification(Task):
    """Tasks whose batches have a "label" and whose models return class logits."""

    def decode(self, out: Tensor, rows: Columns, known: Known) -> list[dict[str, Any]]:
        probability, label = out.softmax(-1).max(-1)
        names = known.classes or self.class_names or [str(i) for i in range(out.shape[-1])]
        pairs = zip(label.tolist(), probability.tolist(), strict=True)
        return [{"answer": names[i], "probability": p} for i, p in pairs]

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

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        """Encoders compute only what is read, as in training."""
        from ..models import TextEncoder

        encoders = [module for module in model.modules() if isinstance(module, TextEncoder)]
        for encoder in encoders:
            encoder.only_read = True
        try:
            yield
        finally:
            for encoder in encoders:
                encoder.only_read = False


def ids_and_segments(batch: Columns) -> tuple[Any, ...]:
    """The arguments of a text classifier. A packed batch has `segments`, and `mask` if all its tokens are real."""
    ids = batch["ids"].long()
    return (ids, batch.get("mask"), batch["segments"]) if "segments" in batch else (ids,)


class StudyTask(Classification):
    """A task of the wide-attention study, with models and options from `weft.models.presets`.

    Options of the config override the study's. Mechanisms that are not in the study use their own defaults.
    """

    models = ("transformer", "crate")
    reads = frozenset({"max_length", "pooling", "packed", "norm", "qk_norm"})

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
        # Bounds the attention logits, whose growth makes deep models collapse (experiments/wide/README.md).
        self.presets["stable"] = {"clip": 1.0, "qk_norm": True}
        # As many examples as in the study, in half as many steps.
        self.presets["modern"] = dict(
            positions="rope", norm="rms", qk_norm=True, optimizer="adamw", weight_decay=0.05, clip=1.0,
            learning_rate=1e-3, schedule="cosine", steps=study.steps // 2, warmup=study.steps // 20, batch_size=64,
        )  # fmt: skip

    def inputs(self, batch: Columns) -> tuple[Tensor, ...]:
        return ids_and_segments(batch)

    def model(self, config: TrainConfig, data: TaskData) -> nn.Module:
        from ..models.presets import lra

        if config.model == "crate":
            return crate_text(config, data)
        if isinstance(config.mechanisms(), list):
            raise ValueError(f"{config.task} does not support lists of mechanisms: use --attention mixed")
        options: dict[str, Any] = {
            key: value
            for key, value in dict(
                pooling=config.pooling,
                positions=config.positions,
                attention_dropout=config.attention_dropout,
                attention_options=config.options(),
                **norm_options(config),
            ).items()
            if value not in ("", None, {})
        }
        default = "mean" if config.attention == "sinkhorn" else "cls" if data.documents == 1 else "first"
        options["max_length"] = data.length + (options.get("pooling", default) == "cls")
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

    models: ClassVar[tuple[str, ...]] = ("transformer", "crate")
    padded: ClassVar[bool] = True  # whether examples differ in length

    def inputs(self, batch: Columns) -> tuple[Tensor, ...]:
        return ids_and_segments(batch)

    def model(self, config: TrainConfig, data: TaskData) -> nn.Module:
        from ..models import TextClassifier

        if "hf" in data.facts:
            from .hosts import hosted_model

            return hosted_model(config, data.facts, self.hosts, data.length)
        if config.model == "crate":
            return crate_text(config, data)
        pooling = config.pooling or "cls"
        model = TextClassifier(
            data.facts["vocab"],
            data.facts["classes"],
            max_length=data.length + (pooling == "cls"),
            pooling=pooling,
            positions=config.positions or "sinusoid",
            **block_options(config),
        )
        model.encoder.padded = self.padded
        return model


def crate_text(config: TrainConfig, data: TaskData) -> nn.Module:
    """The white-box classifier of single documents."""
    from ..models import CRATEText

    if data.documents != 1:
        raise ValueError("--model crate supports only single documents: use --model transformer for matching")
    options = {"max_length": data.length + 1, "pooling": config.pooling or "cls", **crate_options(config)}
    return CRATEText(data.facts["vocab"], data.facts["classes"], **options)


def crate_options(config: TrainConfig) -> dict[str, Any]:
    """Options of CRATE models from the config; they have no MLP, and one mechanism for all layers."""
    attention = config.mechanisms()
    if not isinstance(attention, str) or attention == "mixed":
        raise ValueError("--model crate supports a single mechanism, not a mixture: query, key and value are the same")
    if config.positions or norm_options(config):
        raise ValueError("--model crate has its own positions and norms: remove --positions, --norm and --qk-norm")
    options = dict(dim=config.dim, heads=config.heads, head_dim=config.head_dim, layers=config.layers)
    own = {**config.options(), **config.options("model_options")}
    return {**options, "dropout": config.dropout, "attention": attention, **own}


def block_options(config: TrainConfig) -> dict[str, Any]:
    """Options of models with blocks from the config."""
    if config.attention == "mixed":
        raise ValueError("--attention mixed is only for the study's four tasks: join names with '+' instead")
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
        **norm_options(config),
    )


def norm_options(config: TrainConfig) -> dict[str, Any]:
    """Options that not every model has, if they are set."""
    given = {"norm": config.norm, "qk_norm": config.qk_norm, "mlp_dropout": config.mlp_dropout}
    return {name: value for name, value in given.items() if value != getattr(TrainConfig, name)}
