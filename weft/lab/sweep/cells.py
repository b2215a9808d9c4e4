"""A sweep is a Python file that defines a table of a paper: one config per cell.

    TITLE = "ListOps, deep against wide"
    METRIC = "accuracy"                  # a key of the test metrics
    SEEDS = (0, 1, 2)                    # optional; (0,)
    UNIT, SCALE = "%", 100               # optional; how values are printed. Accuracies are percentages by default

    def cells() -> list[Cell]:
        return [Cell(row="full", column="6x8", config=make_config("listops", preset="6x8"), paper=36.9)]

A cell whose run starts from another run's weights names that cell: `start="SLUG"`, or `start="FILE/SLUG"` for a cell
of another file in the folder. A file may also define the tasks of its cells: `TASKS` (see weft/tasks/registry.py).

Runs are stored in `runs/<name of the file>/<row>-<column>-s<seed>` next to the file. If settings on the command line
change the computation, the runs get their own folder: `runs/<name>+steps=100/…`.
"""

from __future__ import annotations

import ast
import dataclasses
import fnmatch
import functools
import hashlib
import json
import re
import types
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from ...attention import attention_info, attentions, make_attention
from ...models.presets import TASKS
from ...tasks.base import DataMissing
from ...tasks.config import FREE_ON_RESUME, TrainConfig, differences, field_types, from_json, moved
from ...tasks.registry import register, run_file, task_of
from ..kept import load_kept, read_kept
from ..pace import CHOSEN, keep_steps
from ..progress import figure
from ..run import TIME, Run, RunExists

# These may differ between two runs of one cell; batch_size x accumulate x devices x nodes may not.
FREE = FREE_ON_RESUME - {"batch_size", "accumulate", "devices", "nodes", "eval_batches"}
BATCH = ("batch_size", "accumulate", "devices", "nodes")


@dataclass(frozen=True)
class Cell:
    """One cell of a table. `paper` is the value printed in the paper."""

    row: str
    column: str
    config: TrainConfig
    paper: float | None = None
    note: str = ""
    start: str = ""  # slug of the cell whose weights (of the same seed) this run starts from

    @property
    def slug(self) -> str:
        return f"{_slug(self.row)}-{_slug(self.column)}"


@dataclass(frozen=True)
class Sweep:
    file: Path
    title: str
    metric: str
    cells: tuple[Cell, ...]
    seeds: tuple[int, ...] = (0,)
    unit: str = ""
    scale: float = 1.0
    about: str = ""  # the file's docstring

    @property
    def name(self) -> str:
        return self.file.stem

    def runs(self, out: str | Path | None = None) -> Path:
        """The folder of its runs: `runs` next to the file, or `out`/<name of the file's folder>."""
        return Path(out) / self.file.parent.name if out else self.file.parent / "runs"

    def show(self, value: float) -> str:
        return figure(value * self.scale, self.digits)

    @property
    def digits(self) -> int:
        return 1 if self.unit == "%" or self.metric == "bleu" else 3


@dataclass(frozen=True)
class Job:
    """One run: a cell with a seed and a folder."""

    sweep: Sweep
    cell: Cell
    config: TrainConfig  # with the seed, the folder and the overrides
    overrides: Mapping[str, Any] = field(default_factory=dict)  # those that change the computation

    @property
    def variant(self) -> str:
        return as_text(self.overrides)

    @property
    def folder(self) -> Path:
        return Path(self.config.out)

    @property
    def name(self) -> str:
        return f"{self.cell.row} / {self.cell.column} / seed {self.config.seed}"


def is_sweep(file: Path) -> bool:
    """Whether the file defines TITLE, METRIC and cells. Parses the file without running it."""
    try:
        body = ast.parse(file.read_text()).body
    except (SyntaxError, UnicodeDecodeError):
        return False
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    return {"TITLE", "METRIC", "cells"} <= names


def load_sweep(file: str | Path) -> Sweep:
    """Run the file and read what it defines."""
    file = Path(file).resolve()
    if not file.is_file():
        raise FileNotFoundError(f"no such sweep: {file}")
    if not is_sweep(file):
        raise ValueError(f"{file} is not a sweep: it must define TITLE, METRIC and cells()")
    module = run_file(file)
    register(module, file)
    cells = module.cells()
    if not isinstance(cells, (list, tuple)):
        raise ValueError(f"{file}: cells() must return a list of Cell, got {cells!r}")
    seeds, percent = getattr(module, "SEEDS", (0,)), module.METRIC == "accuracy"
    if not isinstance(seeds, Sequence):
        raise ValueError(f"{file}: SEEDS must be a sequence such as (0, 1, 2), got {seeds!r}")
    sweep = Sweep(
        file=file,
        title=module.TITLE,
        metric=module.METRIC,
        cells=tuple(cells),
        seeds=tuple(seeds),
        unit=getattr(module, "UNIT", "%" if percent else ""),
        scale=float(getattr(module, "SCALE", 100 if percent else 1)),
        about=(module.__doc__ or "").strip(),
    )
    _check(sweep)
    return sweep


def keep_sweep(sweep: Sweep, out: str | Path | None = None) -> None:
    """Save what the file defines next to its runs, so that reports need not run it."""
    kept = {**dataclasses.asdict(sweep), "file": sweep.file.name, "sha256": _sha256(sweep.file)}
    Run(sweep.runs(out) / sweep.name).write("sweep.json", json.dumps(kept, indent=1) + "\n")


def kept_sweep(file: Path, out: str | Path | None = None) -> Sweep | None:
    """The sweep that `keep_sweep` saved, if the file has not changed since."""
    file = file.resolve()
    try:
        kept = json.loads((Sweep(file, "", "", ()).runs(out) / file.stem / "sweep.json").read_text(encoding="utf-8"))
        if kept.pop("sha256") != _sha256(file):
            return None
        cells = [Cell(**{**cell, "config": from_json(json.dumps(cell["config"]))}) for cell in kept["cells"]]
        return Sweep(**{**kept, "file": file, "cells": tuple(cells), "seeds": tuple(kept["seeds"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def jobs_of(
    sweep: Sweep,
    *,
    out: str | Path | None = None,
    seeds: Sequence[int] | None = None,
    only: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
) -> list[Job]:
    """The runs of the sweep: all cells with the first seed, then all cells with the next one."""
    overrides = dict(overrides or {})
    for name, instead in (("out", "--out"), ("seed", "--seeds"), ("task", "another sweep"), ("preset", "its values")):
        if name in overrides:
            raise ValueError(f"{name} cannot be set for all runs of a sweep: use {instead}")
    if "steps" in overrides and any(cell.config.time_budget for cell in sweep.cells):
        overrides.setdefault("time_budget", 0.0)  # which would choose the steps
    cells = [cell for cell in sweep.cells if not only or any(_matches(cell, pattern) for pattern in only)]
    if not cells:
        known = ", ".join(f"{cell.row}/{cell.column}" for cell in sweep.cells)
        raise ValueError(f"no cell of {sweep.file.name} matches {' or '.join(only)}; its cells: {known}")
    changing = overrides_of(sweep, overrides)
    folder = sweep.runs(out) / (f"{sweep.name}+{_slug(as_text(changing), '=+')}" if changing else sweep.name)
    jobs = []
    for seed in dict.fromkeys(sweep.seeds if seeds is None else seeds):
        for cell in cells:
            where = str(folder / f"{cell.slug}-s{seed}")
            config = dataclasses.replace(cell.config, **overrides, seed=seed, out=where)
            if cell.start:
                other, _, slug = cell.start.rpartition("/")
                config.init_from = str((sweep.runs(out) / other if other else folder) / f"{slug}-s{seed}")
            config.check()
            jobs.append(Job(sweep, cell, config, changing))
    return jobs


def as_text(overrides: Mapping[str, Any]) -> str:
    """'steps=100+dropout=0.0'."""
    return "+".join(f"{name}={value}" for name, value in overrides.items())


def overrides_of(sweep: Sweep, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The overrides that change what some cell computes. `time_budget` scales the warm-up and the steps between
    evaluations, so others give another run."""
    kept = {}
    given = {**overrides, "time_budget": 0.0}
    ignored = [free(dataclasses.replace(cell.config, **given)) for cell in sweep.cells]
    for name, value in sorted(overrides.items()):
        pairs = zip(sweep.cells, ignored, strict=True)
        if any(name not in same and getattr(cell.config, name) != value for cell, same in pairs):
            kept[name] = value
    return kept


def changed(old: TrainConfig, new: TrainConfig) -> list[str]:
    """The settings that make two configs different runs of a table."""
    ignored = free(new) | {*BATCH, "init_from"}
    found = [
        f"{name}: {getattr(old, name)!r} -> {getattr(new, name)!r}"
        for name in field_types()
        if name not in ignored
        and getattr(old, name) != getattr(new, name)
        and not moved(name, getattr(old, name), getattr(new, name))
    ]
    starts = [Path(config.init_from).name for config in (old, new)]  # the folder may have been moved
    if all(starts) and starts[0] != starts[1]:
        found.append(f"init_from: {starts[0]} -> {starts[1]}")
    before, after = examples_per_step(old), examples_per_step(new)
    return [*found, f"examples per step: {before} -> {after}"] if before != after else found


def free(config: TrainConfig) -> frozenset[str]:
    """The settings that may differ between two runs of this config. Packed batches give the losses of padded ones,
    except for dropout's random numbers, if the mechanism's pattern does not depend on the padding, nor the slots of a
    cache; `time_budget` chooses the steps by the speed of the device. The average of the kept checkpoints depends on
    which are kept."""
    names = set(config.attention.split("+"))
    if config.task in TASKS:  # `lra` gives it the pattern of the task's length
        names -= {"bigbird"}
    same = set(CHOSEN) if config.time_budget else set()
    if config.attention != "mixed" and not config.cache and not any(map(padding_matters, names)):
        same.add("packed")
    averaged = {"keep", "checkpoint_every"} if config.test_on == "average" else set()
    return FREE - averaged | same


@functools.cache
def padding_matters(attention: str) -> bool:
    if attention not in attentions():  # of a file that a report does not run
        return True
    causal = not attention_info(attention).bidirectional
    attn = make_attention(attention, heads=2, head_dim=8, causal=causal, max_length=4096)
    return attn.pattern_for(64) != attn.pattern_for(4096)


def examples_per_step(config: TrainConfig) -> int:
    return config.batch_size * config.accumulate * config.devices * config.nodes


def check_folders(jobs: Sequence[Job]) -> None:
    """Raise an error for the first folder that contains a run of other settings, weights or data."""
    by_folder, seen = {str(job.folder): job for job in jobs}, set()
    for job in jobs:
        check_folder(job)
        first = by_folder.get(job.config.init_from)
        if first is not None and Run(job.folder).computed() and not Run(first.folder).computed():
            raise RunExists(_stale(job))
        kept = read_kept(job.folder) if job.config.data != job.cell.config.data and result_of(job) else None
        key = kept and (job.config.task, job.config.data, kept.digest)
        if key and key not in seen and Path(Run(job.folder).config().data).resolve() != Path(job.config.data).resolve():
            seen.add(key)
            with suppress(DataMissing):  # a complete run does not need its data
                load_kept(task_of(job.config), job.config, Run(job.folder), say=lambda text: None)


def _stale(job: Job) -> str:
    return (
        f"{job.folder} started from an earlier run of {job.config.init_from}: move the folder away to train it again, "
        "or choose another --out"
    )


def began_after(run: Run, other: Run) -> bool:
    """Whether this run was begun after the other one."""
    try:
        mine, its = (datetime.strptime(r.starts()[0]["time"], TIME) for r in (run, other))
    except (IndexError, KeyError, ValueError):
        return False  # no such record
    return mine > its


def check_folder(job: Job) -> None:
    """Raise RunExists if the folder contains a run of other settings, or one that started from other weights."""
    run = Run(job.folder)
    if not (job.folder / "config.json").exists() or not (run.metrics.exists() or run.checkpoints.exists()):
        return  # nothing was computed yet
    old, new = run.config(), job.config
    found = changed(old, new)
    # A run may be extended if its results so far do not depend on the number of steps.
    if new.steps > old.steps and not differences(old, new):
        found = changed(dataclasses.replace(old, steps=new.steps), new)
    if found:
        raise RunExists(
            f"{job.folder} contains a run with different settings ({'; '.join(found)}): restore them, choose another "
            "--out, or move the folder"
        )
    if job.cell.start and began_after(Run(Path(new.init_from)), run):
        raise RunExists(_stale(job))


def write_config(job: Job) -> None:
    """Write the config that `weft resume` reads."""
    Run(job.folder).write_config(started(job))
    if job.variant:
        Run(job.folder.parent).write("overrides.json", json.dumps(job.overrides) + "\n")


def result_of(job: Job) -> dict[str, Any] | None:
    """The result of the run if it is complete."""
    result = Run(job.folder).result()
    if result is None or result["step"] < started(job).steps:
        return None
    return result


def started(job: Job) -> TrainConfig:
    """The job's config, with the steps that `time_budget` has chosen if the run has started."""
    run = Run(job.folder)
    return keep_steps(job.config, run.config()) if job.config.time_budget and run.computed() else job.config


def parse_override(text: str) -> tuple[str, Any]:
    """'steps=100' -> ('steps', 100), with the type of the config field."""
    name, equals, value = text.partition("=")
    name = name.strip().lstrip("-").replace("-", "_")
    if not equals or name not in field_types():
        raise ValueError(f"--set takes field=value with a field of TrainConfig; got {text!r}")
    kind: Any = field_types()[name]
    optional = isinstance(kind, types.UnionType)
    if optional:
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
        if value.lower() == "none":
            return name, None
    try:
        if kind is bool:
            return name, {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[value.lower()]
        return name, kind(value)
    except (KeyError, ValueError):
        raise ValueError(f"--set {name}: {value!r} is not of type {kind.__name__}") from None


def _check(sweep: Sweep) -> None:
    if not sweep.cells or not sweep.seeds:
        raise ValueError(f"{sweep.file} has no {'seeds' if sweep.cells else 'cells'}")
    seen: dict[str, Cell] = {}
    for cell in sweep.cells:
        if not isinstance(cell, Cell) or not isinstance(cell.config, TrainConfig):
            raise ValueError(f"{sweep.file}: cells() must return a list of Cell, each with a TrainConfig; got {cell!r}")
        if not isinstance(cell.row, str) or not isinstance(cell.column, str):
            raise ValueError(f"{sweep.file}: row and column must be strings, got {cell.row!r}, {cell.column!r}")
        if cell.slug in seen:
            other = seen[cell.slug]
            raise ValueError(
                f"{sweep.file}: the cells {other.row!r}, {other.column!r} and {cell.row!r}, {cell.column!r} would "
                f"share the folder {cell.slug}; rename one of them"
            )
        seen[cell.slug] = cell
    for cell in sweep.cells:
        if cell.start and "/" not in cell.start and cell.start not in seen:
            raise ValueError(f"{sweep.file}: {cell.slug} starts from {cell.start}, not one of {', '.join(seen)}")


def _matches(cell: Cell, pattern: str) -> bool:
    texts = [text.lower() for text in (cell.row, cell.column, f"{cell.row}/{cell.column}", cell.slug)]
    pattern = pattern.lower()
    return any(pattern == text or fnmatch.fnmatchcase(text, pattern) for text in texts)


def _slug(text: str, keep: str = "") -> str:
    text = text.lower().replace("×", "x")
    return re.sub(rf"[^a-z0-9._{re.escape(keep)}]+", "-", text).strip("-") or "x"
