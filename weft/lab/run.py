"""A run is a folder.

config.json        every field of the TrainConfig
data.json          a record of the data, see `weft.lab.kept`
environment.json   versions, machine, commit and share of the GPU, one entry per start
metrics.jsonl      one line per step ("train"), evaluation ("val") and the end ("test")
checkpoints/       see `weft.lab.checkpoint`
result.json        written once, when the run is complete
gallery.json       images for `weft report`: detected objects, or samples of `weft sample`
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ..tasks import config as config_
from ..tasks.config import TrainConfig
from ..tasks.files import atomic
from . import lock
from .checkpoint import CannotSave
from .say import say as say_

SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"  # the part of a GPU that a process may use, if NVIDIA's MPS runs

MODEL = "model.safetensors"  # of an exported model
REPLACED = ("data.json", "environment.json", "metrics.jsonl", "result.json", "vocabulary.txt", "tokenizer.json",
            "checkpoints")  # by a run, besides its config.json  # fmt: skip

TIME = "%Y-%m-%dT%H:%M:%S%z"  # of each launch


class RunExists(Exception):
    """The folder already contains a run."""


class DamagedFile(ValueError):
    """A file of a run is not valid."""


class Run:
    """The folder of a run. Only the process that holds its lock may write."""

    def __init__(self, folder: Path, say: Callable[[str], None] = say_):
        self.folder, self.say = folder, say
        self._metrics: int | None = None
        self._lock: int | None = None
        self._noted: list[int] = []

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    def config(self) -> TrainConfig:
        path = self.folder / "config.json"
        try:
            return config_.from_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise FileNotFoundError(f"{self.folder} is not a run: {missing_config(self.folder)}") from None
        except ValueError as error:
            raise DamagedFile(
                f"{path}: {_what(error)}. Repair it by hand; the header of every file in "
                f"{self.checkpoints} contains the settings too"
            ) from None

    def result(self) -> dict[str, Any] | None:
        """The result of a complete run. A damaged result counts as missing: the run tests its model again."""
        path = self.folder / "result.json"
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
            for name, kind in {"step": int, "best_step": int, "val": dict, "test": dict, "parameters": int}.items():
                if not isinstance(result[name], kind):
                    raise ValueError(f"{name} is {result[name]!r}")
            return result
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            self.say(f"{path} is damaged ({_what(error)}): the run counts as unfinished; run weft resume")
            return None

    def galleries(self) -> list[dict[str, Any]]:
        """Parts of `weft report`: the images of a complete run, if its task draws them."""
        path = self.folder / "gallery.json"
        try:
            return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        except (OSError, ValueError) as error:
            self.say(f"{path} is damaged ({_what(error)}) and was skipped")
            return []

    def computed(self) -> bool:
        """Whether the folder contains a checkpoint or metrics."""
        kept = any(self.checkpoints.glob("*.safetensors*"))
        return kept or (self.metrics.exists() and self.metrics.stat().st_size > 0)

    def check(self, config: TrainConfig, resume: bool) -> None:
        """Raise RunExists if the folder contains a different run, or files that a run would replace. Writes nothing."""
        begun = (self.folder / "config.json").exists()
        if not begun or not self.computed():
            names = (MODEL,) if begun else (MODEL, *REPLACED)
            theirs = [name for name in names if (self.folder / name).exists()]
            if begun:
                try:
                    self.config()
                except DamagedFile:
                    theirs.append("config.json")
            if theirs:
                what = f"is not a run, and a run there would replace or contradict its {theirs[0]}"
                raise RunExists(f"{self.folder} {what}: choose another --out")
            return
        if not resume:
            raise RunExists(
                f"{self.folder} already contains a run: add --resume to continue it, or choose another --out"
            )
        changed = config_.differences(self.config(), config)
        if changed:
            raise RunExists(
                f"{self.folder} contains another run with different settings: {'; '.join(changed)}; "
                f"use weft resume {shlex.quote(str(self.folder))} to continue it, or choose another --out"
            )

    def lock(self) -> None:
        """Lock the folder for this process; raises InUse if another process holds the lock."""
        if self._lock is not None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock.take(self.folder)
        except OSError as error:
            raise CannotSave(f"could not write to {self.folder}: {error}") from error

    def begin(self, config: TrainConfig, files: Mapping[str, str]) -> None:
        """Write the config, the record of the data and the environment."""
        for name in ("result.json", "outcome.json"):  # of fewer steps, and why a sweep's attempt failed
            (self.folder / name).unlink(missing_ok=True)
        self.write_config(config)
        for name, text in files.items():
            self.write(name, text)
        starts = self.starts()
        past = self.folder / "environment.json"
        if not starts and past.exists():
            past.replace(past.with_name("environment.json.damaged"))
        self.write("environment.json", json.dumps([*starts, environment()], indent=2) + "\n")

    def starts(self) -> list[dict[str, Any]]:
        """The environment of each launch. Damage is reported but is not an error."""
        path = self.folder / "environment.json"
        try:
            starts = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(starts, list) or not all(isinstance(start, dict) for start in starts):
                raise ValueError("it is not a list of launches")
            return starts
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            self.say(f"{path} is damaged ({_what(error)}): ignored, since it is not needed to continue")
            return []

    def write(self, name: str, text: str) -> None:
        try:
            with atomic(self.folder / name) as temporary:
                temporary.write_text(text, encoding="utf-8", newline="\n")
        except OSError as error:
            raise CannotSave(f"could not write {self.folder / name}: {error}") from error

    def write_config(self, config: TrainConfig) -> None:
        self.write("config.json", config_.to_json(config_.absolute(config)))

    def rewind(self, step: int) -> None:
        """Remove every line after `step`: those steps will be repeated, with the same result."""
        if self._metrics is not None:
            os.close(self._metrics)
            self._metrics = None
        if not self.metrics.exists():
            return
        kept = [entry for entry in self._read() if entry["step"] <= step and entry["kind"] != "test"]
        self.write("metrics.jsonl", "".join(json.dumps(entry) + "\n" for entry in kept))

    def log(self, entries: list[dict[str, Any]]) -> None:
        content = "".join(json.dumps(entry) + "\n" for entry in entries).encode()
        try:
            if self._metrics is None:
                self._metrics = os.open(self.metrics, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            size = os.fstat(self._metrics).st_size
            try:
                while content:
                    content = content[os.write(self._metrics, content) :]
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._metrics, size)  # no incomplete lines
                raise
        except OSError as error:
            raise CannotSave(f"could not write {self.metrics}: {error}; checkpoints are not affected") from error

    def sync(self) -> None:
        """Flush the log to disk; called before the checkpoint that depends on it."""
        if self._metrics is not None:
            if not self.metrics.exists():  # a checkpoint would begin another folder
                what = "was moved or removed during the run"
                raise CannotSave(f"{self.folder} {what}: continue it in its new place with weft resume")
            try:
                os.fsync(self._metrics)
            except OSError as error:
                raise CannotSave(f"could not write {self.metrics}: {error}") from error

    def entries(self, kind: str) -> list[dict[str, Any]]:
        return [entry for entry in self._read() if entry["kind"] == kind]

    def _read(self) -> list[dict[str, Any]]:
        """All entries of the log; truncated or damaged lines are reported and skipped."""
        if not self.metrics.exists():
            return []
        entries, bad = [], []
        lines = self.metrics.read_bytes().split(b"\n")
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
                sound = isinstance(entry, dict) and isinstance(entry["step"], int) and isinstance(entry["kind"], str)
                if not sound or (entry["kind"] == "train" and not isinstance(entry["loss"], float)):
                    raise ValueError
                entries.append(entry)
            except (ValueError, KeyError):
                bad.append(number)
        if bad and self._noted != bad:
            what = "truncated" if bad == [len(lines)] else "damaged"
            self.say(f"{self.metrics}: line {', '.join(map(str, bad[:5]))} is {what} and was skipped")
            self._noted = bad
        return entries

    def close(self) -> None:
        """Never fails: everything important was synced before."""
        for handle in (self._metrics, self._lock):
            if handle is not None:
                with suppress(OSError):
                    os.close(handle)
        self._metrics = self._lock = None


def missing_config(folder: Path) -> str:
    return "it has no config.json" if folder.exists() else "it does not exist"


def _what(error: Exception) -> str:
    """A readable message for a file that cannot be parsed."""
    if isinstance(error, UnicodeDecodeError):
        line = error.object[: error.start].count(b"\n") + 1
        return f"line {line} is not {error.encoding} (byte {error.object[error.start]:#04x})"
    if isinstance(error, json.JSONDecodeError):
        return "it is empty" if not error.doc.strip() else f"line {error.lineno} is not JSON: {error.msg}"
    if isinstance(error, KeyError):
        return f"{error.args[0]} is missing"
    return str(error)


def environment() -> dict[str, Any]:
    from .. import __version__

    found: dict[str, Any] = {
        "time": time.strftime(TIME),
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
        found["multiprocessors"] = torch.cuda.get_device_properties().multi_processor_count
        if share := os.environ.get(SHARE):
            found["gpu_share"] = float(share)
    elif torch.backends.mps.is_available():
        found["gpu"] = "Apple GPU"
    return found


def commit() -> str:
    """The commit of the code, with "+changes" if there are uncommitted changes; outside a repository, $WEFT_COMMIT.
    An environment inside another project's repository is not part of it."""
    here = Path(__file__).resolve()
    try:
        git = ["git", "-C", str(here.parent)]
        mine = subprocess.run([*git, "ls-files", "--error-unmatch", here.name], capture_output=True, timeout=10)
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        changes = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return os.environ.get("WEFT_COMMIT", "")
    if mine.returncode or head.returncode:
        return os.environ.get("WEFT_COMMIT", "")
    return head.stdout.strip() + ("+changes" if changes.stdout.strip() else "")
