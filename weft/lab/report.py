"""Compare runs on one self-contained page: a table and their curves."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .run import Run

COLOURS = ("#1f6f8b", "#c8553d", "#588157", "#6d597a", "#b08900", "#444444",
           "#2a9d8f", "#8d0801", "#3d5a80", "#9a5ba5", "#7f5539", "#90a955")  # fmt: skip
LEGEND_WIDTH = 150
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 56em; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: 1em 0; } th, td { padding: .3em .9em; text-align: right; }
th { border-bottom: 2px solid #222; } td { border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
svg { width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: #555; } small { color: #666; }
"""


@dataclass
class Curve:
    name: str
    points: list[tuple[float, float]]
    marks: list[tuple[float, str]] = field(default_factory=list)  # (x, label)


def read_run(folder: Path) -> dict[str, Any]:
    """The data of a run that the page shows."""
    run = Run(folder)
    config, result = run.config(), run.result()
    val = run.entries("val")
    metric = next((k for k in (val[-1] if val else {}) if k not in ("kind", "step", "loss")), "loss")
    return {
        "name": folder.name,
        "task": config.task,
        "attention": config.attention,
        "shape": f"{config.layers}x{config.heads}",
        "losses": [(e["step"], e["loss"]) for e in run.entries("train")],
        "metric": metric,
        "val": [(e["step"], e[metric]) for e in val if isinstance(e.get(metric), float)],
        "result": result,
        "environment": (run.starts() or [{}])[-1],
    }


def smooth(points: Sequence[tuple[float, float]], window: int = 10) -> list[tuple[float, float]]:
    """Means over a few steps, to reduce the noise of single batches."""
    window = max(1, min(window, len(points) // 10))
    parts = [points[i : i + window] for i in range(0, len(points), window)]
    return [(part[-1][0], sum(y for _, y in part) / len(part)) for part in parts]


def chart(curves: Sequence[Curve], title: str, *, width: int = 860, height: int = 300) -> str:
    """A line chart as SVG."""
    points = [p for curve in curves for p in curve.points if math.isfinite(p[1])]
    if not points:
        return ""
    names = list(dict.fromkeys(curve.name for curve in curves))  # curves with the same name share a colour
    left, right, bottom = 56, 16, 34
    per_line = (width - left) // LEGEND_WIDTH
    top = 34 + 15 * ((len(names) - 1) // per_line)
    x0, x1 = 0.0, max(x for x, _ in points)
    y0, y1 = min(y for _, y in points), max(y for _, y in points)
    y0, y1 = (y0, y1) if y1 > y0 else (y0 - 0.5, y1 + 0.5)

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            left + (x - x0) / max(x1 - x0, 1e-9) * (width - left - right),
            top + (y1 - y) / (y1 - y0) * (height - top - bottom),
        )

    out = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(title)}">']
    out.append(f'<text x="{left}" y="14" style="font-weight:600;fill:#222">{html.escape(title)}</text>')
    for i in range(5):
        value = y0 + (y1 - y0) * i / 4
        _, y = at(0, value)
        out.append(f'<line x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e5e5"/>')
        out.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
        step = x0 + (x1 - x0) * i / 4
        out.append(f'<text x="{at(step, y0)[0]:.1f}" y="{height - 12}" text-anchor="middle">{step:.0f}</text>')
    for number, name in enumerate(names):
        colour = COLOURS[number % len(COLOURS)]
        start, line = left + LEGEND_WIDTH * (number % per_line), 29 + 15 * (number // per_line)
        out.append(f'<text x="{start}" y="{line}" style="fill:{colour}">— {html.escape(name)}</text>')
    for curve in curves:
        colour = COLOURS[names.index(curve.name) % len(COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*p) for p in curve.points if math.isfinite(p[1])))
        out.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>')
        for x, what in curve.marks:
            place = at(x, y0)[0]
            out.append(f'<line x1="{place:.1f}" x2="{place:.1f}" y1="{top}" y2="{height - bottom}" '
                       f'stroke="{colour}" stroke-dasharray="4 3"/>')  # fmt: skip
            out.append(f'<text x="{place + 4:.1f}" y="{height - bottom - 6}">{html.escape(what)}</text>')
    return "".join([*out, "</svg>"])


def page(title: str, lead: str, rows: Sequence[dict[str, str]], charts: Sequence[str], footer: str) -> str:
    """The page. All `rows` have the same keys, which are the headings of the table."""
    head = "".join(f"<th>{html.escape(key)}</th>" for key in (rows[0] if rows else {}))
    body = "".join("<tr>" + "".join(f"<td>{html.escape(v)}</td>" for v in row.values()) + "</tr>" for row in rows)
    return document(
        title,
        f"<h1>{html.escape(title)}</h1><p>{html.escape(lead)}</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        f"{''.join(charts)}<p><small>{html.escape(footer)}</small></p>",
    )


def document(title: str, body: str) -> str:
    """An HTML page that loads no resources and runs no scripts."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>{body}</body></html>\n"
    )


def table_rows(runs: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    rows = []
    for run in runs:
        result = run["result"] or {}
        test = result.get("test", {})
        rows.append(
            {
                "run": run["name"],
                "task": run["task"],
                "attention": run["attention"],
                "layers x heads": run["shape"],
                "steps": str(len(run["losses"])),
                f"test {run['metric']}": f"{test[run['metric']]:.4f}" if run["metric"] in test else "unfinished",
                "parameters": f"{result['parameters']:,}" if result else "",
            }
        )
    return rows


def origin(start: dict[str, Any]) -> str:
    """Versions, platform and time of a run, as far as known."""
    parts = [f"{name} {start[key]}" for name, key in (("weft", "weft"), ("torch", "torch"), ("Python", "python"))
             if key in start]  # fmt: skip
    return ", ".join([*parts, *(str(start[key]) for key in ("platform", "time") if key in start)]) or "origin unknown"


def report(
    folders: Sequence[str | Path], out: str | Path, marks: dict[str, list[tuple[float, str]]] | None = None
) -> Path:
    """Write the page of these runs; `marks` (by run name) are labelled steps to draw into its curve."""
    from ..tasks.files import atomic

    runs = [read_run(Path(folder)) for folder in folders]
    if not runs:
        raise ValueError("a report needs at least one run")
    marks = marks or {}
    losses = [Curve(run["name"], smooth(run["losses"]), marks.get(run["name"], [])) for run in runs]
    scores = [Curve(run["name"], run["val"]) for run in runs]
    metric = runs[0]["metric"].replace("_", " ")
    charts = [chart(losses, "training loss by step"), chart(scores, f"validation {metric} by step")]
    footer = origin(runs[0]["environment"])
    with atomic(Path(out)) as temporary:
        temporary.write_text(page("weft: runs side by side", "", table_rows(runs), charts, footer))
    return Path(out)
