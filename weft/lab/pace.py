"""`--time-budget MINUTES`: train for this time, with the number of steps that fits.

    steps = work that fits into the time left / work per step,    work = seconds, as timed in a trial

The time is that of the whole run up to its last step: loading, compilation, evaluations and checkpoints count, only the
final test does not. A trial with its own model trains a few steps and is discarded. Its speed gives the first number of
steps, and warm-up, evaluations and checkpoints their fraction of them (the warm-up of inverse_sqrt keeps its steps,
because its peak depends on them). The first step corrects all of them, because the run starts in less time than the
trial if it finds compiled code on disk. Every evaluation corrects the number of steps by the speed since the first
one, so that the run ends in time when other programs use the device; the schedule follows. `config.json` has the
newest numbers; a resumed run keeps them.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..tasks.config import TrainConfig
from .run import Run
from .say import say

if TYPE_CHECKING:
    from .loop import Training

SCALED = ("eval_every", "checkpoint_every")
CHOSEN = ("steps", "warmup", *SCALED)  # what `--time-budget` replaces
WARM, TIMED, LONGEST = 3, 20, 3.0  # steps before the clock starts, timed steps, and the most seconds for them
clock = time.perf_counter


@dataclass
class Plan:
    """How many steps fit until `ends`. A step takes `each` seconds if the device is as free as in the trial, and
    `dense` seconds after subsampled attention has become dense."""

    asked: TrainConfig  # before the steps were chosen
    ends: float
    each: float
    dense: float
    step: int = 0  # of the last call
    work: float = 0.0  # seconds that the steps so far would have taken in the trial
    first: tuple[float, float] | None = None  # time and work of the first evaluation; it compiled

    def after_start(self, config: TrainConfig) -> TrainConfig:
        """The numbers after the first step, if the time to start was not that of the trial."""
        steps = max(1, 1 + round((self.ends - clock()) / self.mean(config)))
        return config if abs(steps - config.steps) <= 0.05 * config.steps else scaled(self.asked, steps)

    def steps(self, training: Training) -> int:
        """The new number of steps, after an evaluation."""
        now, step, config = clock(), training.step, training.config
        sampled = step - self.step
        if training.is_dense:
            sampled = min(max(0, training.dense_from - self.step), sampled)
        self.work += sampled * self.each + (step - self.step - sampled) * self.dense
        self.step = step
        if self.first is None:
            self.first = now, self.work
        slower = (now - self.first[0]) / (self.work - self.first[1]) if self.work > self.first[1] else 1.0
        left = (self.ends - now) / slower
        if training.is_dense:
            return max(step, step + round(left / self.dense))
        return max(step, round((self.work + left) / self.mean(config)))

    def mean(self, config: TrainConfig) -> float:
        """Seconds per step over the whole run."""
        sampled = config.finetune_dense_at or 1.0
        return sampled * self.each + (1 - sampled) * self.dense


def with_steps(config: TrainConfig, folder: Run, resume: bool) -> tuple[TrainConfig, Plan | None]:
    """The config with the numbers of an earlier launch, or those for `config.time_budget` and its plan."""
    if resume and folder.computed():
        return keep_steps(config, folder.config()), None
    began = clock()
    plan = Plan(config, began + 60 * config.time_budget, *seconds_per_step(config))
    now = clock()
    each = plan.mean(config)
    # The run will take as long to start as the trial.
    config = scaled(config, max(1, round((plan.ends - now - (now - began)) / each)))
    say(f"{1000 * each:.1f} ms per step: about {config.steps:,} steps in {config.time_budget:g} minutes")
    return config, plan


def keep_steps(config: TrainConfig, old: TrainConfig) -> TrainConfig:
    return dataclasses.replace(config, **{name: getattr(old, name) for name in CHOSEN})


def scaled(config: TrainConfig, steps: int) -> TrainConfig:
    names = SCALED if config.schedule == "inverse_sqrt" else ("warmup", *SCALED)
    parts = {name: round(getattr(config, name) * steps / config.steps) for name in names}
    for name in parts:
        if getattr(config, name):
            parts[name] = max(1, parts[name])
    return dataclasses.replace(config, steps=steps, **parts)


def seconds_per_step(config: TrainConfig) -> tuple[float, float]:
    """Of the run's steps, and of those after subsampled attention has become dense."""
    from .loop import Training

    endless = dataclasses.replace(config, steps=10**9, logger="")
    trial = Training(endless, folder=Run(config.folder() / "trial"))  # writes nothing before its first checkpoint
    trial.main = False  # prints nothing
    each = dense = _time(trial)
    if config.finetune_dense_at:
        trial.turn_dense()
        dense = _time(trial)
    del trial
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return each, dense


def _time(trial: Training) -> float:
    def run(steps: int) -> float:
        began = clock()
        for _ in range(steps):
            trial.step += 1
            trial._update(trial.step)
        loss = trial.pending[-1].item()  # waits for the device
        trial.pending.clear()
        if not math.isfinite(loss):
            raise ValueError(f"the loss of step {trial.step} is {loss}: --time-budget could not time the steps")
        return clock() - began

    run(WARM)
    each = run(WARM) / WARM
    count = max(1, min(TIMED, int(LONGEST / each)))
    return run(count) / count
