"""The training loop, with exact resume.

    step t:  rows of step t → loss → gradients → clip → update with the rate of step t

Data order, dropout, masking and learning rate are functions of (seed, t), so a checkpoint needs only weights, optimizer
state, module state and t. Losses stay on the device and are checked every `log_every` steps and before every
checkpoint. A checkpoint is written only if all losses so far, all weights and the optimizer's state are finite, and
before the evaluation of its step. The run's folder is created after the first step.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..adapt.ensemble import Members
from ..core.staging import send
from ..tasks.base import Columns, cut_note
from ..tasks.config import TrainConfig
from ..tasks.registry import task_of
from .build import build_model
from .checkpoint import Checkpoints, DamagedCheckpoint
from .compiled import Miscompiled, check_compiled, check_gradients, compile_model, compiler_error
from .data import Ahead, Order, Packing, Rows, seed_everything, seed_of
from .divergence import Diverged, LossMonitor
from .evaluate import Stopped, evaluate
from .fabric import check_alone, checkpoint_activations, make_fabric
from .memory import check_memory
from .metrics import Metrics
from .optim import Average, averaged, learning_rate, make_optimizer, set_learning_rate
from .processes import Processes
from .progress import Progress, figure
from .run import Run
from .saving import check_reached, restore_run, save, saved_weights
from .signals import Signals
from .split import Split
from .start import claim, load_data, newest_checkpoint, start_from
from .state import restore_model

if TYPE_CHECKING:
    from .pace import Plan


class Interrupted(Exception):
    """The run received SIGTERM, SIGHUP or SIGINT; it was saved and can be resumed."""


@dataclass
class Result:
    folder: Path
    steps: int
    val: dict[str, float]  # of the best checkpoint
    test: dict[str, float]
    parameters: int
    seconds: float  # of this launch, with evaluations and checkpoints
    tokens_per_s: float


def train(config: TrainConfig, *, resume: bool = False) -> Result:
    """Train, or with `resume` continue the run in `config.folder()`. Raises Diverged, Miscompiled, Interrupted,
    CannotSave, RunExists, InUse, OtherData."""
    config.check()
    with Run(config.folder()) as folder:
        plan = None
        if config.time_budget:
            from .pace import with_steps

            config, plan = with_steps(config, folder, resume)
        return Training(config, resume, folder, plan).run()


class Training:
    def __init__(self, config: TrainConfig, resume: bool = False, folder: Run | None = None, plan: Plan | None = None):
        self.config, self._resume, self.plan = config, resume, plan
        check_alone(config)
        self.fabric = make_fabric(config)
        self.fabric.launch()
        self.processes = Processes(self.fabric)
        self.main, self.world = self.processes.main, self.processes.world
        self.progress = Progress(config.steps, 0, show=False)
        self.folder = folder or Run(config.folder())
        self.folder.say = self._say
        self.processes.on_main(lambda: claim(self.folder, config, resume))
        self.checkpoints = Checkpoints(self.folder.checkpoints, config.keep, say=self._say)
        self.metrics = Metrics(self.folder, config.logger)
        self.task = task_of(config)
        newest = newest_checkpoint(self.checkpoints, self.folder, self.processes) if resume else None
        self.data, self.kept = load_data(self.task, config, self.folder, newest, self.processes, self._say)
        self.split = Split(self.fabric, config, self.data.length)
        self.raw = build_model(config, self.data)
        if config.init_from and newest is None:
            start_from(Path(config.init_from), self.raw, self.task, self.kept)
        self.parameters = sum(p.numel() for p in self.raw.parameters())
        few = {name: column[: min(2, config.batch_size)] for name, column in self.data.train.items()}
        check_memory(self.fabric, self.raw, self.task, few, config)
        if config.checkpoint_activations:
            checkpoint_activations(self.raw, config.offload)
        attached = config.checkpoint_activations or config.strategy == "fsdp"
        compiled = compile_model(self.raw, config.packed, attached) if config.compile else self.raw
        self.model = self.fabric.setup_module(compiled)
        # Created after the model is on its device: sharding replaces parameters.
        self.inner_optimizer = make_optimizer(self.raw, config)
        self.optimizer = self.fabric.setup_optimizers(self.inner_optimizer)
        self.average = Average(self.raw, config.ema) if config.ema else None
        device = self.fabric.device
        packing = Packing.of(self.raw) if config.packed else None
        on_host = self.task.on_host(config)
        place = torch.device("cpu") if on_host else device
        self.rows = Rows(self.data.train, place, packing)
        self.val, self.test = (Rows(part, device, packing) for part in (self.data.val, self.data.test))
        self.per_step = config.batch_size * config.accumulate * self.split.world
        self.order = Order(len(self.rows), self.per_step, config.seed, place, shuffled=not self.task.streams)
        self.generator = torch.Generator(device=device)
        self.ahead = Ahead(self._start_batch) if on_host else None
        self.step, self.restored = 0, 0
        self.best: dict[str, Any] | None = None
        self.losses = LossMonitor(config.diverge_at)
        self.checked_compiled = False
        self.pending: list[Tensor] = []
        self.rates: list[float] = []  # of the pending losses: the schedule may change before they are logged
        self.computed = 0  # tokens of packed documents since the last look
        self.trained = 0.0  # seconds of training: without evaluations, checkpoints and the first step of each launch
        self.is_dense, self.begun = False, False
        self.signals = Signals(once=True)
        self.done = self.fabric.broadcast(self.folder.result() if resume and self.main else None)
        if newest is not None and not self._complete():
            restore_run(self, *newest)
            self._say(f"resuming {self.folder.folder} after step {self.step}")

    def _complete(self) -> bool:
        return self.done is not None and self.done["step"] >= self.config.steps

    def run(self) -> Result:
        if self._complete():
            done = self.done
            check_reached(self, done["step"])
            self._say(f"{self.folder.folder} is complete: {done['test']}")
            return Result(self.folder.folder, done["step"], done["val"], done["test"], self.parameters, 0.0, 0.0)
        examples, size, steps = self.data.rows("train"), self.parameters, self.config.steps
        self._say(f"{examples:,} training examples, {size:,} parameters, {steps:,} steps on {self.fabric.device}")
        if note := cut_note([n for part in self.data.tokens.values() for n in part], self.data.length):
            self._say(note)
        peak, highest = self.config.learning_rate, learning_rate(self.config, steps)
        if self.config.schedule != "inverse_sqrt" and self.config.warmup > steps:
            self._say(
                f"the warm-up has {self.config.warmup:,} steps, the run {steps:,}: the learning rate ends at "
                f"{highest:.2g} instead of reaching {peak:.2g}; lower --warmup"
            )
        self.progress = Progress(self.config.steps, self.step, show=self.main)
        try:
            with self.signals:
                if self.step:
                    self._begin()
                    self._evaluate_again()
                seconds, rate = self._steps()
                return self._finish(seconds, rate)
        except Stopped:  # during an evaluation; the run was saved before it
            self._interrupt()
        except Exception as error:
            message = compiler_error(error) if self.config.compile else ""
            if not message:
                raise
            self._say(message)
            raise Miscompiled(message) from error
        finally:
            self.progress.close()
            self.folder.close()
            self.metrics.close()
        raise AssertionError

    def _begin(self) -> None:
        """Before the first step: write the run's config and environment, and clean up after an interruption."""
        self.begun = True
        self.processes.on_main(self._begin_on_main)

    def _begin_on_main(self) -> None:
        self.folder.lock()
        if not self.step and (self.folder.folder / "config.json").exists() and not self._resume:
            self.folder.check(self.config, resume=False)  # another process may have started a run here
        self.checkpoints.tidy(self.restored)
        self.folder.rewind(self.restored)
        self.folder.begin(self.config, self.kept.files())
        if self.best is not None and self.checkpoints.where_best(self.best["step"]) != self.checkpoints.best:
            self.checkpoints.mark_best(self.best["step"])

    def _steps(self) -> tuple[float, float]:
        self.model.train()
        began, start = time.perf_counter(), self.step
        self._clock = (began, start)
        self.processes.start_at(start)
        if self.config.compile and self.step < self.config.steps:
            self._check_gradients()
        while self.step < self.config.steps:
            self._update(self.step + 1)
            if not self.begun:
                self._begin()
            self.step += 1
            if self.step == start + 1:
                self.pending[-1].item()  # compilation and tuning end here
                self._clock, self.computed = (time.perf_counter(), self.step), 0
                if self.plan is not None:
                    self._choose(self.plan.after_start(self.config))
            step, config = self.step, self.config
            evaluating = self._evaluates(step)
            saving = evaluating or step % config.checkpoint_every == 0
            stopping = self.processes.any_every_few_seconds(self.signals.count > 0, step)
            if saving or stopping or step % config.log_every == 0:
                self._look()
            if saving or stopping:
                save(self)
                self._clock = (time.perf_counter(), self.step)
            if stopping:
                self._interrupt()
            if evaluating:
                self._evaluate()
                if self.plan is not None:
                    self._choose(dataclasses.replace(self.config, steps=self.plan.steps(self)))
        seconds = time.perf_counter() - began
        return seconds, (self.step - start) * self._tokens_per_step() / max(seconds, 1e-9)

    def _evaluates(self, step: int) -> bool:
        return step == self.config.steps or (self.config.eval_every > 0 and step % self.config.eval_every == 0)

    @property
    def dense_from(self) -> int:
        return math.ceil(self.config.steps * self.config.finetune_dense_at)

    def _choose(self, config: TrainConfig) -> None:
        """Continue with the numbers that the plan has chosen."""
        if config != self.config:
            self.config, self.progress.total = config, config.steps
            self.folder.write_config(self.config)  # for resume

    def _interrupt(self) -> None:
        self.fabric.barrier()  # when one process ends, a launcher kills the others: the first may still be writing
        self._say(f"stopped by a signal at step {self.step}; saved, continue with --resume")
        raise Interrupted(f"stopped by a signal at step {self.step}")

    def _update(self, step: int) -> None:
        """One weight update, without synchronising with the device."""
        config = self.config
        if self.dense_from and step > self.dense_from and not self.is_dense:
            self.turn_dense()
            self._say(f"subsampled attention is dense from step {step}")
        seed_everything("step", config.seed, step, self.processes.rank)
        rate = learning_rate(config, step)
        set_learning_rate(self.inner_optimizer, rate)
        if self.rows.lengths is not None:
            self.computed += int(self.rows.lengths[self.order.on_host(step - 1)].sum())
        if self.task.streams and (step - 1) % self.order.steps_per_epoch == 0:
            self.task.restart(self.raw)
        batches: Iterable[Any] = (self._batch(step, micro) for micro in range(config.accumulate))
        divisors: Sequence[int | Tensor] = [config.accumulate] * config.accumulate
        if self.task.uneven and config.accumulate * self.world > 1:
            batches = list(batches)
            divisors = self._divisors(batches)
        total = None
        for micro, batch in enumerate(batches):
            accumulating = micro < config.accumulate - 1
            with self.split.region(), self.fabric.no_backward_sync(self.model, enabled=accumulating):
                loss = self.split.loss(self.task, self.model, batch) / divisors[micro]
                # A process has one device, so a second thread for its backward only costs host time.
                with torch.autograd.set_multithreading_enabled(False):
                    self.fabric.backward(loss)
            total = loss.detach() if total is None else total + loss.detach()
        if config.clip:
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=config.clip, error_if_nonfinite=False)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update(self.raw, step)
        assert total is not None
        self.pending.append(total)
        self.rates.append(rate)

    def _divisors(self, batches: Sequence[Any]) -> list[Tensor]:
        """Of the mean losses of these batches, so that the step's loss is the mean over all its targets."""
        counts = torch.stack([self.task.count(batch) for batch in batches]).float()
        total = counts.sum()
        if self.world > 1:
            total = self.fabric.all_reduce(total, reduce_op="mean")
        return list(total / counts)

    def _batch(self, step: int, micro: int) -> Any:
        config, world, rank, size = self.config, self.split.world, self.split.rank, self.config.batch_size
        # Masks and augmentation are drawn for the rows of all processes, so they do not depend on their number.
        here = slice(micro * world * size, (micro + 1) * world * size)
        self.generator.manual_seed(seed_of("batch", config.seed, step, micro))
        number = (step - 1) * config.accumulate + micro
        index, numbers = self.order(step - 1)[here], self.order.on_host(step - 1)[here]
        rows = self.rows.take(index) if self.ahead is None else self.ahead(number)
        batch = self.task.batch(rows, config, self.generator, training=True)
        mine = slice(rank * size, (rank + 1) * size)
        if world > 1:
            batch = {name: column[mine] for name, column in batch.items()}
        return self.split.part(self.task, self.rows.pack(batch, numbers[mine]))

    def _start_batch(self, number: int) -> Callable[[], Columns]:
        """Start the work on the CPU for batch `number` of the run."""
        config, size = self.config, self.config.batch_size * self.split.world
        step, micro = divmod(number, config.accumulate)
        generator = torch.Generator().manual_seed(seed_of("ahead", config.seed, step + 1, micro))
        index = self.order(step)[micro * size : (micro + 1) * size]
        started = self.task.ahead(self.rows.take(index), config, generator)
        return lambda: {name: send(x, self.fabric.device) for name, x in started().items()}

    def _look(self) -> None:
        """Fetch the losses from the device, log them, and stop the run if it has diverged."""
        if not self.pending:
            return
        losses = torch.stack(self.pending).float()
        if self.world > 1:
            losses = self.fabric.all_reduce(losses, reduce_op="mean")
        values, self.pending = losses.tolist(), []
        rates, self.rates = self.rates[-len(values) :], []
        now, step0 = time.perf_counter(), self.step - len(values)
        seconds, steps = max(now - self._clock[0], 1e-9), self.step - self._clock[1]
        rate = steps * self._tokens_per_step() / seconds
        self.trained += seconds
        self._clock = (now, self.step)
        entries: list[dict[str, Any]] = [
            {"kind": "train", "step": step0 + i, "loss": value, "lr": rate}
            for i, (value, rate) in enumerate(zip(values, rates, strict=True), 1)
        ]
        entries[-1]["seconds"] = round(self.trained, 2)
        if steps:
            entries[-1]["tokens_per_s"] = round(rate, 1)
        if self.computed and steps:
            entries[-1]["computed_tokens_per_s"], self.computed = round(self.computed / seconds, 1), 0
        self._log(entries)
        self.progress.update(self.step, values[-1], rate)
        for entry in entries:
            problem = self.losses.problem(entry["step"], entry["loss"])
            if problem:
                self.diverged(problem)

    def diverged(self, what: str) -> None:
        steps = self.checkpoints.steps()
        kept = f"the last good checkpoint, step {steps[-1]}, is kept" if steps else "there is no checkpoint yet"
        ways = ["a lower learning rate", "a longer warm-up"]
        ways += ["--clip 1"] if not self.config.clip else []
        ways += ["--qk-norm"] if not self.config.qk_norm and "qk_norm" in self.task.reads else []
        message = f"{what}; stopped, and {kept}. Try {', '.join(ways[:-1])} or {ways[-1]}."
        self._say(message)
        raise Diverged(message)

    def _evaluate(self) -> None:
        if self.config.compile and not self.checked_compiled and self.world == 1:
            self._check_compiled()
        found = self._score(self.val, self.config.eval_batches)
        self.model.train()
        value = found[self.task.metric]
        sign = 1 if self.task.higher_is_better else -1
        better = math.isfinite(value) and (self.best is None or sign * value > sign * self.best["value"])
        if better:
            self._new_best(found)
        # Logged after the best is marked: an evaluation in the log is not repeated on resume.
        self._log([{"kind": "val", "step": self.step, **found}])
        self.progress.evaluated(self.step, self.task.metric, value, better)
        self._clock = (time.perf_counter(), self.step)

    def _score(self, rows: Rows, batches: int = 0, what: str = "validation") -> dict[str, float]:
        def stop() -> bool:
            return self.processes.any(self.signals.count > 0)

        how: dict[str, Any] = dict(batches=batches, stop=stop, tell=self.progress.counter(what), split=self.split)
        with averaged(self.raw, self.average):
            return evaluate(self.fabric, self.model, self.task, rows, self.config, **how)

    def _new_best(self, found: dict[str, float]) -> None:
        self.best = {"step": self.step, "value": found[self.task.metric], "val": found}
        if self.main:
            self.checkpoints.record_best(self.best)

    def _evaluate_again(self) -> None:
        """Repeat the evaluation of the last checkpoint if it was interrupted."""
        missing = self.main and not any(entry["step"] == self.step for entry in self.folder.entries("val"))
        if self._evaluates(self.step) and self.processes.any(missing):
            self._clock = (time.perf_counter(), self.step)
            self._evaluate()

    def _check_gradients(self) -> None:
        """Before the first step of a launch, on its batch. Streams and recomputed layers have more state."""
        if self.fabric.world_size > 1 or self.task.streams or self.config.checkpoint_activations:
            return
        batch = self._batch(self.step + 1, 0)

        def loss(model: torch.nn.Module) -> Tensor:
            return self.task.loss(model, batch, self.config)

        try:
            check_gradients(self.fabric, self.model, self.raw, loss, self.config.seed)
        except Miscompiled as error:
            self._say(str(error))
            raise

    def _check_compiled(self) -> None:
        """Once per launch."""
        self.checked_compiled = True
        try:
            warning = check_compiled(self.fabric, self.model, self.raw, self.task, self.val, self.config)
        except Miscompiled as error:
            self._say(str(error))
            raise
        if warning:
            self._say(warning)

    def _finish(self, seconds: float, rate: float) -> Result:
        """Test the checkpoint that `test_on` names, by default the best one on validation data."""
        self.fabric.barrier()  # the first process may still be writing it
        damage, best, tensors = "", self.best, None
        try:
            if self.config.test_on != "last":
                tensors, numbers = saved_weights(self.folder, self.config.test_on)
            if self.config.test_on == "best" and best is not None and numbers["step"] != best["step"]:
                raise DamagedCheckpoint(f"{self.checkpoints.best} is of step {numbers['step']}")
        except DamagedCheckpoint as error:
            damage = str(error)
        if self.processes.any(bool(damage)) or best is None:
            self._say(f"{damage or 'no checkpoint with a finite metric'}; testing the weights of step {self.step}")
            self._new_best(self._score(self.val, self.config.eval_batches))
        elif tensors is not None:
            restore_model(self.raw, tensors, numbers["extra"])
            self.average = None  # it belongs to the last step
        assert self.best is not None
        if self.config.ensemble:
            self.model = self.fabric.setup_module(Members(self.raw, self.config.ensemble, self.task.answers))
        found = self._score(self.test, what="test")
        self._log([{"kind": "test", "step": self.step, **found}])
        if self.main:
            self.folder.sync()
            done = {
                "step": self.step,
                "best_step": self.best["step"],
                "val": self.best["val"],
                "test": found,
                "parameters": self.parameters,
                "tokens_per_s": round(rate, 1),
                "seconds": round(self.trained, 1),
            }
            if self.task.draws and self.config.strategy != "fsdp":  # sharded weights need all processes
                with averaged(self.raw, self.average):
                    parts = [shown.part() for shown in self.task.galleries(self.raw, self.data, self.config)]
                self.folder.write("gallery.json", json.dumps(parts))
            if damage:
                done["note"] = f"{damage}: the last weights were tested"
            self.folder.write("result.json", json.dumps(done, indent=2) + "\n")
        which = f"best checkpoint: step {self.best['step']}" if self.config.test_on == "best" else self.config.test_on
        self._say(f"test {self.task.metric} {figure(found[self.task.metric])} ({which})")
        folder = self.folder.folder
        self._say(f"saved in {folder}; next: {self.task.next_command(shlex.quote(str(folder)))}")
        self.fabric.barrier()
        return Result(self.folder.folder, self.step, self.best["val"], found, self.parameters, seconds, rate)

    def turn_dense(self) -> None:
        from ..adapt.subsample import make_dense

        make_dense(self.raw)
        self.is_dense = True

    def _tokens_per_step(self) -> int:
        return self.per_step * self.data.length * self.data.documents

    def _say(self, text: str) -> None:
        if self.main:
            self.progress.show = True
            self.progress.say(text)

    def _log(self, entries: list[dict[str, Any]]) -> None:
        if self.main:
            self.metrics.log(entries)
