"""Checkpoints: one safetensors file each, complete or absent, checked when read, never pickle.

    checkpoints/step-00000200.safetensors     model/…, optimizer/PARAMETER/…; the run's numbers as JSON in the header
    checkpoints/best.safetensors              a hard link to the best one on validation data

A file is written to a temporary name, flushed to the disk and renamed, so a name that exists holds a whole file. The
header carries a SHA-256 of everything else in it: a file that was cut or edited later is found out and passed over.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..tasks.files import atomic

FORMAT = 1


class DamagedCheckpoint(Exception):
    """The file does not hold what was written into it."""


class CannotSave(Exception):
    """The checkpoint could not be written; those written earlier are untouched."""


def write(path: Path, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
    """Write the file, whole or not at all. `numbers` is anything JSON can hold."""
    text = json.dumps({"format": FORMAT, **numbers}, sort_keys=True)
    # Tied weights share memory, which the format refuses; a clone on the way out costs nothing that matters.
    ready = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    try:
        with atomic(path) as temporary:
            save_file(ready, temporary, metadata={"weft": text, "sha256": digest(ready, text)})
            os.chmod(temporary, 0o666 & ~_umask())  # the library writes files that only their owner may read
    except (OSError, SafetensorError) as error:
        raise CannotSave(f"could not write {path}: {error}; earlier checkpoints are untouched") from error


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors (on the CPU) and numbers of a checkpoint, or DamagedCheckpoint."""
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, SafetensorError, ValueError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error}") from error
    if "weft" not in metadata or "sha256" not in metadata:
        raise DamagedCheckpoint(f"{path} was not written by weft, or its header was edited")
    if digest(tensors, metadata["weft"]) != metadata["sha256"]:
        raise DamagedCheckpoint(f"{path} does not match its checksum: it was cut or edited after it was written")
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

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.safetensors"

    def steps(self) -> list[int]:
        return sorted(int(p.stem.removeprefix("step-")) for p in self.folder.glob("step-*.safetensors"))

    def save(self, step: int, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any], best: bool) -> None:
        write(self.path(step), tensors, {**numbers, "step": step})
        if best:
            self.mark_best(step)
        for old in self.steps()[: -self.keep]:
            self.path(old).unlink(missing_ok=True)

    def mark_best(self, step: int) -> None:
        try:
            with atomic(self.best) as temporary:
                try:
                    os.link(self.path(step), temporary)
                except OSError:  # a file system without hard links
                    shutil.copyfile(self.path(step), temporary)
        except OSError as error:
            raise CannotSave(f"could not write {self.best}: {error}; earlier checkpoints are untouched") from error

    def newest(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The newest sound checkpoint; damaged ones are named and set aside."""
        for stray in self.folder.glob(".*.tmp"):  # left by a kill in the middle of a write
            stray.unlink(missing_ok=True)
        for step in reversed(self.steps()):
            path = self.path(step)
            try:
                tensors, numbers = read(path)
            except DamagedCheckpoint as error:
                self.say(f"{error}; going back to the one before it")
                path.replace(path.with_name(path.name + ".damaged"))
                continue
            if (numbers.get("best") or {}).get("step") == step:
                self.mark_best(step)  # a kill may have come between the file and its link
            return tensors, numbers
        return None

    def has_any(self) -> bool:
        return bool(self.steps())
