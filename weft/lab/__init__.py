"""The lab: train any attention mechanism on any task, with exact resume, sweeps and reports."""

from ..tasks.config import TrainConfig, make_config
from .divergence import Diverged
from .evaluate import evaluate_run, load_run
from .loop import Interrupted, Result, train

__all__ = ["Diverged", "Interrupted", "Result", "TrainConfig", "evaluate_run", "load_run", "make_config", "train"]
