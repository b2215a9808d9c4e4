"""The lab: train any attention on any task, lose nothing, and read what came out."""

from ..tasks.config import TrainConfig, make_config
from .evaluate import evaluate_run, load_run
from .loop import Diverged, Interrupted, Result, train

__all__ = ["Diverged", "Interrupted", "Result", "TrainConfig", "evaluate_run", "load_run", "make_config", "train"]
