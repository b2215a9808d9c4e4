"""Everything a run checks and loads before its first step."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..tasks import TaskData
from ..tasks.base import Task
from ..tasks.config import TrainConfig
from .checkpoint import CannotSave, Checkpoints, DamagedCheckpoint
from .kept import Kept, OtherData, check_data, check_numbers, describe, load_kept, read_kept
from .processes import Processes
from .run import Run
from .saving import saved_weights
from .state import collect, restore_model
from .trained import is_exported, load, own_files

Saved = tuple[dict[str, Tensor], dict[str, Any]]


def claim(run: Run, config: TrainConfig, resume: bool) -> None:
    """Check that the folder is free or belongs to this run. Writes only the lock."""
    folder = run.folder
    started = (folder / "config.json").exists()
    if started:
        run.lock()
    run.check(config, resume)
    if started:
        return
    here = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not here.is_dir() or not os.access(here, os.W_OK):
        raise CannotSave(f"could not create {folder}: {here} is not a writable folder")


def newest_checkpoint(checkpoints: Checkpoints, run: Run, processes: Processes) -> Saved | None:
    newest = checkpoints.newest()
    step = newest[1]["step"] if newest is not None else 0
    if processes.any(processes.fabric.broadcast(step) != step):
        raise DamagedCheckpoint(f"the processes find different checkpoints in {checkpoints.folder}")
    if newest is None and (run.folder / "config.json").exists():
        checkpoints.say("no checkpoint yet: starting from the beginning")
    return newest


def load_data(
    task: Task, config: TrainConfig, run: Run, newest: Saved | None, processes: Processes, say: Callable[[str], None]
) -> tuple[TaskData, Kept]:
    """Load the data; when resuming, as the run loaded it before, with an error if it has changed."""
    if newest is None:
        data = task.load(config)
        kept = describe(data)
        known = processes.fabric.broadcast(kept.known)
        if known.tokenizer != kept.tokenizer:  # the training of a unigram tokenizer is not deterministic
            data = task.load_again(config, known)
            kept = describe(data)
    else:
        data, recorded = load_kept(task, config, run, say=say)
        kept = recorded or describe(data)
        check_numbers(run, config, recorded, newest[1])
    check_data(task, config, data)
    if processes.fabric.broadcast(kept.digest) != kept.digest:
        raise OtherData(f"process {processes.rank} found different data in {config.data} than process 0")
    return data, kept


def start_from(folder: Path, model: nn.Module, task: Task, kept: Kept) -> None:
    """Load the last weights of another run, or those of an exported model (`init_from`)."""
    if is_exported(folder):
        tensors, extra = collect(load(folder).model, None)
    else:
        tensors, numbers = saved_weights(Run(folder), "last")
        extra = numbers["extra"]
    weights = {k.removeprefix("model/"): v for k, v in tensors.items() if k.startswith("model/")}
    if task.begin(model, weights):
        return
    was = read_kept(own_files(folder))
    for name in ("vocabulary", "classes", "tokenizer"):
        if was is not None and was.record[name] != kept.record[name]:
            raise OtherData(f"init_from: {folder} was trained with a different {name}")
    restore_model(model, tensors, extra)
