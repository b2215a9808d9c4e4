"""Tasks, one file each: data, vocabulary, metric and the papers' hyper-parameters."""

from . import digits
from .base import DataMissing, Task, TaskData, add_task, get_task, tasks

__all__ = ["DataMissing", "Task", "TaskData", "add_task", "digits", "get_task", "tasks"]
