"""The active context-parallel region, if any. `weft.parallel.context` sets it; every mechanism's `forward` reads it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

_current: Any = None


def current() -> Any:
    """Return the active `weft.parallel.Context`, or None."""
    return _current


@contextmanager
def use(context: Any) -> Iterator[None]:
    """Within this block, `context` is the active one; None switches context parallelism off."""
    global _current
    before, _current = _current, context
    try:
        yield
    finally:
        _current = before


def first_position(x: Tensor) -> int:
    """Position in the whole sequence of the first token of x (B, L, ..); all ranks must call this."""
    if _current is None:
        return 0
    _current.agree(x.shape[1], x.device)
    return _current.start


def refuse(what: str) -> None:
    """Raise an error inside a context-parallel region."""
    if _current is not None:
        raise ValueError(f"{what} does not support context parallelism: it needs the whole sequence on one rank")
