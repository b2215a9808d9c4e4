"""Write docs/results.md and its plots from the claims and the result files.

    python -m experiments.results            # write them
    python -m experiments.results --check    # fail if they are out of date

`experiments/claims.md` has the claims of the papers, each with our figure, its command and the verdict. A figure is
written as {{TABLE CELL}} or {{TABLE CELL steps=1000}} and comes from the table's `*.results.json`: the mean over seeds
of the complete runs with the sweep's settings, or of those with this number of steps. Below the claims come the tables
of the queue with the number of cells that are done, and every cell that has been run to the end. Shorter runs are in
the tables of `weft report`.
"""

from __future__ import annotations

import argparse
import io
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.queue import is_done, job_of, queue, sweep_of
from weft.lab.sweep import Cell, Sweep
from weft.lab.sweep.cells import jobs_of
from weft.lab.sweep.results import Record, read_results, results_file

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def finished(sweep: Sweep, cell: Cell, steps: int = 0) -> list[Record]:
    """Complete runs with the cell's current settings, and this number of steps if it is not 0; one per seed."""
    runs = {
        record.seed: record
        for record in read_results(results_file(sweep))
        if record.cell == cell.slug
        and record.state == "complete"
        and record.overrides == ({"steps": steps} if steps else {})
        and not record.differs(cell.config)
    }
    return [runs[seed] for seed in sorted(runs)]


def mean(sweep: Sweep, runs: Sequence[Record]) -> tuple[float, str]:
    """The mean of the runs, and how it is shown: '35.4 ± 0.3'."""
    values = [run.test[sweep.metric] for run in runs]
    spread = f" ± {sweep.show(statistics.stdev(values))}" if len(values) > 1 else ""
    return statistics.fmean(values), f"{sweep.show(statistics.fmean(values))}{spread}"


def claims() -> str:
    """claims.md with the figures of the result files; "not run" if a claim has none of its figures."""

    def figure(match: re.Match[str]) -> str:
        sweep = sweep_of(match["table"])
        (job,) = jobs_of(sweep, seeds=[0], only=[match["cell"]])
        runs = finished(sweep, job.cell, int(match["steps"] or 0))
        if not runs:
            return "not run"
        return mean(sweep, runs)[1] + (f" (n = {len(runs)})" if len(runs) > 1 else "")

    what = r"\{\{(?P<table>\S+) (?P<cell>[^}]+?)(?: steps=(?P<steps>\d+))?\}\}"
    lines = []
    for line in (HERE / "claims.md").read_text().split("\n"):
        found = [figure(match) for match in re.finditer(what, line)]
        if found and set(found) == {"not run"}:
            columns = line.split("|")
            line = "|".join([" not run " if re.search(what, column) else column for column in columns])
        lines.append(re.sub(what, figure, line))
    return "\n".join(lines)


def progress() -> str:
    """How many cells of the queue are done, by table."""
    counts: dict[str, list[list[int]]] = {}
    for entry in queue():
        seeds = counts.setdefault(entry.table, [[0, 0] for _ in range(3)])
        seeds[entry.seed][0] += is_done(job_of(entry, "", None))
        seeds[entry.seed][1] += 1
    lines = ["| table | seed 0 | seed 1 | seed 2 | command |", "|---|---|---|---|---|"]
    for table, seeds in counts.items():
        shown = " | ".join(f"{done} of {count}" for done, count in seeds)
        lines.append(f"| {sweep_of(table).title} | {shown} | `weft sweep experiments/{table}.py` |")
    done = [sum(seeds[i][0] for seeds in counts.values()) for i in range(3)]
    lines.append(f"| all | {' | '.join(f'{n} of {len(queue()) // 3}' for n in done)} | `python -m experiments.queue` |")
    return "\n".join(lines) + "\n"


def section(sweep: Sweep) -> tuple[str, bytes]:
    """The Markdown of one sweep, empty if nothing has been run to the end, and the plot of its curves, if any."""
    done = [(cell, runs) for cell in sweep.cells if (runs := finished(sweep, cell))]
    if not done:
        return "", b""
    drawing = plot(sweep, done) if any(len(run.curve) > 1 for _, runs in done for run in runs) else b""
    source, axis = sweep.file.relative_to(HERE.parent), "time" if by_time(done) else "steps"
    figure = sweep.metric.replace("_", " ") + (f", {sweep.unit}" if sweep.unit else "")
    lines = [
        f"### {sweep.title}",
        "",
        f"{len(done)} of {len(sweep.cells)} cells run to the end. Command: `weft sweep {source}`.",
        "",
        *([f"![Validation {sweep.metric} against {axis}](results/{plot_name(sweep)})", ""] if drawing else []),
        f"| cell | paper | ours ({figure}) | seeds | steps | minutes | difference | run |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell, runs in done:
        value, ours = mean(sweep, runs)
        paper, off = "–", "–"
        if cell.paper is not None:
            paper, off = f"{cell.paper:g}", f"{value * sweep.scale - cell.paper:+.2g}"
        starts = sorted({f"{start.commit[:7]}, {start.device}" for run in runs for start in run.starts})
        seeds = ", ".join(str(run.seed) for run in runs)
        steps = f"{runs[0].step:,} of {runs[0].steps:,}"
        minutes = ", ".join(f"{run.seconds / 60:.1f}" if run.seconds else "–" for run in runs)
        name = f"{cell.row}, {cell.column}"
        lines.append(f"| {' | '.join((name, paper, ours, seeds, steps, minutes, off, '; '.join(starts)))} |")
    return "\n".join(lines) + "\n", drawing


def by_time(done: Sequence[tuple[Cell, list[Record]]]) -> bool:
    """Whether the cells had the same time instead of the same number of steps, and their clocks are known."""
    runs = [run for _, runs in done for run in runs]
    return all(cell.config.time_budget for cell, _ in done) and all(len(run.clock) == len(run.curve) for run in runs)


def plot_name(sweep: Sweep) -> str:
    return f"{sweep.file.parent.name}-{sweep.name}.svg"


def plot(sweep: Sweep, done: Sequence[tuple[Cell, list[Record]]]) -> bytes:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "weft"  # the same file for the same numbers
    matplotlib.rcParams["svg.fonttype"] = "none"
    figure, axes = plt.subplots(figsize=(7, 3.6))
    timed = by_time(done)
    for number, (cell, runs) in enumerate(done):
        for run in runs:
            label = f"{cell.row}, {cell.column}" if run is runs[0] else None
            steps, values = zip(*run.curve, strict=True)
            if timed:
                steps = [seconds / 60 for _, seconds in run.clock]
            shown = [value * sweep.scale for value in values]
            style = "-" if number < len(COLOURS) else "--"
            axes.plot(steps, shown, style, color=COLOURS[number % len(COLOURS)], label=label, linewidth=1.3)
    axes.set_xlabel("minutes of training" if timed else "steps")
    axes.set_ylabel(f"validation {sweep.metric}" + (f" ({sweep.unit})" if sweep.unit else ""))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    plt.close(figure)
    return buffer.getvalue()


def page() -> dict[Path, bytes]:
    """The files to write."""
    files: dict[Path, bytes] = {}
    parts = [claims().replace("<!-- progress -->\n", progress())]
    for results in sorted(HERE.glob("*/*.results.json")):
        sweep = sweep_of(f"{results.parent.name}/{results.name.removesuffix('.results.json')}")
        text, drawing = section(sweep)
        if text:
            parts.append(text)
            if drawing:
                files[DOCS / "results" / plot_name(sweep)] = drawing
    files[DOCS / "results.md"] = "\n".join(parts).encode()
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is out of date")
    check = parser.parse_args().check
    stale = []
    for file, content in page().items():
        if check and file.suffix == ".md" and (not file.exists() or file.read_bytes() != content):
            stale.append(file.name)
        elif not check:
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(content)
    if stale:
        sys.exit(f"out of date: {', '.join(stale)}; run python -m experiments.results")


if __name__ == "__main__":
    main()
