"""What a run is made of: one flat dataclass. Every field is an option of `weft train`, its comment the help text."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..attention import attention_info


@dataclass
class TrainConfig:
    task: str = "digits"  # what to learn: a name of `weft list`, or a Python file that defines it (FILE.py:NAME)
    task_file: str = ""  # the Python file that defines the task; empty: weft or an installed package does
    preset: str = ""  # a named row of the papers, see `weft list`; its values yield to those given by hand
    out: str = ""  # the run's folder; empty: runs/TASK-MODEL-ATTENTION-LAYERSxHEADS-sSEED
    data: str = "data"  # the folder that holds the data sets, or the one file or folder of this task's data
    seed: int = 0  # weights, order of the data, dropout
    init_from: str = ""  # the folder of a run of the same model whose last good weights to begin with

    # the model
    model: str = "transformer"  # or crate; for images also crate-tiny (-base …), pvt-tiny (…), timm:NAME
    model_options: str = ""  # further options of a model with a name of its own, as JSON: '{"depth": 6}'
    attention: str = "full"  # a registered mechanism, several joined by '+' for a mixed layer, or the study's 'mixed'
    attention_options: str = ""  # the mechanism's own options, as JSON: '{"block_size": 50}'
    cache: float = 0.0  # ratio of channels with a gated recurrent cache around every attention layer; 0: none
    cache_options: str = ""  # options of these caches, as JSON: '{"length": 64}'
    subsample: str = ""  # train on random pathways, by a schedule such as S12-L8; needs full attention
    sigma: float = 0.2  # how local the pathways are, as a share of the length
    sigma_last: float = 0.0  # the same at the deepest layer, linear in between; 0: as sigma
    layers: int = 6  # blocks, one above the other
    heads: int = 8  # heads per layer
    head_dim: int = 64  # width of a head; free of dim / heads
    dim: int = 512  # width of the model
    mlp_dim: int = 2048  # hidden width of the feed-forward part
    max_length: int = 0  # tokens per example; 0: the task's own
    dropout: float = 0.1  # on embeddings, sub-layer outputs and hidden layers
    attention_dropout: float | None = None  # on attention probabilities; not given: as dropout
    positions: str = ""  # sinusoid or learned; language models also rope, alibi, none; empty: the model's own
    pooling: str = ""  # cls, mean or first; empty: the model's own
    image_size: int = 0  # side of the images, image classification only; 0: the task's own
    patch: int = 4  # side of a patch, image classification only
    mask_rate: float = 0.15  # share of tokens hidden, masked language modelling only
    augment: bool = True  # random crops and flips, image classification only

    # optimisation
    steps: int = 10_000  # updates of the weights
    batch_size: int = 32  # examples per device and micro-step
    accumulate: int = 1  # micro-steps per update
    optimizer: str = "adam"  # adam, adamw or lion
    learning_rate: float = 0.05  # the peak; for inverse_sqrt the base, whose peak is base / sqrt(warmup)
    schedule: str = "inverse_sqrt"  # inverse_sqrt, cosine, linear, constant or steps, each after a linear warm-up
    warmup: int = 1000  # steps of linear warm-up
    final_learning_rate: float = 0.0  # where cosine and linear end
    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.98  # decay of the second moment
    eps: float = 1e-9  # added to Adam's denominator
    weight_decay: float = 0.0  # on matrices only; decoupled for adamw and lion
    clip: float = 0.0  # largest norm of the gradient; 0: no clipping
    label_smoothing: float = 0.0  # share of the target spread over all classes
    finetune_dense_at: float = 0.0  # share of the steps after which subsampled attention turns dense; 0: never

    # looking and keeping
    log_every: int = 20  # steps between looks at the losses (each look waits for the device)
    eval_every: int = 200  # steps between evaluations on validation data; 0: only at the end
    eval_batches: int = 0  # batches per evaluation during training; 0: all of them
    checkpoint_every: int = 200  # steps between checkpoints
    keep: int = 2  # latest checkpoints kept besides the best
    test_on: str = "best"  # the weights to test: best on validation data, last, or average (of the checkpoints kept)
    diverge_at: float = 5.0  # stop when 20 losses in a row average over this many times the first; 0: never
    tensorboard: bool = False  # also write TensorBoard files (pip install 'weft[tensorboard]')

    # machinery
    precision: str = "32-true"  # 32-true, bf16-mixed, 16-mixed, bf16-true
    compile: bool = False  # torch.compile the model
    checkpoint_activations: bool = False  # recompute each block in the backward pass instead of storing it
    accelerator: str = "auto"  # cpu, cuda, mps or auto
    devices: int = 1  # processes per node
    nodes: int = 1  # nodes; start one process per device with torchrun
    strategy: str = "auto"  # auto (one process, or ddp), ddp, fsdp

    def options(self, field: str = "attention_options") -> dict[str, Any]:
        """A field that holds JSON, as a dictionary."""
        text = getattr(self, field)
        try:
            options = json.loads(text or "{}")
        except json.JSONDecodeError as error:
            raise ValueError(f"{field} must be JSON such as '{{\"block_size\": 50}}': {error}") from None
        if not isinstance(options, dict):
            raise ValueError(f"{field} must be a JSON object, got {text}")
        return options

    def mechanisms(self) -> str | list[str]:
        """`attention` as models take it: a name, or a list for mixed attention."""
        if self.attention == "mixed":  # the study's own mixture, for the tasks of the study
            return "mixed"
        names = self.attention.split("+")
        for name in names:
            attention_info(name)
        if len(names) > 1 and self.attention_options:
            raise ValueError("attention_options go with one mechanism; a mixed layer takes each one's defaults")
        return names if len(names) > 1 else names[0]

    def _check_options(self) -> None:
        options, names = self.options(), self.mechanisms()
        if not options or names == "mixed":
            return
        known = attention_info(str(names)).options
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, list(known), n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"its options: {', '.join(known) or 'none'}"
                raise ValueError(f"attention_options: {names} has no option {name!r}; {hint}")

    def _check_read(self) -> None:
        """Refuse settings that nothing would read."""
        from .registry import task_of

        read = task_of(self).reads
        for name in OPTIONAL:
            if name not in read and getattr(self, name) != getattr(TrainConfig, name):
                raise ValueError(f"{name}: the task {self.task} does not read it; leave --{name.replace('_', '-')} out")

    def folder(self) -> Path:
        if self.out:
            return Path(self.out)
        attention = self.attention.replace("+", "-")
        return Path("runs") / f"{self.task}-{self.model}-{attention}-{self.layers}x{self.heads}-s{self.seed}"

    def check(self) -> None:
        """Refuse what cannot be trained, before anything is loaded."""
        from .registry import task_of

        for name in ("layers", "heads", "head_dim", "dim", "mlp_dim", "steps", "batch_size", "accumulate", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("checkpoint_every", "keep", "devices", "nodes", "patch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in (
            "eval_every", "eval_batches", "warmup", "clip", "diverge_at", "learning_rate", "weight_decay",
            "final_learning_rate", "max_length", "image_size", "sigma", "sigma_last",
        ):  # fmt: skip
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number that is not negative, got {getattr(self, name)}")
        for name in ("dropout", "attention_dropout", "label_smoothing", "finetune_dense_at", "mask_rate"):
            if not 0.0 <= (getattr(self, name) or 0.0) < 1.0:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        _one_of("optimizer", self.optimizer, ("adam", "adamw", "lion"))
        _one_of("schedule", self.schedule, ("inverse_sqrt", "cosine", "linear", "constant", "steps"))
        _one_of("test_on", self.test_on, ("best", "last", "average"))
        _one_of("strategy", self.strategy, ("auto", "ddp", "fsdp"))
        _one_of("precision", self.precision, ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true"))
        _one_of("accelerator", self.accelerator, ("auto", "cpu", "cuda", "mps", "gpu"))
        _one_of("positions", self.positions, ("", "sinusoid", "learned", "rope", "alibi", "none"))
        _one_of("pooling", self.pooling, ("", "cls", "mean", "first"))
        for name in ("attention_options", "model_options", "cache_options"):
            self.options(name)
        self._check_options()
        self._check_read()
        if not 0.0 <= self.cache <= 1.0:
            raise ValueError(f"cache is a ratio in [0, 1], got {self.cache}")
        if self.finetune_dense_at and not self.subsample and "subsampled" not in self.attention:
            raise ValueError(
                "finetune_dense_at: nothing here is subsampled; give --subsample or --attention subsampled"
            )
        task_of(self).check(self)


# Fields that only some tasks read; see `Task.reads`.
OPTIONAL = ("max_length", "pooling", "image_size", "patch", "mask_rate", "augment")

# Fields that may differ between a run and its continuation: they do not change what is computed.
FREE_ON_RESUME = frozenset(
    "preset out data task_file batch_size accumulate log_every eval_batches checkpoint_every keep diverge_at "
    "tensorboard compile checkpoint_activations accelerator devices nodes strategy".split()
)


def make_config(task: str, preset: str = "", **given: Any) -> TrainConfig:
    """The task's defaults, then the preset's values, then those given."""
    from .registry import get_task, resolve

    task, given["task_file"] = resolve(task, given.get("task_file", ""))
    entry = get_task(task)
    if preset and preset not in entry.presets:
        known = ", ".join(sorted(entry.presets)) or "none"
        raise ValueError(f"{task} has no preset {preset!r}; its presets: {known}")
    values = {**entry.defaults, **(entry.presets[preset] if preset else {}), **given}
    unknown = [name for name in values if name not in field_types()]
    if unknown:
        near = difflib.get_close_matches(unknown[0], list(field_types()), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise TypeError(f"TrainConfig has no field {unknown[0]!r}{hint}")
    config = TrainConfig(task=task, preset=preset, **values)
    config.check()
    return config


@functools.cache
def field_types() -> dict[str, type]:
    """Field name -> its type, in the order of the dataclass."""
    hints = typing.get_type_hints(TrainConfig)
    return {field.name: hints[field.name] for field in dataclasses.fields(TrainConfig)}


@functools.cache
def field_help() -> Mapping[str, str]:
    """Field name -> the comment behind it."""
    found = re.findall(r"^    (\w+): [^#\n]+#\s*(.+)$", inspect.getsource(TrainConfig), flags=re.MULTILINE)
    return types.MappingProxyType(dict(found))


def to_json(config: TrainConfig) -> str:
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def from_json(text: str) -> TrainConfig:
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError(f"it must hold an object with the fields of TrainConfig, not {text.strip()[:40]!r}")
    unknown = set(values) - set(field_types())
    if unknown:
        raise ValueError(f"it has fields this version does not know: {', '.join(sorted(unknown))}")
    for name, value in values.items():
        kinds = typing.get_args(field_types()[name]) or (field_types()[name],)
        fits = any(isinstance(value, kind) and (kind is bool) == isinstance(value, bool) for kind in kinds)
        if not fits and not (float in kinds and type(value) is int):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise ValueError(f"{name} must be of type {wanted}, got {value!r}")
    return TrainConfig(**values)


def differences(old: TrainConfig, new: TrainConfig) -> list[str]:
    """The fields that may not differ between a run and its continuation, and do."""
    names = [name for name in field_types() if name not in FREE_ON_RESUME]
    if old.schedule in ("inverse_sqrt", "constant") and not old.finetune_dense_at:
        names.remove("steps")  # nothing computed so far depends on where the run ends: it may be made longer
    return [
        f"{name}: {getattr(old, name)!r} -> {getattr(new, name)!r}"
        for name in names
        if getattr(old, name) != getattr(new, name)
    ]


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(k for k in known if k)}; got {value!r}")
