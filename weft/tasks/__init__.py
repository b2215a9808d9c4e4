"""Tasks, one file each: data, vocabulary, metrics and the papers' hyper-parameters."""

from typing import TYPE_CHECKING

from .._lazy import lazy
from .config import TrainConfig, make_config

if TYPE_CHECKING:
    from .base import DataMissing, Known, Task, TaskData
    from .registry import add_task, get_task, load_tasks, tasks

__all__ = [
    "DataMissing", "Known", "Task", "TaskData", "TrainConfig", "add_task", "get_task", "load_tasks", "make_config",
    "tasks",
]  # fmt: skip

_NAMES = dict.fromkeys(("DataMissing", "Known", "Task", "TaskData"), "base")
_NAMES |= dict.fromkeys(("add_task", "get_task", "load_tasks", "tasks"), "registry")

__getattr__, __dir__ = lazy(__name__, _NAMES)
