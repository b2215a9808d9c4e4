"""Tasks, one file each: data, vocabulary, metrics and the papers' hyper-parameters."""

from . import (  # noqa: F401  each registers its tasks
    cifar,
    density,
    detection,
    digits,
    glue,
    imagenet,
    images,
    imdb,
    listops,
    matching,
    molecules,
    own,
    pathfinder,
    streams,
    text,
    tiny_imagenet,
    tokens,
    translation,
)
from .base import DataMissing, Known, Task, TaskData
from .config import TrainConfig, make_config
from .registry import add_task, get_task, load_tasks, tasks

__all__ = [
    "DataMissing", "Known", "Task", "TaskData", "TrainConfig", "add_task", "cifar", "digits", "get_task", "images",
    "imdb", "listops", "load_tasks", "make_config", "matching", "pathfinder", "tasks", "text",
]  # fmt: skip
