"""Tables whose models or data `weft train` has no name for: a script hands over tasks, the lab trains them.

    @dataclass Row: what stands in the table, the task that builds and trains it, the paper's figures
    run(...)        every row with every seed, one after the other; stopped and started again it goes on

Runs lie in OUT/<row>-s<seed> and are runs of the lab. OUT/table.md has what came out beside the paper's figures.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.lab import make_config, train
from weft.lab.run import Run
from weft.lab.sweep import parse_override
from weft.tasks import Task, add_task

Paper = Mapping[str, float]


@dataclass(frozen=True)
class Row:
    name: str
    task: Callable[[], Task]  # of the lab, with a name of its own
    paper: Paper = field(default_factory=dict)  # test metric -> the paper's figure
    config: Mapping[str, Any] = field(default_factory=dict)  # fields of TrainConfig; `epochs` in place of steps

    @property
    def slug(self) -> str:
        return re.sub(r"[^a-z0-9.]+", "-", self.name.lower()).strip("-")


def run(
    title: str,
    rows: Sequence[Row],
    *,
    about: str,
    metrics: Mapping[str, float],
    seeds: Sequence[int] = (0,),
    recipe: Mapping[str, Any] | None = None,
    arguments: Sequence[str] | None = None,
) -> dict[str, list[dict[str, Any]]]:
    """`metrics` are the test metrics shown, each with the factor that brings it to the paper's unit."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="data", help="the folder that holds the data")
    parser.add_argument("--out", type=Path, default=Path("runs") / re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-"))
    parser.add_argument("--rows", nargs="+", help="only rows that contain one of these words")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(seeds))
    parser.add_argument("--set", nargs="+", default=[], help="fields of the config for all rows: steps=100 compile=no")
    given = parser.parse_args(arguments)
    overrides = dict(parse_override(text) for text in given.set)
    chosen = [row for row in rows if not given.rows or any(w.lower() in row.name.lower() for w in given.rows)]
    if not chosen:
        parser.error(f"no row contains {' or '.join(given.rows)}; the rows: {', '.join(row.name for row in rows)}")
    found: dict[str, list[dict[str, Any]]] = {}
    for seed in given.seeds:
        for row in chosen:
            task = add_once(row.task())
            settings = {**(recipe or {}), **row.config, "data": given.data}
            epochs = settings.pop("epochs", None)
            settings |= overrides
            if epochs is not None and "steps" not in overrides:
                config = make_config(task.name, **settings)
                settings["steps"] = math.ceil(epochs * task.load(config).rows("train") / per_step(config))
            config = make_config(task.name, seed=seed, out=str(given.out / f"{row.slug}-s{seed}"), **settings)
            done = Run(config.folder()).result() or {}
            if done.get("step", 0) < config.steps:
                train(config, resume=(config.folder() / "config.json").exists())
                done = Run(config.folder()).result() or {}
            found.setdefault(row.name, []).append({"seed": seed, **done})
            given.out.mkdir(parents=True, exist_ok=True)
            (given.out / "results.json").write_text(json.dumps({"title": title, "rows": found}, indent=1) + "\n")
            (given.out / "table.md").write_text(f"# {title}\n\n{markdown(rows, found, metrics)}")
    print(markdown(rows, found, metrics))
    return found


def markdown(rows: Sequence[Row], found: Mapping[str, list[dict[str, Any]]], metrics: Mapping[str, float]) -> str:
    """Mean and deviation over seeds beside the paper's figure; a row that was not run says so."""
    lines = ["| | " + " | ".join(f"{m} | the paper's {m}" for m in metrics) + " | parameters | steps |"]
    lines.append("|---|" + "---|" * (2 * len(metrics) + 2))
    for row in rows:
        runs, cells = found.get(row.name, []), []
        for metric, factor in metrics.items():
            values = [factor * r["test"][metric] for r in runs]
            spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.2f}{spread}" if values else "not run")
            cells.append(f"{row.paper[metric]:g}" if metric in row.paper else "–")
        facts = f"{runs[0]['parameters']:,} | {runs[0]['step']:,}" if runs else " | "
        lines.append(f"| {row.name} | {' | '.join(cells)} | {facts} |")
    return "\n".join(lines) + "\n"


def per_step(config: Any) -> int:
    return config.batch_size * config.accumulate * config.devices * config.nodes


def add_once(task: Task) -> Task:
    """The same row with another seed is the same task."""
    from weft.tasks import get_task, tasks

    return get_task(task.name) if task.name in tasks() else add_task(task)
