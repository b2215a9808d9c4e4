"""Convert a trained model to another attention mechanism.

    report = weft.convert(model, to="combiner-fixed", data=tokens, length=8192, steps=1000, folder="converted")

1. swap: `weft.swap` replaces the mechanism; all weights stay.
2. transfer: every layer learns to give the output of its original on the same input (see `transfer.py`).
3. fine-tuning of the whole model, or of low-rank adapters (LoRA), with the loss of the language model.

This is the recipe of LoLCATs (https://arxiv.org/abs/2410.10254). Every step depends only on the checkpoint, the seed
and the step number, so a conversion that was killed and started again gives the same weights.
"""

from __future__ import annotations

import copy
import inspect
import math
import os
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...adapt.core import learns
from ...adapt.ensemble import train_unchanged
from ...adapt.kinds import Where
from ...adapt.surgery import swap
from ...attention import Attention, attention_info
from .. import lock
from ..bench.timing import PRECISIONS, How, take_turns
from ..checkpoint import Checkpoints
from ..divergence import Diverged
from ..progress import Progress
from ..say import say
from ..state import collect, restore, restore_model
from .batches import Batch, Source, count_tokens, cropped, moved, sources
from .lora import Adapters
from .parts import IGNORED, Once, Parts, counted, shares
from .report import Conversion
from .transfer import Transfer, originals, teacher_of

Loss = Callable[[Any, Batch], Tensor]
LOOK_EVERY = 10  # steps between progress updates: reading a loss waits for the GPU


def convert(
    model: nn.Module,
    to: str,
    data: Any,
    steps: int = 1000,
    *,
    transfer_steps: int | None = None,
    length: int | None = None,
    transfer_length: int | None = None,
    batch_size: int = 8,
    learning_rate: float = 3e-4,
    transfer_learning_rate: float = 1e-3,
    lora: int | dict[str, Any] | None = None,
    loss: Loss | None = None,
    validation: Any = None,
    validation_batches: int = 8,
    precision: str = "",
    where: Where = None,
    seed: int = 0,
    folder: str | Path | None = None,
    save_every: int = 100,
    progress: bool = True,
    **options: Any,
) -> Conversion:
    """Convert `model` to the mechanism `to`, in place: swap, attention transfer, fine-tuning.

    `data`: token ids (N,), cut into sequences of `length`; token ids (N, L); or an iterable of batches, each a dict of
    the model's arguments or a tensor of ids. `validation` takes the same; by default, a twentieth of the tokens or rows
    is held out (of iterables: the first batches).
    `steps` of fine-tuning follow `transfer_steps` of transfer (default: half of `steps`). Transfer uses sequences of
    `transfer_length` (default: `length`): give the length that the original model was trained on if it is shorter.
    `lora`: fine-tune adapters of this rank (or with these fields of `peft.LoraConfig`) instead of all weights, and
    merge them at the end.
    `loss(model, batch)`: default is the model's own loss if the batch has labels, else that of the next token.
    `precision` is "32-true", "tf32" or "bf16-mixed"; the default is "bf16-mixed" for float32 models on a GPU.
    `folder` keeps checkpoints: the same call, with the original model, continues after an interruption.
    `options`, `causal` and `max_length` go to `weft.swap`.
    """
    transfer_steps = steps // 2 if transfer_steps is None else transfer_steps
    attention_info(to)
    counts = {"steps": steps, "transfer_steps": transfer_steps, "batch_size": batch_size,
              "validation_batches": validation_batches, "save_every": save_every}  # fmt: skip
    for name, value in counts.items():
        least = 0 if "steps" in name else 1
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    for name, rate in (("learning_rate", learning_rate), ("transfer_learning_rate", transfer_learning_rate)):
        if not 0 <= rate < math.inf:
            raise ValueError(f"{name} must be a number that is not negative, got {rate}")
    parameter = next(model.parameters(), None)
    if parameter is None or parameter.device.type not in ("cpu", "cuda"):
        raise ValueError(f"the model must be on a CPU or CUDA device, got {parameter and parameter.device}")
    if not precision:
        mixed = parameter.device.type == "cuda" and parameter.dtype == torch.float32
        precision = "bf16-mixed" if mixed else "32-true"
    if precision not in PRECISIONS[:3]:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS[:3])}, got {precision!r}")
    how = How(parameter.device.type, precision, repeats=5, budget=5.0)
    length = length or _longest(model)
    source, held = sources(
        data, validation, model=model, rows=batch_size, length=length, seed=seed, count=validation_batches
    )
    settings: dict[str, Any] = {
        "to": to, "options": {key: value for key, value in options.items() if value is not None}, "steps": steps,
        "transfer_steps": transfer_steps, "length": source.length,
        "transfer_length": transfer_length or source.length, "batch_size": batch_size,
        "learning_rate": learning_rate, "transfer_learning_rate": transfer_learning_rate,
        "lora": lora, "precision": precision, "seed": seed,
    }  # fmt: skip
    adapters = Adapters(lora) if lora is not None else None
    job = _Job(model, source, held, loss or language_model_loss, how, settings, adapters, save_every, progress)
    if folder is not None:
        job.checkpoints = Checkpoints(Path(folder), keep=1, say=say)
        job.checkpoints.folder.mkdir(parents=True, exist_ok=True)
    devices = [parameter.device] if parameter.device.type == "cuda" else []
    modes = {module: module.training for module in model.modules()}
    handle = None if folder is None else lock.take(Path(folder))
    try:
        with torch.random.fork_rng(devices=devices):
            report = job.run(where, options)
    finally:
        _set_modes(model, model, modes)
        if handle is not None:
            os.close(handle)
    if folder is not None:
        report.save(Path(folder) / "report.json")
    return report


def language_model_loss(model: Any, batch: Batch) -> Tensor:
    """The model's own loss if the batch has labels, else the cross entropy of the next token."""
    takes = inspect.signature(model.forward).parameters
    keywords = any(p.kind is p.VAR_KEYWORD for p in takes.values()) or set(batch) <= set(takes)
    if not keywords and set(batch) != {"input_ids"}:
        raise ValueError(
            f"{type(model).__name__} takes {', '.join(takes)}, but a batch has {', '.join(batch)}: pass loss=, a "
            "function of the model and a batch"
        )
    more = {"use_cache": False} if "use_cache" in takes else {}
    out = model(**batch, **more) if keywords else model(batch["input_ids"])
    if "labels" in batch:
        found = getattr(out, "loss", None)
        if isinstance(found, Tensor) and isinstance(batch["labels"], Tensor):  # without labels that count it is 0 / 0
            found = torch.where(counted(model, batch["labels"]).any(), found, 0.0)
    else:
        logits, ids = getattr(out, "logits", out), batch.get("input_ids")
        if not isinstance(logits, Tensor) or ids is None or logits.shape[:-1] != ids.shape:
            found = None
        else:
            labels = F.pad(ids[:, 1:], (0, 1), value=IGNORED)
            if batch.get("attention_mask") is not None:
                labels[:, :-1].masked_fill_(batch["attention_mask"][:, 1:] == 0, IGNORED)
            found = cross_entropy(logits.flatten(0, 1), labels.flatten())
    if found is None:
        raise ValueError(
            f"{type(model).__name__} returns neither a loss nor logits for every token: pass loss=, a function of the "
            "model and a batch"
        )
    return found


def cross_entropy(logits: Tensor, labels: Tensor, largest: int = 2**26) -> Tensor:
    """Of logits (N, V). More than `largest` numbers are processed in chunks, to save memory: the float32 copy of a
    chunk is computed again in the backward pass."""
    rows = max(1, largest // logits.shape[1])
    if len(labels) <= rows:
        return F.cross_entropy(logits.float(), labels)

    def summed(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x.float(), y, reduction="sum")

    chunks = zip(logits.split(rows), labels.split(rows), strict=True)
    total = torch.stack([checkpoint(summed, x, y, use_reentrant=False) for x, y in chunks]).sum()
    return total / (labels != IGNORED).sum()


def _longest(model: Any) -> int | None:
    found = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return found if isinstance(found, int) else None


@dataclass
class _Job:
    model: nn.Module
    source: Source
    held: list[Batch]
    loss: Loss
    how: How
    settings: dict[str, Any]
    adapters: Adapters | None
    save_every: int
    show: bool
    checkpoints: Checkpoints | None = None

    def run(self, where: Where, options: dict[str, Any]) -> Conversion:
        self.parts = Parts(self._say)
        settings, model = self.settings, self.model
        self.device = next(model.parameters()).device
        self.report = report = Conversion(settings["to"], settings)
        self.last, self.total = settings["transfer_steps"], settings["transfer_steps"] + settings["steps"]
        self.weights = _checksum(model)
        saved = self._saved()
        self._say(f"continuing after step {saved[1]['step']}" if saved else "measuring the original model")
        if saved is None:
            self._evaluate("before")
            self._measure("before")
        torch.manual_seed(settings["seed"])
        copies = originals(model, where) if self.last else {}
        swapped = swap(model, settings["to"], where, **options)
        report.replaced, report.left = swapped.replaced, swapped.left
        if not swapped.replaced:
            swapped.undo()
            raise ValueError(f"no layer of {type(model).__name__} can use {settings['to']}:\n{swapped}")
        self.layers = dict(zip(swapped.replaced, swapped.layers, strict=True))
        teachers = {path: teacher_of(layer, copies[layer]) for path, layer in self.layers.items() if copies}
        del copies
        if saved is None:
            self._evaluate("after swap")
        step = saved[1]["step"] if saved else 0
        self.progress = Progress(self.total, step, show=self.show)
        try:
            if step < self.last:
                self._transfer(Transfer(self.layers, teachers), saved)
                saved = None
            elif saved is not None and step == self.last:
                restore_model(model, saved[0], saved[1]["extra"])
                saved = None
            teachers.clear()
            if settings["steps"]:
                self._tune(saved)
                self._evaluate("after fine-tuning")
        finally:
            self.progress.close()
        self._measure("after")
        return report

    def _transfer(self, transfer: Transfer, saved: Any) -> None:
        """Train the swapped layers, one by one, on the outputs of their originals."""
        self.model.eval()
        for module in self.model.modules():
            if isinstance(module, Attention) and learns(module.info.name):
                module.train()  # centroids that follow the keys
        self.optimizer = self._optimizer([p for layer in self.layers.values() for p in layer.parameters()])
        first = {path: copy.deepcopy(layer.state_dict()) for path, layer in self.layers.items()}
        if saved is not None:
            restore(self.model, self.optimizer, saved[0], saved[1]["extra"])
        else:
            errors = self._errors(transfer)
            self.report.errors = {path: [error] for path, error in errors.items()}

        def once(batch: Batch, share: float) -> Tensor:
            with transfer.on(batch.get("attention_mask"), learn=True, share=share):
                self._loss(batch)
            return transfer.mean * share

        start = 1 + (saved[1]["step"] if saved else 0)
        self._steps("transfer", once, start, self.last, self.settings["transfer_learning_rate"])
        for path, error in self._errors(transfer).items():
            before = self.report.errors[path][0]
            if not error < before:  # such as a layer that was nearly exact: Adam's steps do not shrink with its error
                self.layers[path].load_state_dict(first[path])
            self.report.errors[path] = [before, min(before, error)]
        self._evaluate("after transfer")
        self._save(self.last)

    def _tune(self, saved: Any) -> None:
        """Train the whole model, or low-rank adapters, with its own loss."""
        self.model.train()
        torch.manual_seed(self.settings["seed"])
        if self.adapters is not None:
            self.adapters.add(self.model, self.layers)
        self.optimizer = self._optimizer(list(self.model.parameters()))
        if saved is not None:
            restore(self.model, self.optimizer, saved[0], saved[1]["extra"])

        def once(batch: Batch, share: float) -> Tensor:
            found = self._loss(batch) * share
            found.backward()
            return found.detach()

        start = 1 + (saved[1]["step"] if saved else self.last)
        self._steps("fine-tuning", once, start, self.total, self.settings["learning_rate"])
        self._save(self.total)
        if self.adapters is not None:
            self.adapters.merge(self.model)

    def _steps(self, stage: str, once: Once, start: int, end: int, peak: float) -> None:
        first = end - self.settings["steps" if stage == "fine-tuning" else "transfer_steps"]
        length = self.settings["transfer_length"] if stage == "transfer" else self.settings["length"]
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        spent, read = self.report.seconds.get(stage, 0.0), self.report.tokens.get(stage, 0)
        begin, seen = time.perf_counter(), (time.perf_counter(), read)
        for step in range(start, end + 1):
            batch = moved(self.source.batch(step, length), self.device)
            for group in self.optimizer.param_groups:
                group["lr"] = peak * _schedule(step - first, end - first)
            loss = self.parts.sum(self.model, batch, once, (self.settings["seed"] * 1_000_003 + step) % 2**63)
            norm = nn.utils.clip_grad_norm_(parameters, 1.0)
            self.optimizer.step()
            read += count_tokens(batch)
            save = self.checkpoints is not None and (step % self.save_every == 0) and step < end
            if step % LOOK_EVERY == 0 or step == end or save:
                value, now = float(loss), time.perf_counter()
                if not math.isfinite(value) or not math.isfinite(float(norm)):
                    name = "learning_rate" if stage == "fine-tuning" else "transfer_learning_rate"
                    found = f"loss {value}, gradient norm {float(norm)} at step {step}"
                    raise Diverged(f"{stage}: {found}: lower {name}, which is {peak}")
                self.progress.metric = f"  {stage}"
                self.progress.update(step, value, (read - seen[1]) / max(1e-9, now - seen[0]))
                seen = now, read
                self.report.seconds[stage], self.report.tokens[stage] = spent + now - begin, read
            if save:
                self._save(step)
        self.optimizer.zero_grad()

    def _optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        trained = list({id(p): p for p in parameters if p.requires_grad}.values())
        if not trained:
            raise ValueError("all parameters are frozen: set requires_grad on those to be trained")
        return torch.optim.AdamW(trained, betas=(0.9, 0.95), weight_decay=0.0, fused=self.device.type == "cuda")

    def _loss(self, batch: Batch) -> Tensor:
        """One context per call: autocast keeps copies of the weights until its end."""
        with self.how.arithmetic():
            return self.loss(self.model, batch)

    def _evaluate(self, stage: str) -> None:
        self.model.eval()

        @torch.no_grad()
        def once(batch: Batch, share: float) -> Tensor:
            return self._loss(batch) * share

        self.report.losses[stage] = sum(
            share * float(self.parts.sum(self.model, moved(batch, self.device), once))
            for batch, share in zip(self.held, shares(self.model, self.held), strict=True)
            if share
        )
        if self.checkpoints is not None:
            self.report.save(self.checkpoints.folder / "report.json")

    def _errors(self, transfer: Transfer) -> dict[str, float]:
        def once(batch: Batch, share: float) -> Tensor:
            with transfer.on(batch.get("attention_mask"), learn=False):
                self._loss(batch)
            return torch.stack(list(transfer.errors.values())) * share

        batch = moved(cropped(self.held[0], self.settings["transfer_length"]), self.device)
        found = self.parts.sum(self.model, batch, once)
        return dict(zip(transfer.errors, found.tolist(), strict=True))

    def _measure(self, when: str) -> None:
        """Speed and peak memory of a forward and backward pass in training."""
        batch = moved(self.held[0], self.device)
        train_unchanged(self.model)

        def once(part: Batch, share: float) -> Tensor:
            found = self._loss(part) * share
            found.backward()
            return found.detach()

        def call() -> None:
            self.parts.sum(self.model, batch, once)
            self.model.zero_grad()

        timing = take_turns({"": call}, replace(self.how, precision="32-true"))[""]  # `_loss` has its own
        self.model.zero_grad()
        self.model.eval()
        if timing.error:
            self._say(f"speed {when} was not measured: {timing.error}")
            return
        self.report.speed[when] = count_tokens(batch) / timing.median
        self.report.memory[when] = float(timing.memory or 0)

    def _saved(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The newest checkpoint, if it belongs to the same conversion of the same model."""
        found = None if self.checkpoints is None else self.checkpoints.newest()
        if found is None:
            return None
        theirs = found[1]["report"]["settings"]
        other = {key: theirs.get(key) for key, value in self.settings.items() if theirs.get(key) != value}
        folder = self.checkpoints and self.checkpoints.folder
        if other:
            raise ValueError(f"{folder} has a conversion with other settings ({other}): use these, or another folder")
        if found[1]["weights"] != self.weights:
            raise ValueError(
                f"{folder} has a conversion of a model with other weights: to continue it, pass the original model, as "
                "it was before the conversion"
            )
        for name in ("losses", "errors", "speed", "memory", "seconds", "tokens"):
            setattr(self.report, name, found[1]["report"][name])
        return found

    def _save(self, step: int) -> None:
        if self.checkpoints is not None:
            tensors, extra = collect(self.model, self.optimizer)
            numbers = {"extra": extra, "report": self.report.as_dict(), "weights": self.weights}
            self.checkpoints.save(step, tensors, numbers)

    def _say(self, text: str) -> None:
        if self.show:
            say(text)


def _schedule(step: int, steps: int) -> float:
    """Linear warm-up over a twentieth of the steps, then a cosine to a tenth."""
    warmup = max(1, steps // 20)
    if step <= warmup:
        return step / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def _set_modes(module: nn.Module, parent: nn.Module, modes: dict[nn.Module, bool]) -> None:
    """Set train() or eval() as in `modes`; modules that are not there, such as new mechanisms, follow their parent."""
    module.training = modes.get(module, parent.training)
    for child in module.children():
        _set_modes(child, module, modes)


def _checksum(model: nn.Module) -> int:
    """Of the first values of every parameter; the same on every device."""
    total = 0
    for name, p in model.named_parameters():
        total = zlib.crc32(name.encode(), total)
        total = zlib.crc32(p.detach().flatten()[:64].cpu().contiguous().view(torch.uint8).numpy().tobytes(), total)
    return total
