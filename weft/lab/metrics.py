"""Log metrics to the run's metrics.jsonl, and through Fabric's loggers to TensorBoard or Weights & Biases."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from .run import Run


def _tensorboard(run: Run, first: int) -> Any:
    from lightning.fabric.loggers import TensorBoardLogger

    # After a resume, drop the steps that are repeated.
    return TensorBoardLogger(run.folder, name="tensorboard", version="", purge_step=first)


def _wandb(run: Run, first: int) -> Any:
    from lightning.pytorch.loggers import WandbLogger

    number = hashlib.sha256(str(run.folder.resolve()).encode()).hexdigest()[:12]  # the same after a resume
    return WandbLogger(run.folder.name, save_dir=run.folder, project="weft", id=number, resume="allow")


LOGGERS: dict[str, Callable[[Run, int], Any]] = {"tensorboard": _tensorboard, "wandb": _wandb}


class Metrics:
    def __init__(self, run: Run, logger: str = ""):
        if logger and find_spec(logger) is None:
            raise ImportError(f"--logger {logger} needs the package {logger}: pip install {logger}")
        self.run, self.logger = run, logger
        self._writer: Any = None

    def log(self, entries: list[dict[str, Any]]) -> None:
        self.run.log(entries)
        if not self.logger:
            return
        if self._writer is None:
            self._writer = LOGGERS[self.logger](self.run, entries[0]["step"])
        for entry in entries:
            values = {f"{entry['kind']}/{k}": v for k, v in entry.items() if k not in ("kind", "step")}
            self._writer.log_metrics(values, entry["step"])

    def close(self) -> None:
        if self._writer is not None:
            with suppress(OSError):  # on a full disk, the original error matters more
                self._writer.finalize("success")
