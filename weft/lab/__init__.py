"""The lab: train any attention mechanism on any task, with exact resume, sweeps and reports."""

from ..tasks.config import TrainConfig, make_config
from .evaluate import evaluate_run, load_run
from .loop import Diverged, Interrupted, Result, train

__all__ = ["Diverged", "Interrupted", "Result", "TrainConfig", "evaluate_run", "load_run", "make_config", "train"]
