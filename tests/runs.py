"""Tiny training runs, shared by the tests of the lab."""

import contextlib
import types

import pytest
from typer.testing import CliRunner

from weft.cli import app
from weft.lab import loop, make_config
from weft.lab.run import Run

TINY = dict(
    layers=1, heads=2, head_dim=8, dim=16, mlp_dim=16, steps=12, batch_size=8, eval_every=4, checkpoint_every=2,
    log_every=1, warmup=2, eval_batches=2, accelerator="cpu",
)  # fmt: skip
SHORT = {**TINY, "steps": 6, "eval_every": 3}


class Killed(BaseException):
    """Simulates a kill: it is not caught, and the loop does not clean up."""


def tiny(out, task="digits", **changes):
    return make_config(task, out=str(out), **{**TINY, **changes})


def short(out, task="digits", **changes):
    return tiny(out, task, **{**SHORT, **changes})


def train_losses(out) -> list[float]:
    return [entry["loss"] for entry in Run(out).entries("train")]


def stub(score):
    """A task with scores only."""
    return types.SimpleNamespace(
        batch=lambda *a, **k: {}, score=score, evaluating=lambda model: contextlib.nullcontext()
    )


def options(**changes):
    return [f"--{name.replace('_', '-')}={value}" for name, value in {**TINY, **changes}.items()]


def weft(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "200"})


def before_step(monkeypatch, step, act):
    """Call `act(training)` before this step (or before every step, if None)."""
    update = loop.Training._update

    def patched(self, number):
        if step in (None, number):
            act(self)
        update(self, number)

    monkeypatch.setattr(loop.Training, "_update", patched)


def kill(training):
    raise Killed


def killed_run(monkeypatch, config, step, **more):
    """Train until a kill before this step."""
    with monkeypatch.context() as patch:
        before_step(patch, step, kill)
        with pytest.raises(Killed):
            loop.train(config, **more)
