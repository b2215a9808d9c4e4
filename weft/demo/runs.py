"""The models of digits: runs of the lab, two at a time, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .story import Scale

RUNS: dict[str, dict[str, Any]] = {
    "deep": dict(preset="deep"),
    "deep-killed": dict(preset="deep"),  # halfway, and resumed
    "wide": dict(preset="wide"),
    "pathways": dict(preset="deep", subsample="Sall-L2"),
    "cached": dict(preset="deep", cache=0.5),
    "crate": dict(model="crate", layers=4, learning_rate=4e-3),
}
VICTIM = "deep-killed"


class Failed(Exception):
    """A run has failed; the message is the end of its log."""


def train_all(out: Path, scale: Scale, note: Callable[[str], None], jobs: int = 2) -> int:
    """Train all models; returns the step at which one was killed."""
    # Fork the runs from a process that has imported everything once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["weft.lab.loop", "lightning.fabric", "sklearn.datasets"])
    waiting, killed_at = list(RUNS), 0
    active: dict[str, Any] = {}
    try:
        while waiting or active:
            while waiting and len(active) < jobs:
                name = waiting.pop(0)
                active[name] = context.Process(target=work, args=(str(out / name), RUNS[name], scale), daemon=True)
                active[name].start()
            note(", ".join(f"{name} {steps_done(out / name)}" for name in active) + f" of {scale.digits} steps")
            if not killed_at and VICTIM in active and steps_done(out / VICTIM) >= scale.digits // 2:
                active[VICTIM].kill()
                active.pop(VICTIM).join()
                killed_at = steps_done(out / VICTIM)
                waiting.insert(0, VICTIM)
            for name, process in list(active.items()):
                if process.exitcode is not None:
                    del active[name]
                    if process.exitcode:
                        raise Failed((out / name).with_suffix(".log").read_text()[-2000:])
            time.sleep(0.02)
    finally:
        for process in active.values():
            process.kill()
    return killed_at


def work(folder: str, settings: dict[str, Any], scale: Scale) -> None:
    """In the process of a run: train it, or continue it."""
    log = os.open(f"{folder}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    import torch

    from ..lab import make_config, train

    torch.set_num_threads(1)  # the models are too small to benefit from more
    settings = {**settings, "steps": scale.digits, "seed": scale.seed, "log_every": 5, "checkpoint_every": 20}
    train(make_config("digits", out=folder, accelerator="cpu", **settings), resume=True)


def steps_done(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return metrics.read_bytes().count(b'"kind": "train"') if metrics.exists() else 0
