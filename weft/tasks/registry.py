"""The registry of tasks: weft's own, those of installed packages, and those of a Python file.

A package provides tasks as entry points, each a Task or a Task class, under the task's name:

    [project.entry-points."weft.tasks"]
    my-task = "my_package.tasks:MyTask"

A file defines `TASKS`, a list of Task objects. Use it like a task name: `weft train FILE.py`, or `FILE.py:NAME` if it
defines several. From Python, use `add_task(MyTask())`. NAME may also be a task of weft, for a file that registers an
attention mechanism.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType

from .base import Task
from .config import TrainConfig

GROUP = "weft.tasks"

# The modules of this folder register their tasks when they are imported: all of them on first use of the registry.
_pending = sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))

_tasks: dict[str, Task] = {}
_files: dict[str, Path] = {}  # task -> the file that defines it
_ran: dict[Path, ModuleType] = {}


def add_task(task: Task, file: Path | None = None) -> Task:
    """Register a task under its name. `file` is the Python file that defines it, unless it is installed."""
    if type(task).__module__.rpartition(".")[0] != __package__:
        _register_own()
    if task.name in _tasks and (file is None or _files.get(task.name) != file):
        raise ValueError(f"there is already a task named {task.name!r}")
    _tasks[task.name] = task
    if file is not None:
        _files[task.name] = file
    return task


def _register_own() -> None:
    while _pending:
        importlib.import_module(f".{_pending.pop()}", __package__)


def tasks() -> list[str]:
    """The names of all tasks."""
    _register_own()
    return sorted({*_tasks, *_installed()})


def get_task(name: str) -> Task:
    _register_own()
    if name not in _tasks and (entry := _installed().get(name)):
        found = entry.load()
        task = found() if isinstance(found, type) else found
        if not isinstance(task, Task) or task.name != name:
            raise TypeError(f"the entry point {name} = {entry.value} must be a Task named {name!r}, got {task!r}")
        add_task(task)
    if name not in _tasks:
        near = difflib.get_close_matches(str(name), tasks(), n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"the tasks: {', '.join(tasks())}"
        raise ValueError(f"unknown task {name!r}; {hint}")
    return _tasks[name]


def file_of(name: str) -> str:
    """The file that defines the task; empty for weft's tasks and installed ones."""
    return str(_files.get(name, ""))


def task_of(config: TrainConfig) -> Task:
    """The task of a run."""
    if config.task_file and (config.task not in _tasks or Path(config.task_file) not in _ran):
        if not Path(config.task_file).is_file():
            raise FileNotFoundError(
                f"the task {config.task!r} needs {config.task_file}, which does not exist: restore the file, or "
                "correct task_file in the run's config.json"
            )
        load_tasks(config.task_file)
    return get_task(config.task)


def resolve(task: str, file: str = "") -> tuple[str, str]:
    """Resolve 'FILE.py', 'FILE.py:NAME' or a name to (name, file), and register the file's tasks."""
    if not file and (task.endswith(".py") or ".py:" in task):
        file, _, task = task.partition(".py")
        file, task = f"{file}.py", task.removeprefix(":")
    if file:
        names = load_tasks(file)
        if not task and not names:
            raise ValueError(f"{file} defines no tasks: set TASKS to a list of Task objects, or use {file}:TASK")
        if not task and len(names) > 1:
            raise ValueError(f"{file} defines {', '.join(names)}: choose one as {file}:NAME")
        task = task or names[0]
        if task not in names and task not in tasks():
            raise ValueError(f"{file} does not define the task {task!r}; it defines {', '.join(names) or 'none'}")
    return task, str(Path(file).resolve()) if file else file_of(task)


def load_tasks(file: str | Path) -> list[str]:
    """Run a file once, register its tasks, and return their names."""
    path = Path(file).resolve()
    names = [name for name, origin in _files.items() if origin == path]
    return names or register(_ran.get(path) or run_file(path), path)


def register(module: ModuleType, file: Path) -> list[str]:
    found: Sequence[Task] = getattr(module, "TASKS", ())
    if not isinstance(found, Sequence) or not all(isinstance(task, Task) for task in found):
        raise ValueError(f"{file}: TASKS must be a list of Task objects, got {found!r}")
    return [add_task(task, file).name for task in found]


def run_file(file: Path) -> ModuleType:
    """Run a Python file, which may import other files of its folder."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist")
    name = f"weft_file_{file.parent.name}_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _importing_from(file.parent):
        sys.modules[name] = module  # dataclasses look up their module
        spec.loader.exec_module(module)
    _ran[file] = module
    return module


@contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """Allow imports from `folder`, and forget them afterwards: two folders may each have a `common.py`."""
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            origin = getattr(sys.modules[name], "__file__", None)
            if origin and Path(origin).resolve().parent == folder and not name.startswith("weft_file_"):
                del sys.modules[name]


def _installed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}
