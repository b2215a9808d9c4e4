"""The output of a benchmark: a progress line, a table at the end, and a JSON file that is valid after every row."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from ...tasks.files import atomic
from ..run import commit
from ..say import show_table
from .timing import How


@dataclass
class Table:
    title: str
    headings: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)

    def markdown(self) -> str:
        """As Markdown; the first column is left-aligned, the others right-aligned."""
        lines = [self.title, "", _line(self.headings), _line(["---", *["---:"] * (len(self.headings) - 1)])]
        return "\n".join([*lines, *(_line(row) for row in self.rows)])

    def show(self) -> None:
        show_table(self.headings, self.rows, self.title, numbers=True)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def cell(value: float | None, digits: int = 1) -> str:
    """A formatted number, or a dash if there is none."""
    return "-" if value is None or value != value else f"{value:,.{digits}f}"


Curves = Mapping[str, Mapping[int, float | None]]  # name -> length -> value
Label = Callable[[str, dict[int, float]], str]  # of a curve, from its name and points


def log_plot(path: Path, panels: Mapping[str, Curves], xlabel: str, reference: str, label: Label) -> None:
    """Plot values over length with logarithmic axes, one panel per title; `reference` is the dashed curve."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'weft[lab]'") from error
    panels = {title: rows for title, rows in panels.items() if any(any(row.values()) for row in rows.values())}
    figure, axes = plt.subplots(1, len(panels), figsize=(7.5 * len(panels), 5), constrained_layout=True, squeeze=False)
    others = [name for name in dict.fromkeys(chain(*panels.values())) if name != reference]
    styles = {name: {"color": f"C{n % 10}", "marker": "os^"[n // 10 % 3]} for n, name in enumerate(others)}
    styles[reference] = {"color": "black", "marker": "o", "linestyle": "--"}
    for axis, (title, rows) in zip(axes[0], panels.items(), strict=True):
        curves = {name: {L: value for L, value in row.items() if value} for name, row in rows.items()}
        curves = {name: points for name, points in curves.items() if points}
        for name in sorted(curves, key=lambda name: -curves[name][max(curves[name])]):  # as the lines end
            points = curves[name]
            axis.loglog(list(points), list(points.values()), label=label(name, points), **styles[name])
        lengths = sorted({L for points in curves.values() for L in points})
        axis.set_xticks(lengths, [f"{L:,}" for L in lengths])
        axis.minorticks_off()
        axis.yaxis.set_major_formatter("{x:,g}")
        axis.set_xlabel(xlabel)
        axis.set_title(title)
        axis.grid(True, alpha=0.3)
        axis.legend(fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


class Report:
    """The records of one benchmark."""

    def __init__(self, bench: str, how: How | None, settings: dict[str, Any], out: Path | None = None):
        self.bench, self.out = bench, out
        self.about: dict[str, Any] = {"bench": bench, "settings": settings, "machine": machine(how)}
        if how is not None:
            self.about["how"] = asdict(how)
        self.records: list[dict[str, Any]] = []

    def add(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        self._write(complete=False)

    def finish(self, tables: Sequence[Table], notes: Sequence[str], markdown: bool) -> None:
        """Print the tables and complete the file."""
        self._write(complete=True)
        for table in tables:
            if markdown:
                print(table.markdown() + "\n")
            else:
                table.show()
        found = self.about["machine"]
        where = f"{found['device']}, {found['threads']} threads, torch {found['torch']}"
        head, plus, changes = found["commit"].partition("+")
        for note in [*notes, f"{where}, commit {head[:12] or 'unknown'}{plus}{changes}"]:
            print(note + ("\n" if markdown else ""))
        if self.out is not None:
            print(f"wrote {self.out}")

    def _write(self, complete: bool) -> None:
        if self.out is None:
            return
        text = json.dumps({**self.about, "complete": complete, "rows": self.records}, indent=2)
        with atomic(self.out) as temporary:
            temporary.write_text(text + "\n")


def machine(how: How | None = None) -> dict[str, Any]:
    """Hardware and software versions of the measurement."""
    from ... import __version__

    script = Path(sys.argv[0]).name
    on_gpu = how is not None and how.device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_gpu else f"CPU ({_processor()})",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "weft": __version__,
        "commit": commit(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": " ".join(["weft" if script == "cli.py" else script, *sys.argv[1:]]),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


class Line:
    """Shows the current measurement on stderr: a status line on a terminal, plain lines elsewhere."""

    def __init__(self, total: int):
        self.total, self.done, self.begin = total, 0, time.perf_counter()
        self._status: Any = None

    def next(self, text: str) -> None:
        self.done += 1
        text = f"[{self.done}/{self.total}, {time.perf_counter() - self.begin:.0f} s] {text}"
        if not sys.stderr.isatty():
            print(text, file=sys.stderr, flush=True)
        elif self._status is None:
            from rich.console import Console

            self._status = Console(stderr=True).status(text.replace("[", "\\["))
            self._status.start()
        else:
            self._status.update(text.replace("[", "\\["))

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._status is not None:
            self._status.stop()
