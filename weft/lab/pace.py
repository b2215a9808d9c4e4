"""`--time-budget MINUTES`: choose the number of steps by timing a few.

    steps = 60 · minutes / seconds per step

A trial with its own model trains a few steps and is discarded; then the run has a fixed number of steps, so that its
schedule, losses and resume are those of any run with these steps. Warm-up, evaluations and checkpoints keep their
fraction of the steps (the warm-up of inverse_sqrt its steps, because its peak depends on them). Evaluations,
checkpoints and compilation are not counted. `config.json` has the chosen numbers; a resumed run keeps them.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from typing import TYPE_CHECKING

import torch

from ..tasks.config import TrainConfig
from .run import Run
from .say import say

if TYPE_CHECKING:
    from .loop import Training

SCALED = ("eval_every", "checkpoint_every")
CHOSEN = ("steps", "warmup", *SCALED)  # what `--time-budget` replaces
WARM, TIMED, LONGEST = 3, 50, 10.0  # steps before the clock starts, timed steps, and the most seconds for them


def with_steps(config: TrainConfig, folder: Run, resume: bool) -> TrainConfig:
    """The config with the numbers of an earlier launch, or those for `config.time_budget`."""
    if resume and folder.computed():
        return keep_steps(config, folder.config())
    each = seconds_per_step(config)
    config = scaled(config, max(1, round(60 * config.time_budget / each)))
    say(f"{1000 * each:.1f} ms per step: {config.steps:,} steps in {config.time_budget:g} minutes")
    return config


def keep_steps(config: TrainConfig, old: TrainConfig) -> TrainConfig:
    return dataclasses.replace(config, **{name: getattr(old, name) for name in CHOSEN})


def scaled(config: TrainConfig, steps: int) -> TrainConfig:
    names = SCALED if config.schedule == "inverse_sqrt" else ("warmup", *SCALED)
    parts = {name: round(getattr(config, name) * steps / config.steps) for name in names}
    for name in parts:
        if getattr(config, name):
            parts[name] = max(1, parts[name])
    return dataclasses.replace(config, steps=steps, **parts)


def seconds_per_step(config: TrainConfig) -> float:
    """The mean over the run; subsampled attention with a dense finish is timed in both states."""
    from .loop import Training

    endless = dataclasses.replace(config, steps=10**9, logger="")
    trial = Training(endless, folder=Run(config.folder() / "trial"))  # writes nothing before its first checkpoint
    trial.main = False  # prints nothing
    dense = config.finetune_dense_at
    found = _time(trial)
    if dense:
        trial._turn_dense()
        found = dense * found + (1 - dense) * _time(trial)
    del trial
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def _time(trial: Training) -> float:
    def run(steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            trial.step += 1
            trial._update(trial.step)
        loss = trial.pending[-1].item()  # waits for the device
        trial.pending.clear()
        if not math.isfinite(loss):
            raise ValueError(f"the loss of step {trial.step} is {loss}: --time-budget could not time the steps")
        return time.perf_counter() - began

    run(WARM)
    each = run(WARM) / WARM
    count = max(1, min(TIMED, int(LONGEST / each)))
    return run(count) / count
