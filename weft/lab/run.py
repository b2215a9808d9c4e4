"""A run is a folder.

config.json        every field of the TrainConfig
environment.json   versions, machine and commit, one entry per start
metrics.jsonl      one line per step ("train"), evaluation ("val") and the end ("test")
checkpoints/       see `weft.lab.checkpoint`
result.json        written once, when the run is complete
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ..tasks import config as config_
from ..tasks.config import TrainConfig
from ..tasks.files import atomic
from .checkpoint import CannotSave


class RunExists(Exception):
    """The folder already holds a run."""


class Run:
    """The folder, seen by the one process that writes it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._metrics: Any = None

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    def config(self) -> TrainConfig:
        try:
            return config_.from_json((self.folder / "config.json").read_text())
        except FileNotFoundError:
            raise FileNotFoundError(f"{self.folder} holds no run: there is no config.json in it") from None

    def result(self) -> dict[str, Any] | None:
        path = self.folder / "result.json"
        return json.loads(path.read_text()) if path.exists() else None

    def begin(self, config: TrainConfig, resume: bool) -> None:
        """Make the folder, or make sure that it holds this very run."""
        if (self.folder / "config.json").exists():
            if not resume:
                raise RunExists(
                    f"{self.folder} already holds a run: add --resume to go on with it, or choose another --out"
                )
            changed = config_.differences(self.config(), config)
            if changed:
                raise RunExists(f"{self.folder} holds another run, whose settings differ: {'; '.join(changed)}")
        self.write("config.json", config_.to_json(config))
        past = self.folder / "environment.json"
        starts = json.loads(past.read_text()) if past.exists() else []
        self.write("environment.json", json.dumps([*starts, environment()], indent=2) + "\n")

    def write(self, name: str, text: str) -> None:
        try:
            with atomic(self.folder / name) as temporary:
                temporary.write_text(text)
        except OSError as error:
            raise CannotSave(f"could not write {self.folder / name}: {error}") from error

    def rewind(self, step: int) -> None:
        """Forget every line after `step`: those steps will be done again, with the same result."""
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        if not self.metrics.exists():
            return
        kept = []
        for line in self.metrics.read_text(errors="replace").splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue  # the line that was being written when the process was killed
            if entry["step"] <= step and entry["kind"] != "test":
                kept.append(line + "\n")
        self.write("metrics.jsonl", "".join(kept))

    def log(self, entries: list[dict[str, Any]]) -> None:
        try:
            if self._metrics is None:
                self._metrics = open(self.metrics, "a")
            self._metrics.write("".join(json.dumps(entry) + "\n" for entry in entries))
            self._metrics.flush()
        except OSError as error:
            raise CannotSave(f"could not write {self.metrics}: {error}") from error

    def sync(self) -> None:
        """The log reaches the disk before the checkpoint that counts on it."""
        if self._metrics is not None:
            try:
                os.fsync(self._metrics.fileno())
            except OSError as error:
                raise CannotSave(f"could not write {self.metrics}: {error}") from error

    def entries(self, kind: str) -> list[dict[str, Any]]:
        if not self.metrics.exists():
            return []
        lines = [json.loads(line) for line in self.metrics.read_text().splitlines()]
        return [entry for entry in lines if entry["kind"] == kind]

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None


def environment() -> dict[str, Any]:
    from .. import __version__

    found: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "weft": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["cuda"] = torch.version.cuda
    return found


def commit() -> str:
    """The commit of the code, with "+changes" where files differ from it; outside a repository, WEFT_COMMIT."""
    here = Path(__file__).resolve().parent
    try:
        git = ["git", "-C", str(here)]
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        changes = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return os.environ.get("WEFT_COMMIT", "")
    if head.returncode:
        return os.environ.get("WEFT_COMMIT", "")
    return head.stdout.strip() + ("+changes" if changes.stdout.strip() else "")
