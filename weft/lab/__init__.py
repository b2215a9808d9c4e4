"""The lab: train any attention mechanism on any task, with exact resume, sweeps and reports."""

from typing import TYPE_CHECKING

from .._lazy import lazy
from ..tasks.config import TrainConfig, make_config

if TYPE_CHECKING:
    from .divergence import Diverged
    from .evaluate import evaluate_run, load_run
    from .loop import Interrupted, Result, train

__all__ = ["Diverged", "Interrupted", "Result", "TrainConfig", "evaluate_run", "load_run", "make_config", "train"]

_NAMES = {"Diverged": "divergence", "Interrupted": "loop", "Result": "loop", "train": "loop"}
_NAMES |= {"evaluate_run": "evaluate", "load_run": "evaluate"}

__getattr__, __dir__ = lazy(__name__, _NAMES)
