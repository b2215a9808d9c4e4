"""Write docs/results.md, its plots and the results of README.md from the claims and the result files.

    python -m experiments.results            # write them
    python -m experiments.results --check    # fail if they are out of date
    python -m experiments.results --add runs # first add the runs of `weft sweep --out runs` to the result files

`experiments/claims.md` is the page without its figures and tables:

- {{TABLE CELL}} or {{TABLE CELL steps=1000}}: a figure of the table's `*.results.json`, the mean over seeds of the
  complete runs with the sweep's settings, or of those with this number of steps
- {{FILE.json KEY/KEY}}: a number of another file of results
- {{ms both_ms sparse 65536}}, {{cudnn …}}, {{speedup …}}, {{training compiled sparse 8192}}: benchmarks (`measured`)
- `<!-- runs TABLE -->`: every cell that has been run, with its figure or how far it came, and the plot of its curves.
  Shorter runs are in the tables of `weft report`
- `<!-- progress -->`: the tables of the queue with the number of cells that are done
- `<!-- README -->` at the end of a claim: it is in the README too
"""

from __future__ import annotations

import argparse
import io
import json
import math
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import tables
from experiments.queue import is_done, job_of, queue, sweep_of
from weft.lab.sweep import Cell, Sweep
from weft.lab.sweep.cells import jobs_of
from weft.lab.sweep.results import Record, gather, read_results, results_file, write_results

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
README = HERE.parent / "README.md"
COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C564B", "#7F7F7F", "#882255",
    "#999933", "#332288",
)  # fmt: skip
STYLES = ("-", "--", ":", "-.")


def fitting(sweep: Sweep, cell: Cell, steps: int = 0) -> list[Record]:
    """Runs with the cell's current settings, and this number of steps if it is not 0; in order of their seeds."""
    runs = [
        record
        for record in read_results(results_file(sweep), sweep.metric)
        if record.cell == cell.slug
        and record.overrides == ({"steps": steps} if steps else {})
        and not record.differs(cell.config)
    ]
    return sorted(runs, key=lambda run: run.seed)


def finished(sweep: Sweep, cell: Cell, steps: int = 0) -> list[Record]:
    return [run for run in fitting(sweep, cell, steps) if run.state == "complete"]


def mean(sweep: Sweep, runs: Sequence[Record]) -> tuple[float, str]:
    """The mean of the runs, and how it is shown: '35.4 ± 0.3'. Pre-training has only a loss."""
    if any(sweep.metric not in run.test for run in runs):
        return math.nan, f"loss {statistics.fmean(run.test['loss'] for run in runs):.3f}"
    values = [run.test[sweep.metric] for run in runs]
    if not math.isfinite(sum(values)):
        return math.nan, "not a number"
    spread = f" ± {sweep.show(statistics.stdev(values))}" if len(values) > 1 else ""
    return statistics.fmean(values), f"{sweep.show(statistics.fmean(values))}{spread}"


def claims() -> str:
    """claims.md with the figures of the result files."""
    return re.sub(r"\{\{(\S+) ([^}]+?)(?: steps=(\d+))?\}\}", figure, (HERE / "claims.md").read_text())


def figure(match: re.Match[str]) -> str:
    source, what, steps = match.groups()
    if source.endswith(".json"):
        value = json.loads((HERE / source).read_text())
        for key in what.split("/"):
            value = value[key]
        return f"{value:.3f}"
    if "/" not in source:
        return measured(source, *what.split())
    sweep = sweep_of(source)
    (job,) = jobs_of(sweep, seeds=[0], only=[what])
    runs = finished(sweep, job.cell, int(steps or 0))
    if not runs:
        return "not complete" if not steps and others(sweep, job.cell) else "not run"
    return mean(sweep, runs)[1] + (f" (n = {len(runs)})" if len(runs) > 1 else "")


def measured(kind: str, key: str, name: str, length: str) -> str:
    """A time of benchmarks/results, causal ("ms"), that of cuDNN in the same run ("cudnn"), their ratio ("speedup"), or
    that of the tokens/s in training to those of `full` ("training")."""
    if kind == "training":
        mine, full = (tables.trained("steps")[which, int(length), key]["tokens_per_s"] for which in (name, "full"))
        return f"{mine / full:.2f}"
    mine, cudnn = tables.rows()[name, int(length), True][key]
    return {"ms": tables.ms(mine), "cudnn": tables.ms(cudnn), "speedup": f"{cudnn / mine:.1f}"}[kind]


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
    done, cells = [sum(seeds[i][0] for seeds in counts.values()) for i in range(3)], len(queue()) // 3
    head = f"{done[0]} of {cells} listed cells complete; with a second seed {done[1]}, with a third {done[2]}."
    return "\n".join([head, "", *lines]) + "\n"


def section(sweep: Sweep) -> tuple[str, bytes]:
    """The Markdown of one sweep, empty if nothing has been run, and the plot of its curves, if any."""
    done = [(cell, runs) for cell in sweep.cells if (runs := finished(sweep, cell))]
    rest = [line for cell in sweep.cells for line in others(sweep, cell)]
    if not done and not rest:
        return "", b""
    curves = [(cell, [run for run in fitting(sweep, cell) if len(run.curve) > 1]) for cell in sweep.cells]
    curves = [(cell, runs) for cell, runs in curves if runs]
    drawing = plot(sweep, curves) if curves else b""
    source, axis = sweep.file.relative_to(HERE.parent), "time" if by_time(curves) else "steps"
    figure = sweep.metric.replace("_", " ") + (f", {sweep.unit}" if sweep.unit else "")
    lines = [
        f"{len(done)} of {len(sweep.cells)} cells complete. Command: `weft sweep {source}`; figures and curves: "
        f"`{source.with_suffix('.results.json')}`.",
        "",
        *([f"![Validation {sweep.metric} against {axis}](results/{plot_name(sweep)})", ""] if drawing else []),
    ]
    if done:
        lines += [f"| cell | paper | ours ({figure}) | seeds | steps | minutes | difference | run |", "|---" * 8 + "|"]
    for cell, runs in done:
        value, ours = mean(sweep, runs)
        paper, off = "–", "–"
        if cell.paper is not None:
            paper, off = f"{cell.paper:g}", f"{value * sweep.scale - cell.paper:+.{sweep.digits}f}"
        origins = ((*start.commit.partition("+"), start.device) for run in runs for start in run.starts)
        starts = dict.fromkeys(f"{commit[:7]}{plus}{changes}, {device}" for commit, plus, changes, device in origins)
        seeds = ", ".join(str(run.seed) for run in runs)
        steps = ", ".join(dict.fromkeys(f"{run.step:,} of {run.steps:,}" for run in runs))
        minutes = ", ".join(f"{run.seconds / 60:.1f}" if run.seconds else "–" for run in runs)
        name = f"{cell.row}, {cell.column}"
        lines.append(f"| {' | '.join((name, paper, ours, seeds, steps, minutes, off, '; '.join(starts)))} |")
    notes = {cell.note: None for cell, _ in done if cell.note}
    if notes:
        lines += ["", *(f"{note[0].upper()}{note[1:]}." for note in notes)]
    if rest:
        lines += ["", "Not complete, or with other settings:", "", *rest]
    return "\n".join(lines) + "\n", drawing


def others(sweep: Sweep, cell: Cell) -> list[str]:
    """Lines about the runs that are not in the table: incomplete, or with other settings than the number of steps."""
    lines = []
    for run in read_results(results_file(sweep)):
        if run.cell != cell.slug or set(run.overrides) == {"steps"}:
            continue
        unlike = replace(run, overrides={}).differs(cell.config)
        if run.state != "complete":
            text = came_to(sweep, run)
        elif unlike:
            text = f"{mean(sweep, [run])[1]} after {run.step:,} steps"
        else:
            continue
        settings = "".join(f", with {what.replace(': ', ' ').replace(' -> ', ' instead of ')}" for what in unlike)
        lines.append(f"- {cell.row}, {cell.column}, seed {run.seed}: {text}{settings}")
    return lines


def came_to(sweep: Sweep, run: Record) -> str:
    """How far an incomplete run came, and why it ended."""
    text = f"{run.step:,} of {run.steps:,} steps"
    if sweep.metric in run.val:
        text += f", validation {sweep.metric.replace('_', ' ')} {sweep.show(run.val[sweep.metric])} at {run.val_step:,}"
    if run.why:
        return f"{text}; failed: {run.why}"
    return f"{text}; stopped{' before its test' if run.step >= run.steps else ''}"


def by_time(curves: Sequence[tuple[Cell, list[Record]]]) -> bool:
    """Whether the cells had the same time instead of the same number of steps, and their clocks are known."""
    runs = [run for _, runs in curves for run in runs]
    return all(cell.config.time_budget for cell, _ in curves) and all(len(run.clock) == len(run.curve) for run in runs)


def plot_name(sweep: Sweep) -> str:
    return f"{sweep.file.parent.name}-{sweep.name}.svg"


def plot(sweep: Sweep, curves: Sequence[tuple[Cell, list[Record]]]) -> bytes:
    """Validation curves: a colour for every row of the table, a line style for every column."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "weft"  # the same file for the same numbers
    matplotlib.rcParams["svg.fonttype"] = "none"
    figure, axes = plt.subplots(figsize=(7, 3.6))
    timed = by_time(curves)
    rows = list(dict.fromkeys(cell.row for cell, _ in curves))
    columns = list(dict.fromkeys(cell.column for cell, _ in curves))
    for cell, runs in curves:
        named: set[str] = set()
        for run in runs:
            label = f"{cell.row}, {cell.column}" if len(columns) > 1 else cell.row
            label += "" if run.state == "complete" else " (not complete)"
            xs, values = zip(*run.curve, strict=True)
            if timed:
                xs = [seconds / 60 for _, seconds in run.clock]
            axes.plot(
                xs,
                [value * sweep.scale for value in values],
                STYLES[columns.index(cell.column) % len(STYLES)],
                color=COLOURS[rows.index(cell.row) % len(COLOURS)],
                label=None if label in named else label,
                linewidth=1.3,
            )
            named.add(label)
    axes.set_xlabel("minutes of training, without evaluations and compilation" if timed else "steps")
    axes.set_ylabel(f"validation {sweep.metric.replace('_', ' ')}" + (f" ({sweep.unit})" if sweep.unit else ""))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    plt.close(figure)
    return buffer.getvalue()


def page() -> dict[Path, bytes]:
    """The files to write."""
    files: dict[Path, bytes] = {}
    text = claims().replace("<!-- progress -->\n", progress())
    for results in sorted(HERE.glob("*/*.results.json")):
        table = f"{results.parent.name}/{results.name.removesuffix('.results.json')}"
        sweep = sweep_of(table)
        runs, drawing = section(sweep)
        place = f"### {sweep.title}\n", f"<!-- runs {table} -->\n"
        if runs and not all(part in text for part in place):
            sys.exit(f"experiments/claims.md has no section for {table}: it needs the lines {' and '.join(place)}")
        text = text.replace(place[1], runs)
        if drawing:
            files[DOCS / "results" / plot_name(sweep)] = drawing
    mark = " <!-- README -->\n"
    files[DOCS / "results.md"] = text.replace(mark, "\n").encode()
    head = re.findall(r"^\| claim .*\n.*\n", text, re.M)
    rows = [line.replace("](#", "](docs/results.md#") for line in text.splitlines(True) if line.endswith(mark)]
    before, between, after = README.read_text().partition("<!-- results -->\n")
    end = after[after.index("<!-- end -->") :]
    files[README] = "".join([before, between, "\n", *head, *rows, "\n", end]).replace(mark, "\n").encode()
    return files


def add(runs: Path) -> None:
    """Add the runs in RUNS/PAPER/TABLE/CELL-sSEED to the result files of their tables."""
    found = [HERE / path.parent.name / f"{path.name}.py" for path in sorted(runs.glob("*/*")) if "+" not in path.name]
    tables = [f"{file.parent.name}/{file.stem}" for file in found if file.exists()]
    if not tables:
        sys.exit(f"{runs} has no runs of a table of experiments/: expected {runs}/PAPER/TABLE/CELL-sSEED")
    for table in tables:
        sweep = sweep_of(table)
        known, records = (
            {(r.variant, r.cell, r.seed): r for r in read_results(results_file(sweep))},
            gather(sweep, runs),
        )
        for record in records:
            if known.get((record.variant, record.cell, record.seed)) != record:
                shown = mean(sweep, [record])[1] if record.state == "complete" else came_to(sweep, record)
                print(f"{table} {record.cell}, seed {record.seed}: {shown}")
        write_results(results_file(sweep), sweep, records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is out of date")
    parser.add_argument("--add", type=Path, nargs="+", default=[], metavar="RUNS", help="folders of runs, as for --out")
    given = parser.parse_args()
    check = given.check
    for folder in given.add:
        add(folder)
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
