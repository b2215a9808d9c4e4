"""Compare runs on one self-contained page: a table, their curves and their images."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..pages import Curve, Part, chart, heading, page, table
from ..tasks.config import TrainConfig
from ..tasks.registry import task_of
from .progress import figure
from .run import Run
from .trained import is_exported


def read_run(folder: Path) -> dict[str, Any]:
    """The data of a run that the page shows."""
    run = Run(folder)
    config, result = run.config(), run.result()
    val = run.entries("val")
    logged = [k for k in (val[-1] if val else {}) if k not in ("kind", "step", "loss")]
    own, unread = _of_task(config)
    metric = next((k for k in (own, *logged) if k in logged), "loss")
    changes = ["subsampled"] * bool(config.subsample) + [f"cache {config.cache:g}"] * bool(config.cache)
    return {
        "name": folder.name,
        "task": config.task,
        "attention": ", ".join([config.attention, *changes]),
        "model": config.model,
        "shape": "" if "layers" in unread else f"{config.layers}x{config.heads}",
        "steps": config.steps,
        "losses": [(e["step"], e["loss"]) for e in run.entries("train")],
        "metric": metric,
        "val": [(e["step"], e[metric]) for e in val if isinstance(e.get(metric), float)],
        "result": result,
        "environment": (run.starts() or [{}])[-1],
        "galleries": run.galleries(),
    }


def name_of(folder: Path, among: Sequence[Path]) -> str:
    """The name of a run's folder; if others have the same name, its path below the folder that they share."""
    place = os.path.abspath(folder)  # "." has no name
    same = {path for path in map(os.path.abspath, among) if os.path.basename(path) == os.path.basename(place)}
    return os.path.relpath(place, os.path.commonpath(same)) if len(same) > 1 else os.path.basename(place)


def _of_task(config: TrainConfig) -> tuple[str, tuple[str, ...]]:
    """The task's metric and the fields that its model does not read; empty if the file that defines it is gone."""
    try:
        task = task_of(config)
        return task.metric, task.unread(config)
    except Exception:  # code of the user
        return "", ()


def smooth(points: Sequence[tuple[float, float]], window: int = 10) -> list[tuple[float, float]]:
    """Means over a few steps, to reduce the noise of single batches; at most 400 points."""
    window = max(1, min(window, len(points) // 10), -(-len(points) // 400))
    parts = [points[i : i + window] for i in range(0, len(points), window)]
    return [(part[-1][0], sum(y for _, y in part) / len(part)) for part in parts]


def runs_table(runs: Sequence[dict[str, Any]]) -> Part:
    metrics = dict.fromkeys(run["metric"] for run in runs)
    head = ["run", "task", "model", "layers × heads", "attention", "steps", *map(_heading, metrics), "parameters"]
    rows = []
    for run in runs:
        result = run["result"] or {}
        test = result.get("test", {}) if result else {run["metric"]: "unfinished"}
        figures = [_figure(metric, test.get(metric)) if metric == run["metric"] else "" for metric in metrics]
        steps = f"{run['losses'][-1][0] if run['losses'] else 0:,} of {run['steps']:,}"
        count = f"{result['parameters']:,}" if result else ""
        rows.append([run["name"], run["task"], run["model"], run["shape"], run["attention"], steps, *figures, count])
    return table(head, rows, "Runs")


def _heading(metric: str) -> str:
    _, unit = scale_of(metric)
    return f"test {metric.replace('_', ' ')}" + (f", {unit}" if unit else "")


def _figure(metric: str, value: Any) -> str:
    if not isinstance(value, float):
        return value or ""
    scale, unit = scale_of(metric)
    return f"{value * scale:.2f}" if unit else figure(value)


def origin(start: dict[str, Any]) -> str:
    """Versions, platform and day of a run, as far as known."""
    start = start | {"day": str(start.get("time", ""))[:10]}
    named = {"weft": "weft ", "torch": "torch ", "python": "Python ", "platform": "", "day": ""}
    return ", ".join(f"{name}{start[key]}" for key, name in named.items() if start.get(key)) or "origin unknown"


def report(
    folders: Sequence[str | Path], out: str | Path, marks: dict[str, list[tuple[float, str]]] | None = None
) -> Path:
    """Write the page of these runs; `marks` (by run name) are labelled steps to draw into its curve."""
    from ..tasks.files import atomic

    places = [Path(folder) for folder in folders]
    for place in filter(is_exported, places):
        raise ValueError(f"{place} is an exported model, which has no curves: pass the folder of its run")
    runs = [{**read_run(place), "name": name_of(place, places)} for place in places]
    if not runs:
        raise ValueError("a report needs at least one run")
    marks = marks or {}
    parts = [runs_table(runs), *charts(runs, marks)]
    parts += [part for run in runs if run["galleries"] for part in (heading(run["name"]), *run["galleries"])]
    origins: dict[str, list[str]] = {}
    for run in runs:
        origins.setdefault(origin(run["environment"]), []).append(run["name"])
    footer = "; ".join(f"{', '.join(names)}: {own}" if len(origins) > 1 else own for own, names in origins.items())
    with atomic(Path(out)) as temporary:
        temporary.write_text(page("Runs side by side", parts, footer=footer), encoding="utf-8")
    return Path(out)


def charts(runs: Sequence[dict[str, Any]], marks: dict[str, list[tuple[float, str]]] | None = None) -> list[Part]:
    """The losses of all runs in one chart, and a chart for each validation metric."""
    losses = [Curve(run["name"], smooth(run["losses"]), (marks or {}).get(run["name"], [])) for run in runs]
    made = [chart("Training loss", losses, y="loss")]
    for metric in dict.fromkeys(run["metric"] for run in runs):
        name, (scale, unit) = metric.replace("_", " "), scale_of(metric)
        curves = [Curve(r["name"], [(x, y * scale) for x, y in r["val"]]) for r in runs if r["metric"] == metric]
        made.append(chart(f"Validation {name}", curves, y=name + (f", {unit}" if unit else "")))
    return made


def scale_of(metric: str) -> tuple[float, str]:
    """Accuracies are shown in percent."""
    return (100.0, "%") if "accuracy" in metric else (1.0, "")
