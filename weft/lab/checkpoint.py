"""Checkpoints: one safetensors file each, written atomically, verified when read, never pickle.

    checkpoints/step-00000200.safetensors     model/…, optimizer/PARAMETER/…; the run's state as JSON in the header
    checkpoints/best.safetensors              a hard link to the best one on validation data
    checkpoints/best.json                     its step and its metrics

A file is written to a temporary name, flushed to disk and renamed, so a file with the final name is complete. The
header has a SHA-256 of the rest: truncated or edited files are detected and skipped. Reading changes nothing; only the
process that holds the run's lock cleans up.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..tasks.files import atomic, is_left_over

FORMAT = 1


class DamagedCheckpoint(Exception):
    """The file was truncated or changed after it was written."""


class CannotSave(Exception):
    """The checkpoint could not be written; earlier ones are not affected."""


def write(path: Path, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
    """Write the file atomically. `numbers` must be JSON-compatible."""
    text = json.dumps({"format": FORMAT, **numbers}, sort_keys=True)
    # The format does not support tied weights, which share memory: clone them.
    ready = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    try:
        with atomic(path) as temporary:
            save_file(ready, temporary, metadata={"weft": text, "sha256": digest(ready, text)})
            os.chmod(temporary, 0o666 & ~_umask())  # safetensors writes files that only their owner can read
    except (OSError, SafetensorError) as error:
        raise CannotSave(f"could not write {path}: {error}; earlier checkpoints are safe") from error


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors (on the CPU) and numbers of a checkpoint, or DamagedCheckpoint."""
    if path.exists() and not os.access(path, os.R_OK):
        raise PermissionError(f"{path} is not readable by this user")
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error}") from error
    if "weft" not in metadata or "sha256" not in metadata:
        raise DamagedCheckpoint(f"{path} was not written by weft, or its header was edited")
    if digest(tensors, metadata["weft"]) != metadata["sha256"]:
        raise DamagedCheckpoint(f"{path} does not match its checksum: it was truncated or edited after it was written")
    numbers = json.loads(metadata["weft"])
    if numbers.get("format") != FORMAT:
        raise DamagedCheckpoint(f"{path} has format {numbers.get('format')}, this version reads {FORMAT}")
    return tensors, numbers


def digest(tensors: Mapping[str, Tensor], text: str) -> str:
    total = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        t = tensors[name]
        total.update(f"\0{name}\0{t.dtype}\0{tuple(t.shape)}\0".encode())
        if t.numel():
            total.update(t.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep: int = 2, say: Callable[[str], None] = print):
        self.folder, self.keep, self.say = folder, keep, say

    @property
    def best(self) -> Path:
        return self.folder / "best.safetensors"

    @property
    def figures(self) -> Path:
        return self.folder / "best.json"

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.safetensors"

    def steps(self) -> list[int]:
        stems = [path.stem.removeprefix("step-") for path in self.folder.glob("step-*.safetensors")]
        return sorted(int(stem) for stem in stems if stem.isdigit())

    def save(self, step: int, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        write(self.path(step), tensors, {**numbers, "step": step})
        for old in self.steps()[: -self.keep]:
            with suppress(OSError):
                self.path(old).unlink(missing_ok=True)

    def mark_best(self, step: int) -> None:
        try:
            with atomic(self.best) as temporary:
                try:
                    os.link(self.path(step), temporary)
                except OSError:  # the file system has no hard links
                    shutil.copyfile(self.path(step), temporary)
        except OSError as error:
            raise CannotSave(f"could not write {self.best}: {error}; earlier checkpoints are safe") from error

    def newest(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The newest valid checkpoint, including the best one; damaged ones are reported and skipped."""
        passed: set[Path] = set()
        while True:
            steps = [self.path(step) for step in reversed(self.steps())]
            candidates = [path for path in [*steps, self.best] if path not in passed and path.exists()]
            if not candidates:
                return None
            passed.add(candidates[0])
            try:
                return read(candidates[0])
            except DamagedCheckpoint as error:
                if candidates[0].exists():  # an active run removes old checkpoints
                    self.say(f"{error}; trying the one before it")

    def tidy(self, step: int) -> None:
        """Before a run continues after `step`: rename newer files, which are damaged; remove temporary files."""
        for later in self.steps():
            if later > step:
                self.path(later).replace(self.path(later).with_name(self.path(later).name + ".damaged"))
        for stray in self.folder.glob(".*.tmp"):
            if is_left_over(stray):
                stray.unlink(missing_ok=True)

    def record_best(self, best: Mapping[str, Any]) -> None:
        """Write the metrics first, then the weights: after a kill in between, the weights are still available."""
        try:
            with atomic(self.figures) as temporary:
                temporary.write_text(json.dumps({**best, "sha256": _sum(best)}) + "\n")
        except OSError as error:
            raise CannotSave(f"could not write {self.figures}: {error}; earlier checkpoints are safe") from error
        self.mark_best(best["step"])

    def best_until(self, step: int, otherwise: dict[str, Any] | None) -> dict[str, Any] | None:
        """The metrics of the best checkpoint up to `step`, if its weights still exist."""
        try:
            best = json.loads(self.figures.read_text())
            if best.pop("sha256") != _sum(best) or best["step"] > step:
                best = otherwise
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            best = otherwise
        if best is None:
            return None
        if self.where_best(best["step"]) is None:
            self.say(f"the best checkpoint, step {best['step']}, is damaged or missing: only later ones count")
            return None
        return best

    def where_best(self, step: int) -> Path | None:
        """A valid file with the weights of this step."""
        for path in (self.best, self.path(step)):
            try:
                if read(path)[1]["step"] == step:
                    return path
            except DamagedCheckpoint:
                continue
        return None


def _sum(best: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(best, sort_keys=True).encode()).hexdigest()
