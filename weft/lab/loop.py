"""The training loop: nothing is lost, and a resumed run is the same run.

    step t:  rows of step t → loss → gradients → clip → update with the rate of step t

Order, dropout, masking and rate are functions of (seed, t), so a checkpoint needs only weights, optimizer state,
module state and t. Losses stay on the device and are looked at every `log_every` steps and before every checkpoint;
a checkpoint is written only when all losses so far and all weights are finite.
"""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..tasks.config import TrainConfig
from ..tasks.registry import task_of
from .build import build_model
from .checkpoint import Checkpoints, DamagedCheckpoint
from .data import Order, Rows, seed_everything, seed_of
from .evaluate import disagreement, evaluate, load_weights, rounding, saved_weights
from .fabric import checkpoint_activations, make_fabric
from .optim import learning_rate, make_optimizer, set_learning_rate
from .progress import Progress
from .run import Run
from .state import collect, finite, restore, restore_model

PATIENCE = 20  # losses that must be high together before a run counts as diverging
COMPILED_WITHIN = 0.1  # of the losses: far more than rounding, far less than a compiler's fault
ROUNDINGS = 3  # so many times what autocast itself moves the losses by may still be rounding


class Diverged(Exception):
    """The loss is not a number, or runs away; the last good checkpoint is kept."""


class Miscompiled(Exception):
    """The model cannot be compiled, or gives other answers than it should; the run can go on without compiling."""


class Interrupted(Exception):
    """SIGTERM or SIGINT came; the run was saved and can be resumed."""


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
    """Train, or with `resume` go on with what `config.folder()` holds. Raises Diverged, Miscompiled, Interrupted,
    CannotSave."""
    config.check()
    return Training(config, resume).run()


def from_the_compiler(error: Exception) -> bool:
    from torch._dynamo.exc import BackendCompilerFailed  # takes seconds to import, but a compiled model has done it

    return isinstance(error, BackendCompilerFailed)


class Training:
    def __init__(self, config: TrainConfig, resume: bool = False):
        self.config = config
        self.fabric = make_fabric(config)
        self.fabric.launch()
        self.main = self.fabric.is_global_zero
        self.folder = Run(config.folder())
        if self.main:
            self.folder.begin(config, resume)
        self.fabric.barrier()
        self.progress = Progress(config.steps, 0, show=False)
        self.checkpoints = Checkpoints(self.folder.checkpoints, config.keep, say=self._say)
        self.task = task_of(config)
        self.data = self.task.load(config)
        if self.main and self.data.vocabulary is not None:
            self.folder.write("vocabulary.txt", "\n".join(self.data.vocabulary) + "\n")
        self.raw = build_model(config, self.data)
        if config.init_from:
            self._begin_from(Run(Path(config.init_from)))
        self.parameters = sum(p.numel() for p in self.raw.parameters())
        if config.checkpoint_activations:
            checkpoint_activations(self.raw)
        self.model = self.fabric.setup_module(torch.compile(self.raw) if config.compile else self.raw)
        # Made after the model has its place: sharding replaces parameters.
        self.inner_optimizer = make_optimizer(self.raw, config)
        self.optimizer = self.fabric.setup_optimizers(self.inner_optimizer)
        device = self.fabric.device
        self.rows = Rows(self.data.train, device)
        self.val, self.test = Rows(self.data.val, device), Rows(self.data.test, device)
        self.world = self.fabric.world_size
        self.per_step = config.batch_size * config.accumulate * self.world
        self.order = Order(len(self.rows), self.per_step, config.seed, device, shuffled=not self.task.streams)
        self.generator = torch.Generator(device=device)
        self.step, self.best, self.first_loss = 0, None, None  # type: int, dict[str, Any] | None, float | None
        self.trusted = False  # the compiled model, by comparison with the plain one
        self.recent: list[float] = []
        self.pending: list[Tensor] = []
        self.writer: Any = None
        self.dense_from = math.ceil(config.steps * config.finetune_dense_at) if config.finetune_dense_at else 0
        self.is_dense = False
        done = self.folder.result()
        if resume and (done is None or done["step"] < config.steps):
            self._restore()

    def run(self) -> Result:
        done = self.folder.result()
        if done is not None and done["step"] >= self.config.steps:
            self._say(f"{self.folder.folder} is complete: {done['test']}")
            return Result(self.folder.folder, done["step"], done["val"], done["test"], self.parameters, 0.0, 0.0)
        self.progress = Progress(self.config.steps, self.step, show=self.main)
        try:
            with _Signals() as signals:
                seconds, rate = self._steps(signals)
                return self._finish(seconds, rate)
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
                self.writer.close()

    def _steps(self, signals: _Signals) -> tuple[float, float]:
        config = self.config
        self.model.train()
        began, start = time.perf_counter(), self.step
        self._clock = (began, start)
        while self.step < config.steps:
            self._update(self.step + 1)
            self.step += 1
            step, last = self.step, self.step == config.steps
            evaluating = last or (config.eval_every > 0 and step % config.eval_every == 0)
            saving = last or evaluating or step % config.checkpoint_every == 0
            looking = saving or step % config.log_every == 0
            # Processes must agree to stop at the same step; they ask each other only when they look anyway.
            stopping = signals.came if self.world == 1 else looking and self._any(signals.came)
            if looking or stopping:
                self._look()
            if evaluating:
                self._evaluate()
            if saving or stopping:
                self._save()
            if stopping and not last:
                self._say(f"stopped by a signal at step {step}; saved, go on with --resume")
                raise Interrupted(f"stopped by a signal at step {step}")
        seconds = time.perf_counter() - began
        return seconds, (self.step - start) * self._tokens_per_step() / max(seconds, 1e-9)

    def _update(self, step: int) -> None:
        """One update of the weights. Nothing here waits for the device."""
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
        """Bring the losses over, write them down, and stop the run if they are no good."""
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
        found = evaluate(self.fabric, self.model, self.task, self.val, self.config, batches=self.config.eval_batches)
        self.model.train()
        value = found[self.task.metric]
        sign = 1 if self.task.higher_is_better else -1
        better = math.isfinite(value) and (self.best is None or sign * value > sign * self.best["value"])
        if better:
            self.best = {"step": self.step, "value": value, "val": found}
        if self.main:
            self.folder.log([{"kind": "val", "step": self.step, **found}])
        self._tensorboard([{"kind": "val", "step": self.step, **found}])
        self.progress.evaluated(self.step, self.task.metric, value, better)
        self._clock = (time.perf_counter(), self.step)

    def _hold_compiled_to_plain(self) -> None:
        """Once in a start: compilers have given wrong answers, without an error, to models that were right."""
        off = disagreement(self.fabric, self.model, self.raw, self.task, self.val, self.config)
        self.trusted = True
        if off <= COMPILED_WITHIN:
            return
        self._save()  # before single precision, which may not find the memory
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
            }
            self.checkpoints.save(self.step, tensors, numbers, best=(self.best or {}).get("step") == self.step)
        self._clock = (time.perf_counter(), self.step)

    def _restore(self) -> None:
        # Only one process moves damaged files aside; the others then read what it chose.
        newest = self.checkpoints.newest() if self.main else None
        self.fabric.barrier()
        if not self.main:
            newest = self.checkpoints.newest()
        step = newest[1]["step"] if newest is not None else 0
        if self.main:
            self.folder.rewind(step)
        if newest is None:
            self._say("no checkpoint yet: starting from the beginning")
            return
        tensors, numbers = newest
        if numbers["per_step"] != self.per_step:
            raise ValueError(
                f"the run takes {numbers['per_step']} examples per step, these settings {self.per_step}: choose "
                "batch_size and accumulate so that batch_size x accumulate x processes stays the same"
            )
        if numbers["rows"] != len(self.rows):
            raise ValueError(f"the run was trained on {numbers['rows']} examples, the data now has {len(self.rows)}")
        if numbers["dense"]:
            self._turn_dense()
        restore(self.raw, self.inner_optimizer, tensors, numbers["extra"])
        scaler = getattr(self.fabric.strategy.precision, "scaler", None)
        if scaler is not None and numbers["scaler"]:
            scaler.load_state_dict(numbers["scaler"])
        self.step, self.best, self.first_loss = step, numbers["best"], numbers["first_loss"]
        if self.main:
            self.recent = [entry["loss"] for entry in self.folder.entries("train")][-PATIENCE:]
        self.recent = self.fabric.broadcast(self.recent)
        self._say(f"resuming {self.folder.folder} after step {step}")

    def _finish(self, seconds: float, rate: float) -> Result:
        """Test the checkpoint that was best on validation data, or what `test_on` says."""
        assert self.best is not None
        try:
            load_weights(self.folder, self.raw, self.config.test_on)
        except DamagedCheckpoint as error:
            self._say(f"{error}; testing the last weights")
        found = evaluate(self.fabric, self.model, self.task, self.test, self.config)
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
            self.folder.write("result.json", json.dumps(done, indent=2) + "\n")
        self._tensorboard([{"kind": "test", "step": self.step, **found}])
        which = f"best checkpoint: step {self.best['step']}" if self.config.test_on == "best" else self.config.test_on
        self._say(f"test {self.task.metric} {found[self.task.metric]:.4f} ({which})")
        self.fabric.barrier()
        return Result(self.folder.folder, self.step, self.best["val"], found, self.parameters, seconds, rate)

    def _begin_from(self, run: Run) -> None:
        tensors, numbers = saved_weights(run, "last")
        weights = {k.removeprefix("model/"): v for k, v in tensors.items() if k.startswith("model/")}
        if not self.task.begin(self.raw, weights):
            restore_model(self.raw, tensors, numbers["extra"])

    def _turn_dense(self) -> None:
        from ..adapt.subsample import make_dense

        make_dense(self.raw)
        self.is_dense = True
        self._say(f"subsampled attention is dense from step {self.step + 1}")

    def _all_finite(self) -> bool:
        return not self._any(not finite(self.raw))

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
    """Remembers SIGTERM and SIGINT in place of dying; a second one kills as usual."""

    def __init__(self) -> None:
        self.came = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._take)
        return self

    def _take(self, number: int, frame: Any) -> None:
        self.came = True
        signal.signal(number, signal.SIG_DFL)

    def __exit__(self, *exc: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
