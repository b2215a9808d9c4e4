"""Sizes as ratios: wide / deep (Table 8 of the wide-attention study), cached / plain (Table 9 of the cache paper).

`weft size` prints the counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...models.presets import TASKS
from ...models.sizes import BYTES_PER_PARAMETER, checkpoint_size, study_rows
from .report import Line, Report, Table, cell


def measure_study(tasks: Sequence[str], names: Sequence[str], report: Report, line: Line) -> None:
    """One record for every task and attention."""
    for task in tasks:
        line.next(f"{task}, {len(names)} attentions")
        rows = study_rows(task, names)
        for deep, wide in zip(rows[::2], rows[1::2], strict=True):
            record: dict[str, Any] = {"part": "wide", "task": task, "attention": deep.model}
            for key, row in (("deep", deep), ("wide", wide)):
                mebibytes = row.parameters * BYTES_PER_PARAMETER / 2**20
                record[key] = {"shape": row.shape, "parameters": row.parameters, "mib": mebibytes}
            record["ratio"] = wide.parameters / deep.parameters
            as_theirs = [float(checkpoint_size(row.published)) for row in (deep, wide)]
            record["as_published"] = as_theirs[1] / as_theirs[0]  # with the extra parameters of their code, rounded up
            if deep.printed and wide.printed:
                theirs = float(deep.printed), float(wide.printed)
                record["paper"] = {"deep_mib": theirs[0], "wide_mib": theirs[1], "ratio": theirs[1] / theirs[0]}
            report.add(record)


def measure_cached(report: Report, line: Line) -> None:
    """One record per PVT size."""
    from .pvt_sizes import pvt_sizes

    line.next("PVT, plain and cached")
    plain = None
    for row in pvt_sizes(presets=("paper",)):
        if row.ratio is None:
            plain = row
        elif row.ratio == 0.5 and plain is not None and plain.printed and row.printed:
            record = {"part": "cached", "model": row.model, "parameters": row.parameters / plain.parameters}
            record |= {"multiply_adds": row.multiply_adds / plain.multiply_adds, "paper": row.printed / plain.printed}
            report.add(record)


def tables(records: Sequence[dict[str, Any]]) -> list[Table]:
    made = []
    study = [r for r in records if r["part"] == "wide"]
    for task in [task for task in TASKS if any(r["task"] == task for r in study)]:
        rows = [r for r in study if r["task"] == task]
        shapes = [f"{kind} {rows[0][kind]['shape']}, MiB" for kind in ("deep", "wide")]
        table = Table(
            f"{task}: checkpoint with Adam's state", ["attention", *shapes, "wide / deep", "counted as there", "paper"]
        )
        for r in rows:
            sizes = [cell(r[kind]["mib"]) for kind in ("deep", "wide")]
            ratios = r["ratio"], r["as_published"], r.get("paper", {}).get("ratio")
            table.rows.append([r["attention"], *sizes, *(cell(value, 3) for value in ratios)])
        made.append(table)
    cached = [r for r in records if r["part"] == "cached"]
    if cached:
        table = Table("cached / plain, half of the channels", ["", "parameters", "multiply-adds", "paper, FLOPs"])
        for r in cached:
            table.rows.append([r["model"], *(cell(r[key], 3) for key in ("parameters", "multiply_adds", "paper"))])
        made.append(table)
    return made
