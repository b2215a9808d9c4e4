"""The training loop, with exact resume.

    step t:  rows of step t → loss → gradients → clip → update with the rate of step t

Data order, dropout, masking and learning rate are functions of (seed, t), so a checkpoint needs only weights, optimizer
state, module state and t. Losses stay on the device and are checked every `log_every` steps and before every
checkpoint. A checkpoint is written only if all losses so far and all weights are finite, and before the evaluation of
its step. The run's folder is created after the first step.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..tasks import TaskData
from ..tasks.config import TrainConfig
from ..tasks.registry import task_of
from .build import build_model
from .checkpoint import CannotSave, Checkpoints, DamagedCheckpoint
from .data import Order, Rows, seed_everything, seed_of
from .evaluate import Stopped, disagreement, evaluate, rounding, saved_weights
from .fabric import checkpoint_activations, make_fabric
from .kept import OtherData, check_data, check_numbers, describe, load_kept, read_kept
from .memory import check_memory
from .optim import learning_rate, make_optimizer, set_learning_rate
from .progress import Progress
from .run import Run
from .state import collect, finite, restore, restore_model

PATIENCE = 20  # consecutive losses whose mean must be too high before a run counts as diverged
COMPILED_WITHIN = 0.1  # relative tolerance of compiled losses: well above rounding, well below compiler bugs
ROUNDINGS = 3  # tolerate up to 3x autocast's own rounding error


class Diverged(Exception):
    """The loss is not finite, or has grown too large; the last good checkpoint is kept."""


class Miscompiled(Exception):
    """Compilation failed, or compiled results differ from eager mode; the run can continue without compilation."""


class Interrupted(Exception):
    """SIGTERM, SIGHUP or SIGINT came; the run was saved and can be resumed."""


@dataclass
class Result:
    folder: Path
    steps: int
    val: dict[str, float]  # of the best checkpoint
    test: dict[str, float]
    parameters: int
    seconds: float  # of this start, training only
    tokens_per_s: float


def train(config: TrainConfig, *, resume: bool = False) -> Result:
    """Train, or with `resume` continue the run in `config.folder()`. Raises Diverged, Miscompiled, Interrupted,
    CannotSave, RunExists, InUse, OtherData."""
    config.check()
    with Run(config.folder()) as folder:
        return Training(config, resume, folder).run()


def from_the_compiler(error: Exception) -> bool:
    from torch._dynamo.exc import BackendCompilerFailed  # takes seconds to import, but a compiled model has done it

    return isinstance(error, BackendCompilerFailed)


class Training:
    def __init__(self, config: TrainConfig, resume: bool = False, folder: Run | None = None):
        self.config, self._resume = config, resume
        self.fabric = make_fabric(config)
        self.fabric.launch()
        self.main, self.world = self.fabric.is_global_zero, self.fabric.world_size
        self.progress = Progress(config.steps, 0, show=False)
        self.folder = folder or Run(config.folder())
        self.folder.say = self._say
        self._on_main(lambda: self._claim(resume))
        self.checkpoints = Checkpoints(self.folder.checkpoints, config.keep, say=self._say)
        self.task = task_of(config)
        newest = self._newest() if resume else None
        self.data = self._load(newest)
        self.raw = build_model(config, self.data)
        if config.init_from and newest is None:
            self._begin_from(Run(Path(config.init_from)))
        self.parameters = sum(p.numel() for p in self.raw.parameters())
        few = {name: column[: min(2, config.batch_size)] for name, column in self.data.train.items()}
        check_memory(self.fabric, self.raw, self.task, few, config)
        if config.checkpoint_activations:
            checkpoint_activations(self.raw)
        self.model = self.fabric.setup_module(torch.compile(self.raw) if config.compile else self.raw)
        # Made after the model has its place: sharding replaces parameters.
        self.inner_optimizer = make_optimizer(self.raw, config)
        self.optimizer = self.fabric.setup_optimizers(self.inner_optimizer)
        device = self.fabric.device
        self.rows = Rows(self.data.train, device)
        self.val, self.test = Rows(self.data.val, device), Rows(self.data.test, device)
        self.per_step = config.batch_size * config.accumulate * self.world
        self.order = Order(len(self.rows), self.per_step, config.seed, device, shuffled=not self.task.streams)
        self.generator = torch.Generator(device=device)
        self.step, self.restored = 0, 0
        self.best, self.first_loss = None, None  # type: dict[str, Any] | None, float | None
        self.trusted = False  # the compiled model, by comparison with the plain one
        self.recent: list[float] = []
        self.pending: list[Tensor] = []
        self.writer: Any = None
        self.dense_from = math.ceil(config.steps * config.finetune_dense_at) if config.finetune_dense_at else 0
        self.is_dense, self.begun = False, False
        self.signals, self._ask_at = _Signals(), 1
        self.done = self.fabric.broadcast(self.folder.result() if resume and self.main else None)
        if newest is not None and not self._complete():
            self._restore(*newest)

    def _complete(self) -> bool:
        return self.done is not None and self.done["step"] >= self.config.steps

    def _claim(self, resume: bool) -> None:
        """Before loading anything, check that the folder is free or belongs to this run. Writes only the lock."""
        folder = self.folder.folder
        if (folder / "config.json").exists():
            self.folder.lock()
            self.folder.check(self.config, resume)
            return
        here = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        if not here.is_dir() or not os.access(here, os.W_OK):
            raise CannotSave(f"could not make {folder}: {here} is no folder that this user may write to")

    def _load(self, newest: Any) -> TaskData:
        """Load the data; for an existing run, in the same way, with an error if the data has changed."""
        if newest is None:
            data = self.task.load(self.config)
            self.kept = describe(data)
        else:
            data, kept = load_kept(self.task, self.config, self.folder, say=self._say)
            self.kept = kept or describe(data)
            check_numbers(self.folder, self.config, kept, newest[1])
        check_data(self.task, self.config, data)
        if self.fabric.broadcast(self.kept.digest) != self.kept.digest:
            raise OtherData(f"process {self.fabric.global_rank} finds other data in {self.config.data} than the first")
        return data

    def run(self) -> Result:
        if self._complete():
            done = self.done
            self._say(f"{self.folder.folder} is complete: {done['test']}")
            return Result(self.folder.folder, done["step"], done["val"], done["test"], self.parameters, 0.0, 0.0)
        self.progress = Progress(self.config.steps, self.step, show=self.main)
        try:
            with self.signals:
                if self.step:
                    self._begin()
                    self._evaluate_again()
                seconds, rate = self._steps()
                return self._finish(seconds, rate)
        except Stopped:  # in the middle of an evaluation, before which the run was saved
            self._interrupt()
        except Exception as error:
            if not (self.config.compile and from_the_compiler(error)):
                raise
            cause = getattr(error, "inner_exception", error)
            reason = f"{type(cause).__name__}: {cause}".splitlines()[0]
            message = (
                f"torch {torch.__version__} cannot compile this model ({reason}). Go on with --resume --no-compile."
            )
            self._say(message)
            raise Miscompiled(message) from error
        finally:
            self.progress.close()
            self.folder.close()
            if self.writer is not None:
                with suppress(OSError):  # a full disk: the error that brought us here counts
                    self.writer.close()
        raise AssertionError

    def _begin(self) -> None:
        """Before the first step: write the run's config and environment, and clean up after an interruption."""
        self.begun = True
        self._on_main(self._begin_on_main)

    def _begin_on_main(self) -> None:
        self.folder.lock()
        if not self.step and (self.folder.folder / "config.json").exists() and not self._resume:
            self.folder.check(self.config, resume=False)  # another process may have been faster
        self.checkpoints.tidy(self.restored)
        self.folder.rewind(self.restored)
        self.folder.begin(self.config, self.kept.files())
        if self.best is not None and self.checkpoints.where_best(self.best["step"]) != self.checkpoints.best:
            self.checkpoints.mark_best(self.best["step"])

    def _steps(self) -> tuple[float, float]:
        config = self.config
        self.model.train()
        began, start = time.perf_counter(), self.step
        self._clock = self._asked = (began, start)
        self._ask_at = start + 1
        while self.step < config.steps:
            self._update(self.step + 1)
            if not self.begun:
                self._begin()
            self.step += 1
            step = self.step
            evaluating = self._evaluates(step)
            saving = evaluating or step % config.checkpoint_every == 0
            stopping = self._stopping()
            if saving or stopping or step % config.log_every == 0:
                self._look()
            if saving or stopping:
                self._save()
            if stopping:
                self._interrupt()
            if evaluating:
                self._evaluate()
        seconds = time.perf_counter() - began
        return seconds, (self.step - start) * self._tokens_per_step() / max(seconds, 1e-9)

    def _evaluates(self, step: int) -> bool:
        return step == self.config.steps or (self.config.eval_every > 0 and step % self.config.eval_every == 0)

    def _stopping(self) -> bool:
        """Whether a signal arrived. Processes agree on this every few seconds, at the same step."""
        if self.world == 1:
            return self.signals.came
        if self.step < self._ask_at:
            return False
        now = time.perf_counter()
        each = (now - self._asked[0]) / max(1, self.step - self._asked[1])
        told = torch.tensor([float(self.signals.came), each], device=self.fabric.device)
        came, slowest = self.fabric.all_reduce(told, reduce_op="sum").tolist()
        self._asked, self._ask_at = (now, self.step), self.step + max(1, min(100, int(2 / max(slowest, 1e-9))))
        return came > 0

    def _interrupt(self) -> None:
        self.fabric.barrier()  # a launcher kills the first process, which may still write, when another has ended
        self._say(f"stopped by a signal at step {self.step}; saved, go on with --resume")
        raise Interrupted(f"stopped by a signal at step {self.step}")

    def _update(self, step: int) -> None:
        """One weight update, without synchronising with the device."""
        config, world, rank = self.config, self.world, self.fabric.global_rank
        if self.dense_from and step > self.dense_from and not self.is_dense:
            self._turn_dense()
        seed_everything("step", config.seed, step, rank)
        rate = learning_rate(config, step)
        set_learning_rate(self.inner_optimizer, rate)
        index = self.order(step - 1)
        if self.task.streams and (step - 1) % self.order.steps_per_epoch == 0:
            self.task.restart(self.raw)
        size, total = config.batch_size, None
        for micro in range(config.accumulate):
            # Masks and augmentation are drawn for the rows of all processes, so they do not depend on their number.
            rows = index[micro * world * size : (micro + 1) * world * size]
            self.generator.manual_seed(seed_of("batch", config.seed, step, micro))
            batch = self.task.batch(self.rows.take(rows), config, self.generator, training=True)
            if world > 1:
                batch = {name: column[rank * size : (rank + 1) * size] for name, column in batch.items()}
            accumulating = micro < config.accumulate - 1
            with self.fabric.no_backward_sync(self.model, enabled=accumulating):
                loss = self.task.loss(self.model, batch, config) / config.accumulate
                self.fabric.backward(loss)
            total = loss.detach() if total is None else total + loss.detach()
        if config.clip:
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=config.clip, error_if_nonfinite=False)
        self.optimizer.step()
        self.optimizer.zero_grad()
        assert total is not None
        self.pending.append(total)

    def _look(self) -> None:
        """Fetch the losses from the device, log them, and stop the run if it has diverged."""
        if not self.pending:
            return
        losses = torch.stack(self.pending).float()
        if self.world > 1:
            losses = self.fabric.all_reduce(losses, reduce_op="mean")
        values, self.pending = losses.tolist(), []
        now, step0 = time.perf_counter(), self.step - len(values)
        rate = (self.step - self._clock[1]) * self._tokens_per_step() / max(now - self._clock[0], 1e-9)
        self._clock = (now, self.step)
        entries: list[dict[str, Any]] = [
            {"kind": "train", "step": step0 + i, "loss": value, "lr": learning_rate(self.config, step0 + i)}
            for i, value in enumerate(values, 1)
        ]
        entries[-1]["tokens_per_s"] = round(rate, 1)
        if self.main:
            self.folder.log(entries)
        self._tensorboard(entries)
        self.progress.update(self.step, values[-1], rate)
        for entry in entries:
            self._judge(entry["step"], entry["loss"])

    def _judge(self, step: int, loss: float) -> None:
        if self.first_loss is None:
            self.first_loss = loss
        self.recent = [*self.recent, loss][-PATIENCE:]
        limit = self.config.diverge_at * self.first_loss
        if not math.isfinite(loss):
            self._diverged(f"the loss of step {step} is {loss}")
        if self.config.diverge_at and len(self.recent) == PATIENCE and sum(self.recent) / PATIENCE > limit:
            self._diverged(f"the last {PATIENCE} losses up to step {step} average over {limit:.4g}")

    def _diverged(self, what: str) -> None:
        steps = self.checkpoints.steps()
        kept = f"the last good checkpoint, step {steps[-1]}, is kept" if steps else "there was no checkpoint yet"
        message = f"{what}; stopped, and {kept}. A lower learning rate, a longer warm-up or clipping may help."
        self._say(message)
        raise Diverged(message)

    def _evaluate(self) -> None:
        if self.config.compile and not self.trusted and self.world == 1:
            self._hold_compiled_to_plain()
        found = self._score(self.val, self.config.eval_batches)
        self.model.train()
        value = found[self.task.metric]
        sign = 1 if self.task.higher_is_better else -1
        better = math.isfinite(value) and (self.best is None or sign * value > sign * self.best["value"])
        if better:
            self._new_best(found)
        if self.main:  # after the best is marked: a line in the log says that this evaluation need not be done again
            self.folder.log([{"kind": "val", "step": self.step, **found}])
        self._tensorboard([{"kind": "val", "step": self.step, **found}])
        self.progress.evaluated(self.step, self.task.metric, value, better)
        self._clock = (time.perf_counter(), self.step)

    def _score(self, rows: Rows, batches: int = 0) -> dict[str, float]:
        stop = (lambda: self.signals.came) if self.world == 1 else (lambda: self._any(self.signals.came))
        return evaluate(self.fabric, self.model, self.task, rows, self.config, batches=batches, stop=stop)

    def _new_best(self, found: dict[str, float]) -> None:
        self.best = {"step": self.step, "value": found[self.task.metric], "val": found}
        if self.main:
            self.checkpoints.record_best(self.best)

    def _evaluate_again(self) -> None:
        """Repeat the evaluation of the last checkpoint if it was interrupted."""
        missing = self.main and not any(entry["step"] == self.step for entry in self.folder.entries("val"))
        if self._evaluates(self.step) and self._any(missing):
            self._clock = (time.perf_counter(), self.step)
            self._evaluate()

    def _hold_compiled_to_plain(self) -> None:
        """Check compiled output against eager once per launch: torch 2.11 has miscompiled models without an error."""
        off = disagreement(self.fabric, self.model, self.raw, self.task, self.val, self.config)
        self.trusted = True
        if off <= COMPILED_WITHIN:
            return
        own = rounding(self.fabric, self.raw, self.task, self.val, self.config)
        if off <= ROUNDINGS * own:  # never where only the compiled losses are not numbers
            self._say(
                f"{self.config.precision} moves this model's losses by {own:.0%}, and compiling it by {off:.0%}: what "
                "it has learned is no larger than what rounding takes. --precision 32-true does not round."
            )
            return
        message = (
            f"the compiled model's losses are {off:.0%} off those of the model itself, where rounding alone makes "
            f"{own:.0%}: torch {torch.__version__} compiles it wrongly. Saved at step {self.step}; go on with --resume "
            "--no-compile."
        )
        self._say(message)
        raise Miscompiled(message)

    def _save(self) -> None:
        if not self._all_finite():
            self._diverged(f"the weights after step {self.step} are not finite")
        tensors, extra = collect(self.raw, self.inner_optimizer)  # on every rank
        if self.main:
            self.folder.sync()
            scaler = getattr(self.fabric.strategy.precision, "scaler", None)
            numbers = {
                "extra": extra,
                "best": self.best,
                "first_loss": self.first_loss,
                "per_step": self.per_step,
                "rows": len(self.rows),
                "dense": self.is_dense,
                "scaler": scaler.state_dict() if scaler is not None else None,
                "config": {k: v for k, v in dataclasses.asdict(self.config).items() if k not in ("out", "data")},
                "data": self.kept.digest,
            }
            self.checkpoints.save(self.step, tensors, numbers)
        self._clock = (time.perf_counter(), self.step)

    def _newest(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        newest = self.checkpoints.newest()
        step = newest[1]["step"] if newest is not None else 0
        if self._any(self.fabric.broadcast(step) != step):
            raise DamagedCheckpoint(f"the processes find different checkpoints in {self.checkpoints.folder}")
        if newest is None and (self.folder.folder / "config.json").exists():
            self._say("no checkpoint yet: starting from the beginning")
        return newest

    def _restore(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        if numbers["per_step"] != self.per_step:
            raise ValueError(
                f"the run takes {numbers['per_step']} examples per step, these settings {self.per_step}: choose "
                "batch_size and accumulate so that batch_size x accumulate x processes stays the same"
            )
        if numbers["rows"] != len(self.rows):
            raise OtherData(f"the run was trained on {numbers['rows']} examples, the data now has {len(self.rows)}")
        if numbers["dense"]:
            self._turn_dense()
        restore(self.raw, self.inner_optimizer, tensors, numbers["extra"])
        scaler = getattr(self.fabric.strategy.precision, "scaler", None)
        if scaler is not None and numbers["scaler"]:
            scaler.load_state_dict(numbers["scaler"])
        self.step = self.restored = numbers["step"]
        self.first_loss = numbers["first_loss"]
        self.best = self.fabric.broadcast(
            self.checkpoints.best_until(self.step, numbers["best"]) if self.main else None
        )
        if self.main:
            losses = [entry["loss"] for entry in self.folder.entries("train") if entry["step"] <= self.step]
            self.recent = losses[-PATIENCE:]
        self.recent = self.fabric.broadcast(self.recent)
        self._say(f"resuming {self.folder.folder} after step {self.step}")

    def _finish(self, seconds: float, rate: float) -> Result:
        """Test the checkpoint that was best on validation data, or what `test_on` says."""
        self.fabric.barrier()  # the first process may still be writing it
        damage, best, tensors = "", self.best, None
        try:
            if self.config.test_on != "last":
                tensors, numbers = saved_weights(self.folder, self.config.test_on)
            if self.config.test_on == "best" and best is not None and numbers["step"] != best["step"]:
                raise DamagedCheckpoint(f"{self.checkpoints.best} is of step {numbers['step']}")
        except DamagedCheckpoint as error:
            damage = str(error)
        if self._any(bool(damage)) or best is None:
            self._say(f"{damage or 'no evaluation gave a finite figure'}; testing the weights of step {self.step}")
            self._new_best(self._score(self.val, self.config.eval_batches))
        elif tensors is not None:
            restore_model(self.raw, tensors, numbers["extra"])
        assert self.best is not None
        found = self._score(self.test)
        if self.main:
            self.folder.log([{"kind": "test", "step": self.step, **found}])
            self.folder.sync()
            done = {
                "step": self.step,
                "best_step": self.best["step"],
                "val": self.best["val"],
                "test": found,
                "parameters": self.parameters,
                "tokens_per_s": round(rate, 1),
            }
            if damage:
                done["note"] = f"{damage}: the last weights were tested"
            self.folder.write("result.json", json.dumps(done, indent=2) + "\n")
        self._tensorboard([{"kind": "test", "step": self.step, **found}])
        which = f"best checkpoint: step {self.best['step']}" if self.config.test_on == "best" else self.config.test_on
        self._say(f"test {self.task.metric} {found[self.task.metric]:.4f} ({which})")
        self.fabric.barrier()
        return Result(self.folder.folder, self.step, self.best["val"], found, self.parameters, seconds, rate)

    def _begin_from(self, run: Run) -> None:
        tensors, numbers = saved_weights(run, "last")
        weights = {k.removeprefix("model/"): v for k, v in tensors.items() if k.startswith("model/")}
        if self.task.begin(self.raw, weights):
            return
        was = read_kept(run.folder)
        for name in ("vocabulary", "classes", "tokenizer"):
            if was is not None and was.record[name] != self.kept.record[name]:
                raise OtherData(f"init_from: {run.folder} was trained with another {name} than this data gives")
        restore_model(self.raw, tensors, numbers["extra"])

    def _turn_dense(self) -> None:
        from ..adapt.subsample import make_dense

        make_dense(self.raw)
        self.is_dense = True
        self._say(f"subsampled attention is dense from step {self.step + 1}")

    def _all_finite(self) -> bool:
        return not self._any(not finite(self.raw))

    def _on_main(self, act: Callable[[], None]) -> None:
        """Run `act` on the first process; if it fails, all processes fail, so that none hangs."""
        failed: Exception | None = None
        if self.main:
            try:
                act()
            except Exception as error:
                failed = error
        if self.world > 1:
            failed = self.fabric.broadcast(failed)
        if failed is not None:
            raise failed

    def _any(self, flag: bool) -> bool:
        """True on every process if it is true on one."""
        if self.world == 1:
            return flag
        return bool(self.fabric.all_reduce(torch.tensor(float(flag), device=self.fabric.device), reduce_op="sum") > 0)

    def _tokens_per_step(self) -> int:
        return self.per_step * self.data.length * self.data.documents

    def _say(self, text: str) -> None:
        if self.main:
            self.progress.show = True
            self.progress.say(text)

    def _tensorboard(self, entries: list[dict[str, Any]]) -> None:
        if not self.config.tensorboard or not self.main:
            return
        if self.writer is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ImportError("TensorBoard is an extra: pip install 'weft[tensorboard]'") from error
            self.writer = SummaryWriter(str(self.folder.folder / "tensorboard"), purge_step=self.step)
        for entry in entries:
            for key, value in entry.items():
                if key not in ("kind", "step"):
                    self.writer.add_scalar(f"{entry['kind']}/{key}", value, entry["step"])


class _Signals:
    """Records SIGTERM, SIGHUP and SIGINT instead of exiting; a second signal kills as usual."""

    def __init__(self) -> None:
        self.came = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup a closed terminal means nothing
                    self._before[number] = signal.signal(number, self._take)
        return self

    def _take(self, number: int, frame: Any) -> None:
        self.came = True
        signal.signal(number, signal.SIG_DFL)

    def __exit__(self, *exc: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
