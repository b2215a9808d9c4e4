"""What a run saves in its checkpoints, and how it continues from them.

A checkpoint has the weights and their average, the optimizer's state, the modules' own state and the numbers below. It
is written only if everything in it is finite.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .checkpoint import Checkpoints, DamagedCheckpoint, read
from .kept import OtherData
from .run import Run
from .state import AVERAGE, collect, not_finite, restore, with_average

if TYPE_CHECKING:
    from .loop import Training


def save(training: Training) -> None:
    """Write a checkpoint of this step. All processes call it, because they gather sharded weights together."""
    raw, optimizer, config = training.raw, training.inner_optimizer, training.config
    odd = not_finite(raw, optimizer)
    if training.processes.any(bool(odd)):
        training.diverged(f"the {odd or 'weights'} after step {training.step} are not finite")
    tensors, extra = collect(raw, optimizer, keep=training.main)
    if training.average is not None:
        tensors |= {f"{AVERAGE}{name}": own for name, own in training.average.weights.items()}
    if not training.main:
        return
    training.folder.sync()
    scaler = getattr(training.fabric.strategy.precision, "scaler", None)
    numbers = {
        "extra": extra,
        "best": training.best,
        "first_loss": training.losses.first,
        "per_step": training.per_step,
        "rows": len(training.rows),
        "dense": training.is_dense,
        "scaler": scaler.state_dict() if scaler is not None else None,
        "config": {k: v for k, v in dataclasses.asdict(config).items() if k not in ("out", "data")},
        "data": training.kept.digest,
    }
    training.checkpoints.save(training.step, tensors, numbers)


def check_reached(training: Training, step: int) -> None:
    """A run cannot end before the step it has reached."""
    if step > training.config.steps:
        reached = f"{training.folder.folder} is at step {step}"
        raise ValueError(f"{reached}: set --steps to at least that, or choose another --out")


def restore_run(training: Training, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    """Continue from this checkpoint."""
    if numbers["per_step"] != training.per_step:
        raise ValueError(
            f"the run uses {numbers['per_step']} examples per step, these settings {training.per_step}: choose "
            "batch_size and accumulate so that batch_size x accumulate x processes stays the same"
        )
    check_reached(training, numbers["step"])
    if numbers["rows"] != len(training.rows):
        raise OtherData(f"the run was trained on {numbers['rows']} examples, the data now has {len(training.rows)}")
    if numbers["dense"]:
        training.turn_dense()
    restore(training.raw, training.inner_optimizer, tensors, numbers["extra"])
    if training.average is not None:
        for name, own in training.average.weights.items():
            own.copy_(tensors[f"{AVERAGE}{name}"])
    scaler = getattr(training.fabric.strategy.precision, "scaler", None)
    if scaler is not None and numbers["scaler"]:
        scaler.load_state_dict(numbers["scaler"])
    step = training.step = training.restored = numbers["step"]
    best = training.checkpoints.best_until(step, numbers["best"]) if training.main else None
    training.best = training.fabric.broadcast(best)
    entries = [e for e in training.folder.entries("train") if e["step"] <= step] if training.main else []
    training.trained = max((entry["seconds"] for entry in entries if "seconds" in entry), default=0.0)
    losses = training.fabric.broadcast([entry["loss"] for entry in entries])
    training.losses.restore(numbers["first_loss"], losses)


def saved_weights(run: Run, which: str = "best") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and numbers of a run's best or last checkpoint; with "average", the mean weights of those kept. The
    weights are the moving average if the run has one."""
    if which not in ("best", "last", "average"):
        raise ValueError(f"which must be best, last or average, got {which!r}")
    kept = Checkpoints(run.checkpoints, say=run.say)
    if which == "best" and kept.best.exists():
        try:
            tensors, numbers = read(kept.best)
            return with_average(tensors), numbers
        except DamagedCheckpoint as error:
            raise DamagedCheckpoint(f"{error}. Use --which last for the newest valid one") from None
    newest = kept.newest()
    if newest is None:
        raise FileNotFoundError(f"{run.folder} has no readable checkpoint")
    tensors, numbers = newest
    if which == "average":
        if any(name.startswith(AVERAGE) for name in tensors):
            raise ValueError(f"{run.folder} has a moving average of its weights (--ema): use --which best or last")
        # Buffers such as caches and counters are not averaged.
        others = [read(kept.path(step))[0] for step in kept.steps() if step != numbers["step"]]
        averaged = {name.split("/")[1] for name in tensors if name.startswith("optimizer/")}
        for name in (f"model/{name}" for name in averaged):
            total = sum((other[name].double() for other in others), tensors[name].double())
            tensors[name] = (total / (1 + len(others))).to(tensors[name].dtype)
    return with_average(tensors), numbers
