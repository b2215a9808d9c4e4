"""Decisions that all processes of a run make together."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class Processes:
    def __init__(self, fabric: Any):
        self.fabric, self.world, self.rank = fabric, fabric.world_size, fabric.global_rank
        self.main = fabric.is_global_zero
        self._asked, self._ask_at = (time.perf_counter(), 0), 1

    def on_main(self, act: Callable[[], None]) -> None:
        """Run `act` on the first process. If it fails, all processes raise its error, so that none hangs."""
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

    def any(self, flag: bool) -> bool:
        """True on every process if it is true on one."""
        return flag if self.world == 1 else self._sum(float(flag))[0] > 0

    def start_at(self, step: int) -> None:
        self._asked, self._ask_at = (time.perf_counter(), step), step + 1

    def any_every_few_seconds(self, flag: bool, step: int) -> bool:
        """Like `any`, but exchanges the flag only every few seconds, at the same step on all processes."""
        if self.world == 1:
            return flag
        if step < self._ask_at:
            return False
        now, (then, before) = time.perf_counter(), self._asked
        wanted, seconds = self._sum(float(flag), (now - then) / max(1, step - before))
        self.start_at(step)
        self._ask_at = step + max(1, min(100, int(2 / max(seconds, 1e-9))))
        return wanted > 0

    def _sum(self, *values: float) -> list[float]:
        own = torch.tensor(values, device=self.fabric.device)
        return self.fabric.all_reduce(own, reduce_op="sum").tolist()
