"""The config of a run: one flat dataclass. Every field is an option of `weft train`; its comment is the help text."""

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


@dataclass
class TrainConfig:
    task: str = "digits"  # task name, see `weft list`, or a Python file that defines it (FILE.py or FILE.py:NAME)
    task_file: str = ""  # Python file that defines the task or the attention; empty for those of weft or a package
    preset: str = ""  # settings from a paper, see `weft list`; your options override them
    out: str = ""  # folder of the run; empty: runs/TASK-MODEL-ATTENTION-LAYERSxHEADS-sSEED
    data: str = "data"  # folder that contains the data sets, or the file or folder of this task's data
    seed: int = 0  # seed for weights, data order and dropout
    init_from: str = ""  # folder of a run of the same model, or of its export; start from its last good weights

    # the model
    model: str = "transformer"  # transformer or crate; images: crate-tiny …, pvt-tiny …, timm:NAME; hf:TYPE or hf:PATH
    model_options: str = ""  # options of a model with its own name, as JSON: '{"depth": 6}'
    attention: str = "full"  # a registered mechanism, several joined by '+' for a mixed layer, or the study's 'mixed'
    attention_options: str = ""  # options of the mechanism, as JSON: '{"block_size": 50}'
    cache: float = 0.0  # add a gated recurrent cache to every attention layer, for this ratio of channels; 0: none
    cache_options: str = ""  # options of the caches, as JSON: '{"length": 64}'
    subsample: str = ""  # train with subsampled attention, by a schedule such as S12-L8; needs full attention
    sigma: float = 0.2  # displacement of sampled sources, as a fraction of the length
    sigma_last: float = 0.0  # sigma of the deepest layer, linear in between; 0: same as sigma
    layers: int = 6  # number of blocks
    heads: int = 8  # heads per layer
    head_dim: int = 64  # width of a head; does not have to be dim / heads
    dim: int = 512  # width of the model
    mlp_dim: int = 2048  # hidden width of the feed-forward layers
    max_length: int = 0  # tokens per example; 0: the task's default
    dropout: float = 0.1  # dropout of embeddings, sub-layer outputs and hidden layers
    attention_dropout: float | None = None  # dropout of attention probabilities; default: same as dropout
    mlp_dropout: float | None = None  # dropout inside the feed-forward layers; default: same as dropout
    positions: str = ""  # sinusoid, learned, rope or none; language models also alibi; empty: the model's default
    norm: str = "layer"  # layer or rms: the normalisation of a block's inputs
    qk_norm: bool = False  # normalise queries and keys, which bounds the attention logits
    pooling: str = ""  # cls, mean or first; empty: the model's default
    image_size: int = 0  # side of the images, image classification only; 0: the task's default
    packed: bool = False  # put the documents of a batch side by side instead of padding them, text classification only
    patch: int = 4  # side of a patch, image classification only
    eval_stride: int = 0  # overlap evaluation windows and score only this many last tokens of each; 0: no overlap
    initial: str = ""  # authors: start with the weights of the paper's code, enwik8 only; empty: weft's usual ones
    mask_rate: float = 0.15  # fraction of masked tokens, masked language modelling only
    augment: bool = True  # random crops and flips, images only
    augmentation: str = ""  # timm's transforms instead: color, or a name such as rand-m9-mstd0.5-inc1, images only
    mixup: float = 0.0  # alpha of timm's mixup, image classification only; 0: none
    cutmix: float = 0.0  # alpha of timm's CutMix, image classification only; 0: none
    drop_path: float = 0.0  # rate of dropped branches in the last block, linear from 0, image classification only
    tokenizer: str = ""  # bytes, words, bpe:SIZE, unigram:SIZE or a tokenizer.json; your own texts only
    text_column: str = ""  # column of the texts, your own tables only; empty: one with a usual name, such as text
    label_column: str = ""  # column of the labels, your own tables only; empty: one with a usual name, such as label
    skip_unlabelled: bool = False  # leave out rows without a label, your own tables only

    # optimisation
    steps: int = 10_000  # number of weight updates
    time_budget: float = 0.0  # minutes up to the last step: train for as many steps as fit; 0: use steps
    batch_size: int = 32  # examples per device and micro-step
    accumulate: int = 1  # micro-steps per update
    optimizer: str = "adam"  # adam, adamw or lion
    learning_rate: float = 0.05  # peak learning rate; for inverse_sqrt the base, with a peak of base / sqrt(warmup)
    schedule: str = "inverse_sqrt"  # inverse_sqrt, cosine, linear, constant or steps, each after a linear warm-up
    warmup: int = 1000  # steps of linear warm-up
    final_learning_rate: float = 0.0  # final learning rate of cosine and linear
    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.98  # decay of the second moment
    eps: float = 1e-9  # added to Adam's denominator
    weight_decay: float = 0.0  # on matrices only; decoupled for adamw and lion
    clip: float = 0.0  # maximum gradient norm; 0: no clipping
    label_smoothing: float = 0.0  # fraction of the target spread over all classes
    layer_decay: float = 1.0  # learning rate of each layer relative to the next one (timm's layer decay); 1: equal
    ema: float = 0.0  # decay of the moving average of the weights, which is then evaluated and tested; 0: none
    finetune_dense_at: float = 0.0  # fraction of the steps after which subsampled attention becomes dense; 0: never

    # logging and checkpoints
    log_every: int = 20  # steps between checks of the losses (each check synchronises with the device)
    eval_every: int = 200  # steps between evaluations on validation data; 0: only at the end
    eval_batches: int = 0  # batches of the task's default batch_size per evaluation during training; 0: all
    checkpoint_every: int = 200  # steps between checkpoints
    keep: int = 2  # number of latest checkpoints to keep in addition to the best
    ensemble: int = 0  # test this many sub-models of subsampled attention together; 0: test the dense model
    test_on: str = "best"  # weights to test: best on validation data, last, or average (of the kept checkpoints)
    diverge_at: float = 5.0  # stop if the mean of 20 consecutive losses exceeds this multiple of the first; 0: never
    logger: str = ""  # also log to tensorboard (in the run's folder) or wandb; empty: to metrics.jsonl only

    # hardware
    precision: str = "32-true"  # 32-true, bf16-mixed, 16-mixed, bf16-true or 64-true
    compile: bool = False  # torch.compile the model
    checkpoint_activations: bool = False  # recompute each block in the backward pass instead of storing it
    offload: bool = False  # with checkpoint_activations: keep the inputs of the blocks in CPU memory
    accelerator: str = "auto"  # cpu, cuda, mps or auto
    devices: int = 1  # processes per node
    nodes: int = 1  # number of nodes; start one process per device with torchrun
    strategy: str = "auto"  # auto (one process, or ddp), ddp, fsdp
    context_parallel: int = 1  # processes that share each sequence; their number must divide that of all processes

    @property
    def hosted(self) -> bool:
        """Whether the model is one of transformers."""
        return self.model.startswith("hf:")

    def options(self, field: str = "attention_options") -> dict[str, Any]:
        """The JSON of a field, as a dictionary."""
        text = getattr(self, field)
        try:
            options = json.loads(text or "{}")
        except json.JSONDecodeError as error:
            raise ValueError(f"{field} must be JSON such as '{{\"block_size\": 50}}': {error}") from None
        if not isinstance(options, dict):
            raise ValueError(f"{field} must be a JSON object, got {text}")
        return options

    def mechanisms(self) -> str | list[str]:
        """`attention` in the form that models take: a name, or a list for mixed attention."""
        from ..attention import attention_info

        if self.attention == "mixed":  # the study's mixture, for the tasks of the study
            return "mixed"
        names = self.attention.split("+")
        for name in names:
            attention_info(name)
        if len(names) > 1 and self.attention_options:
            raise ValueError("attention_options need a single mechanism; a mixed layer uses the defaults of each")
        return names if len(names) > 1 else names[0]

    def _check_options(self) -> None:
        from ..attention import attention_info
        from ..core.registry import check_options

        options, names = self.options(), self.mechanisms()
        if not options or names == "mixed":
            return
        known = attention_info(str(names)).options
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, list(known), n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"its options: {', '.join(known) or 'none'}"
                raise ValueError(f"attention_options: {names} has no option {name!r}; {hint}")
        try:
            check_options(str(names), options)
        except TypeError as error:
            raise ValueError(f"attention_options: {error}") from error

    def _check_read(self) -> None:
        """Reject settings that have no effect."""
        from .registry import task_of

        task = task_of(self)
        for name in OPTIONAL:
            if name not in task.reads and getattr(self, name) != getattr(TrainConfig, name):
                raise ValueError(f"{name} has no effect on the task {self.task}: remove --{name.replace('_', '-')}")
        set_by = {**task.defaults, **task.presets.get(self.preset, {})}
        for name in task.unread(self):
            if getattr(self, name) != set_by.get(name, getattr(TrainConfig, name)):
                raise ValueError(
                    f"--{name.replace('_', '-')} has no effect on --model {self.model} of the task {self.task}: remove "
                    "it, or set the model's own options with --model-options"
                )
        for name in () if self.subsample else ("sigma", "sigma_last"):
            if getattr(self, name) != set_by.get(name, getattr(TrainConfig, name)):
                raise ValueError(
                    f"{name} has no effect without --subsample: give a schedule such as S12-L8, or remove "
                    f"--{name.replace('_', '-')}; --attention subsampled has its own, in --attention-options"
                )

    def folder(self) -> Path:
        if self.out:
            return Path(self.out)
        attention = self.attention.replace("+", "-")
        if self.hosted:  # a name or a path; it has its own sizes
            place = Path(self.model.removeprefix("hf:"))
            name = place.parent.name or "config" if place.suffix == ".json" else place.name
            return Path("runs") / f"{self.task}-{name}-{attention}-s{self.seed}"
        return Path("runs") / f"{self.task}-{self.model}-{attention}-{self.layers}x{self.heads}-s{self.seed}"

    def check(self) -> None:
        """Reject invalid settings, before anything is loaded."""
        from .registry import task_of

        for name in (
            "layers", "heads", "head_dim", "dim", "mlp_dim", "steps", "batch_size", "accumulate", "log_every",
            "checkpoint_every", "keep", "devices", "nodes", "patch", "context_parallel",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in (
            "eval_every", "eval_batches", "warmup", "clip", "diverge_at", "learning_rate", "weight_decay",
            "final_learning_rate", "max_length", "eval_stride", "image_size", "sigma", "sigma_last", "eps",
            "mixup", "cutmix", "time_budget", "ensemble",
        ):  # fmt: skip
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number that is not negative, got {getattr(self, name)}")
        for name in (
            "dropout", "attention_dropout", "mlp_dropout", "label_smoothing", "finetune_dense_at", "mask_rate",
            "beta1", "beta2", "ema", "drop_path",
        ):  # fmt: skip
            if not 0.0 <= (getattr(self, name) or 0.0) < 1.0:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if not self.data:
            raise ValueError("data is empty: pass the folder or file of the data with --data")
        _one_of("optimizer", self.optimizer, ("adam", "adamw", "lion"))
        _one_of("schedule", self.schedule, ("inverse_sqrt", "cosine", "linear", "constant", "steps"))
        _one_of("test_on", self.test_on, ("best", "last", "average"))
        _one_of("strategy", self.strategy, ("auto", "ddp", "fsdp"))
        _one_of("precision", self.precision, ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true"))
        _one_of("accelerator", self.accelerator, ("auto", "cpu", "cuda", "mps", "gpu"))
        _one_of("positions", self.positions, ("", "sinusoid", "learned", "rope", "alibi", "none"))
        _one_of("initial", self.initial, ("", "authors"))
        _one_of("norm", self.norm, ("layer", "rms"))
        _one_of("logger", self.logger, ("", "tensorboard", "wandb"))
        _one_of("pooling", self.pooling, ("", "cls", "mean", "first"))
        for name in ("attention_options", "model_options", "cache_options"):
            self.options(name)
        self._check_read()  # first: it runs task_file, which may register the attention
        self._check_options()
        if not 0.0 < self.layer_decay <= 1.0:
            raise ValueError(f"layer_decay must be in (0, 1], got {self.layer_decay}")
        if self.ema and (self.strategy == "fsdp" or self.test_on == "average"):
            raise ValueError("ema does not support --strategy fsdp or --test-on average: remove one of them")
        if not 0.0 <= self.cache <= 1.0:
            raise ValueError(f"cache must be a ratio in [0, 1], got {self.cache}")
        if self.options("cache_options") and not self.cache:
            raise ValueError("cache_options has no effect without a cache: set the ratio with --cache")
        if self.finetune_dense_at and not self.subsample and "subsampled" not in self.attention:
            raise ValueError("finetune_dense_at needs subsampled attention: add --subsample or --attention subsampled")
        if self.ensemble and (self.finetune_dense_at or not self.subsample and "subsampled" not in self.attention):
            raise ValueError("ensemble needs subsampled attention to the end: use --subsample, no --finetune-dense-at")
        if self.ensemble and self.options("cache_options").get("eval_update"):
            raise ValueError("ensemble does not support caches with eval_update: remove one of them")
        if self.time_budget and self.devices * self.nodes > 1:
            raise ValueError("time_budget needs a single process: use --steps, or remove --devices and --nodes")
        if self.offload and not self.checkpoint_activations:
            raise ValueError("offload needs --checkpoint-activations: it moves the inputs of recomputed blocks")
        if self.context_parallel > 1:
            if not task_of(self).splits or self.hosted:
                raise ValueError(
                    f"context_parallel: {self.task} with --model {self.model} cannot split its sequences over "
                    "processes; use a language model of weft, such as text, enwik8 or lm"
                )
            if self.compile:
                raise ValueError("context_parallel does not support --compile: remove one of them")
        task_of(self).check(self)


# Fields that only some tasks read; see `Task.reads`.
OPTIONAL = (
    "max_length", "eval_stride", "pooling", "packed", "image_size", "patch", "mask_rate", "augment", "augmentation",
    "mixup", "cutmix", "drop_path", "tokenizer", "text_column", "label_column", "skip_unlabelled", "norm", "qk_norm",
    "mlp_dropout", "initial",
)  # fmt: skip

# Fields that may change on resume, because they do not affect the computation.
FREE_ON_RESUME = frozenset(
    "preset out data task_file batch_size accumulate log_every eval_batches checkpoint_every keep diverge_at "
    "logger compile checkpoint_activations offload accelerator devices nodes strategy context_parallel".split()
)


def make_config(task: str, preset: str = "", **given: Any) -> TrainConfig:
    """The task's defaults, overridden by the preset, and then by `given`; paths and dictionaries become texts."""
    from .registry import get_task, resolve

    for name, value in given.items():
        given[name] = str(value) if isinstance(value, Path) else json.dumps(value) if isinstance(value, dict) else value
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
    check_types(values)
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
    """Field name -> its comment."""
    found = re.findall(r"^    (\w+): [^#\n]+#\s*(.+)$", inspect.getsource(TrainConfig), flags=re.MULTILINE)
    return types.MappingProxyType(dict(found))


def to_json(config: TrainConfig) -> str:
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def from_json(text: str) -> TrainConfig:
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError(f"it must be an object with the fields of TrainConfig, got {text.strip()[:40]!r}")
    unknown = set(values) - set(field_types())
    if unknown:
        raise ValueError(f"it has fields that this version does not know: {', '.join(sorted(unknown))}")
    check_types(values)
    return TrainConfig(**values)


def check_types(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        kinds = typing.get_args(field_types()[name]) or (field_types()[name],)
        fits = any(isinstance(value, kind) and (kind is bool) == isinstance(value, bool) for kind in kinds)
        if not fits and not (float in kinds and type(value) is int):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise ValueError(f"{name} must be of type {wanted}, got {value!r}")


def differences(old: TrainConfig, new: TrainConfig) -> list[str]:
    """The fields that differ but must not change on resume."""
    names = [name for name in field_types() if name not in FREE_ON_RESUME]
    extends = old.schedule in ("inverse_sqrt", "constant") and not old.finetune_dense_at
    if extends or old.time_budget:  # the steps so far do not depend on the last step, or the clock chooses it
        names.remove("steps")
    found = [(name, getattr(old, name), getattr(new, name)) for name in names]
    return [f"{name}: {was!r} -> {now!r}" for name, was, now in found if was != now and not moved(name, was, now)]


def moved(name: str, was: Any, now: Any) -> bool:
    """Whether the values of a field are one file or folder in two places: a path that was given, or its last part, and
    the absolute path that a run stores."""
    if name == "init_from":
        return Path(was).name == Path(now).name
    if name not in ("tokenizer", "model") or not was or not now:
        return False
    paths = [Path(text.removeprefix("hf:")) for text in (was, now)]
    return paths[0].name == paths[1].name and any(path.is_absolute() or path.name == str(path) for path in paths)


def absolute(config: TrainConfig) -> TrainConfig:
    """With absolute paths, so that a run can be continued from any folder. What is not here has only a name, on the hub
    or inside the task."""

    def there(path: str) -> str:
        return str(Path(path).absolute()) if path and Path(path).exists() else path

    place = config.model.removeprefix("hf:")
    return dataclasses.replace(
        config,
        data=there(config.data),
        init_from=config.init_from and str(Path(config.init_from).absolute()),
        tokenizer=config.tokenizer if config.tokenizer in ("bytes", "words") else there(config.tokenizer),
        model=f"hf:{there(place)}" if config.hosted else config.model,
    )


def portable(config: TrainConfig) -> TrainConfig:
    """Without the paths of one machine: of files and folders, only the names."""

    def name(path: str) -> str:
        return Path(path).name if Path(path).is_absolute() else path

    place = config.model.removeprefix("hf:")
    model = f"hf:{name(place)}" if config.hosted else config.model
    return dataclasses.replace(config, out="", data=Path(config.data).name, init_from="", model=model,
                               tokenizer=name(config.tokenizer))  # fmt: skip


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(k for k in known if k)}; got {value!r}")
