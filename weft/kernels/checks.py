"""How close a kernel must be to the float64 reference, and memory that shows what was never written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

# ‖out − ref‖ / ‖ref‖ that rounding explains; a wrong index or a missed term is far above it.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 1.5e-2}


def relative_error(mine: Tensor, theirs: Tensor) -> float:
    """‖mine − theirs‖ / ‖theirs‖; plain ‖mine‖ where the truth is zero, but for float64's rounding; NaN stays NaN and
    passes no test."""
    return ((mine.double() - theirs).norm() / torch.where(theirs.norm() > 1e-12, theirs.norm(), 1.0)).item()


def failures(errors: dict[str, float], dtype: torch.dtype) -> dict[str, float]:
    return {name: error for name, error in errors.items() if not error < TOLERANCE[dtype]}


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh memory holds NaN, so that an element that nobody wrote, or that was read too early, shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # in this mode PyTorch fills what torch.empty gives
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
