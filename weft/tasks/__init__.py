"""Tasks, one file each: data, vocabulary, metric and the papers' hyper-parameters."""

from . import cifar, digits, images, imdb, listops, matching, pathfinder, text
from .base import DataMissing, Task, TaskData, add_task, get_task, tasks

__all__ = [
    "DataMissing", "Task", "TaskData", "add_task", "cifar", "digits", "get_task", "images", "imdb", "listops",
    "matching", "pathfinder", "tasks", "text",
]  # fmt: skip
