"""Log metrics to the run's metrics.jsonl, and to TensorBoard if the config enables it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from .run import Run


class Metrics:
    def __init__(self, run: Run, tensorboard: bool):
        self.run, self.tensorboard = run, tensorboard
        self._writer: Any = None

    def log(self, entries: list[dict[str, Any]]) -> None:
        self.run.log(entries)
        if not self.tensorboard:
            return
        if self._writer is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ImportError("TensorBoard is not installed: pip install 'weft[tensorboard]'") from error
            folder = self.run.folder / "tensorboard"
            self._writer = SummaryWriter(str(folder), purge_step=entries[0]["step"])
        for entry in entries:
            for key, value in entry.items():
                if key not in ("kind", "step"):
                    self._writer.add_scalar(f"{entry['kind']}/{key}", value, entry["step"])

    def close(self) -> None:
        if self._writer is not None:
            with suppress(OSError):  # on a full disk, the original error matters more
                self._writer.close()
