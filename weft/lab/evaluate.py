"""Evaluate a model on a whole split, with the same result for any number of processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..adapt.ensemble import Members
from ..tasks import TaskData
from ..tasks.base import Task, cut_note
from ..tasks.config import TrainConfig
from ..tasks.registry import task_of
from .build import build_model
from .data import Packing, Rows, seed_everything, seed_of
from .kept import SPLITS, check_data, check_numbers, load_kept
from .run import Run
from .saving import saved_weights
from .say import say
from .split import Split
from .state import restore_model
from .trained import is_exported, load, own_files


class Stopped(Exception):
    """The evaluation was stopped early by a signal."""


@torch.no_grad()
def evaluate(
    fabric: Any,
    model: nn.Module,
    task: Task,
    rows: Rows,
    config: TrainConfig,
    *,
    batches: int = 0,
    stop: Callable[[], bool] = lambda: False,
    tell: Callable[[int, int], None] = lambda done, total: None,
    split: Split | None = None,
) -> dict[str, float]:
    """The task's metrics on these rows, or on the rows of `batches` batches of the task's default size, which do not
    depend on config.batch_size. The last batch is padded with rows that are not counted: every process gets the same
    number of batches, and a compiled model sees one shape."""
    was_training = model.training
    model.eval()
    seed_everything("evaluate", config.seed)  # for mechanisms that draw random numbers in every call
    per_call, device = config.batch_size, rows.device
    split = split or Split(fabric, config, 0)
    world, rank = split.world, split.rank
    chosen = np.arange(len(rows))
    if batches and task.streams:  # a stream must start at its beginning
        chosen = chosen[: batches * per_call * world]
    elif batches:  # spread over all rows, which may be sorted
        unit = task.defaults.get("batch_size", TrainConfig.batch_size)
        count = -(-len(rows) // unit)
        few = min(count, batches)
        chosen = np.concatenate([chosen[n * unit : (n + 1) * unit] for n in (i * count // few for i in range(few))])
    calls = -(-len(chosen) // (per_call * world))
    padded = np.pad(chosen, (0, calls * per_call * world - len(chosen)), mode="edge")
    index, counts = torch.from_numpy(padded).to(device), torch.arange(len(padded), device=device) < len(chosen)
    sums: dict[str, Tensor] = {}
    with task.evaluating(model), split.region():
        for number in range(calls):
            tell(number, calls)
            if stop():
                raise Stopped
            here = number * world + rank
            places = slice(here * per_call, (here + 1) * per_call)
            generator = torch.Generator(device=device).manual_seed(seed_of("evaluate", config.seed, here))
            batch = task.batch(rows.take(index[places]), config, generator, training=False)
            batch = rows.pack(batch, padded[places])
            for key, values in task.score(model, split.part(task, batch)).items():
                total = values.float().masked_fill(~counts[places], 0).sum(dtype=torch.float64)
                sums[key] = sums[key] + total if key in sums else total
    if fabric.world_size > 1:
        sums = {key: fabric.all_reduce(value, reduce_op="sum") for key, value in sums.items()}
    model.train(was_training)
    return task.summary({key: float(value) for key, value in sums.items()})


def evaluate_run(
    folder: str | Path,
    *,
    split: str = "test",
    which: str = "",
    ensemble: int | None = None,
    stride: int = 0,
    tell: Callable[[int, int], None] = lambda done, total: None,
    **changes: Any,
) -> tuple[dict[str, float], int]:
    """The metrics of a finished or interrupted run or of an exported model, and the step of its weights.

    `which` is "best", "last" or "average"; by default, the run's `test_on`. `ensemble` is the number
    of sub-models of subsampled attention that predict together; 0 for the dense model; by default, the run's. `stride`
    evaluates a language model on windows that start every `stride` tokens, and counts each token once, with most
    context. `changes` replace fields of the run's config, such as data, batch_size, accelerator. Other `data` without
    parts of its own, such as a single file, is one test part. `tell` is called with the batches done and their number.
    """
    from .fabric import make_fabric

    if split not in ("train", "val", "test"):
        raise ValueError(f"split must be train, val or test, got {split!r}")
    run = Run(own_files(Path(folder)), say=lambda text: say(text, error=True))
    config = run.config()
    streams = config.batch_size
    for name, value in changes.items():
        if not hasattr(config, name):
            raise TypeError(f"TrainConfig has no field {name!r}")
        setattr(config, name, value)
    config.compile, config.devices, config.nodes, config.strategy = False, 1, 1, "auto"
    config.context_parallel = 1
    config.check()
    task = task_of(config)
    if task.streams and config.batch_size != streams:
        raise ValueError(f"{config.task} reads a text as batch_size streams: evaluate it with batch_size {streams}")
    model, data, step = _load(Path(folder), run, config, which, split, other="data" in changes)
    if note := cut_note(data.tokens.get(split, []), data.length):
        run.say(note)
    fabric = make_fabric(config)
    fabric.launch()
    ensemble = config.ensemble if ensemble is None else ensemble
    if ensemble:
        model = Members(model, ensemble, task.answers)
    wrapped = fabric.setup_module(model)
    columns = getattr(data, split)
    packing = Packing.of(model) if config.packed else None
    rows = Rows(task.overlapping(columns, stride) if stride else columns, fabric.device, packing)
    return evaluate(fabric, wrapped, task, rows, config, tell=tell), step


def load_run(folder: str | Path, which: str = "", *, data: str = "") -> tuple[nn.Module, TrainConfig, TaskData]:
    """The trained model of a run or of an exported folder, in eval mode, with its config and data; `data` overrides
    the folder of the data."""
    run = Run(own_files(Path(folder)), say=lambda text: say(text, error=True))
    config = run.config()
    config.data = data or config.data
    config.check()
    model, found, _ = _load(Path(folder), run, config, which, other=bool(data))
    return model.eval(), config, found


def _load(
    folder: Path, run: Run, config: TrainConfig, which: str, split: str = "", *, other: bool
) -> tuple[nn.Module, TaskData, int]:
    """The run's model with its weights, its data, and the step of the weights; with `split`, only for an evaluation of
    this split."""
    exported = load(folder, which) if is_exported(folder) else None
    tensors, numbers = saved_weights(run, which or config.test_on) if exported is None else ({}, {})
    data, kept = load_kept(task_of(config), config, run, other=other, whole=other and bool(split), say=run.say)
    check_data(task_of(config), config, data, (split,) if split else SPLITS)
    if exported is not None:
        return exported.model, data, exported.step
    own = run.config()
    columns = {name: getattr(own, name) for name in ("text_column", "label_column", "skip_unlabelled")}
    check_numbers(run, dataclasses.replace(config, **columns), kept, numbers)  # other data may have other columns
    model = build_model(config, data)
    restore_model(model, tensors, numbers.get("extra", {}))
    return model, data, int(numbers["step"])
