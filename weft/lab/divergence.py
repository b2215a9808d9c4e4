"""Stop a run whose loss is not finite or has grown too large."""

from __future__ import annotations

import math

PATIENCE = 20  # consecutive losses whose mean must be too high before a run counts as diverged


class Diverged(Exception):
    """The loss is not finite, or has grown too large; the last good checkpoint is kept."""


class LossMonitor:
    """Compares the mean of the last losses with `factor` times the first loss; a factor of 0 allows any finite loss."""

    def __init__(self, factor: float):
        self.factor, self.first = factor, None  # type: float, float | None
        self.recent: list[float] = []

    def problem(self, step: int, loss: float) -> str:
        """Record a loss. Returns what is wrong, or an empty string."""
        if self.first is None:
            self.first = loss
        self.recent = [*self.recent, loss][-PATIENCE:]
        limit = self.first + (self.factor - 1) * abs(self.first)  # the loss may be negative
        if not math.isfinite(loss):
            return f"the loss of step {step} is {loss}"
        if self.factor and len(self.recent) == PATIENCE and sum(self.recent) / PATIENCE > limit:
            return f"the mean of the last {PATIENCE} losses up to step {step} is above {limit:.4g}"
        return ""

    def restore(self, first: float | None, losses: list[float]) -> None:
        self.first, self.recent = first, losses[-PATIENCE:]
