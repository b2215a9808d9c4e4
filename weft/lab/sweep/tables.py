"""Tables of sweeps: mean ± standard deviation over seeds, next to the paper's value, as Markdown and HTML.

A value is the mean over complete runs of the cell's config in the sweep file. Runs with other settings are listed below
the table, interrupted runs show their step, and if the runs of a table come from different commits or devices, each
value says from which.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_lowercase as LETTERS
from typing import Any

from ... import pages
from ...pages import Curve, Part
from ...tasks.files import atomic
from ..run import Run
from ..say import say
from .cells import Cell, Sweep, is_sweep, kept_sweep, load_sweep
from .results import Record, gather, read_results, results_file, write_results


@dataclass
class Table:
    title: str
    head: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)


def sweep_folders(paths: Sequence[Path]) -> dict[Path, list[Path]]:
    """Report paths (without suffix) and the sweep files each one covers."""
    found: dict[Path, list[Path]] = {}
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist")
    for path in paths:
        if (path / "config.json").exists():
            raise ValueError(f"{path} is a run, but not all paths are: pass either runs or sweeps")
        if path.is_file():
            found[path.parent / f"{path.stem}.report"] = [path]
            continue
        files = [file for pattern in ("*.py", "*/*.py") for file in sorted(path.glob(pattern)) if is_sweep(file)]
        if not files and any(path.glob("*/config.json")):
            raise ValueError(f"{path} is not a run, but a folder of runs: name them, as in {path}/*")
        if not files:
            raise FileNotFoundError(f"{path} contains no run and no Python file that defines TITLE, METRIC and cells()")
        for file in files:
            found.setdefault(file.parent / "report", []).append(file)
    return found


def report_sweeps(files: Sequence[Path], out: Path, runs: Path | None = None) -> str:
    """Write OUT.md, OUT.html and, next to them, `NAME.results.json` per sweep. Returns the Markdown."""
    folder = files[0].resolve().parent
    title = f"{folder.parent.name}/{folder.name}"
    texts, parts = [f"# {title}\n"], []
    for file in files:
        sweep = kept_sweep(file, runs)
        if sweep is None:
            say(f"running {file} to read its cells: sweep.json is missing or outdated", error=True)
            sweep = load_sweep(file)
        records = gather(sweep, runs)
        kept = results_file(sweep, out.parent)
        if records and records != read_results(kept):
            write_results(kept, sweep, records)
        made = tables(sweep, records)
        texts.append(markdown(sweep, made))
        parts += page_parts(sweep, made, records) + images(sweep.runs(runs) / sweep.name)
    text = "\n".join([*texts, f"{LEGEND}\n"])
    for ending, content in (("md", text), ("html", pages.page(title, parts, footer=LEGEND))):
        with atomic(out.with_name(f"{out.name}.{ending}")) as temporary:
            temporary.write_text(content, encoding="utf-8")
    return text


LEGEND = (
    "Test metrics of the checkpoint that the config's test_on names (default: the best on validation data), as mean ± "
    "sample standard deviation over n seeds. Written by `weft report` from the runs or from *.results.json."
)


def tables(sweep: Sweep, records: Sequence[Record]) -> list[Table]:
    """One table for the file's configs, and one for each set of overrides that was run."""
    variants = dict.fromkeys(["", *(record.variant for record in records)])
    return [_table(sweep, name, [r for r in records if r.variant == name]) for name in variants]


def _table(sweep: Sweep, variant: str, records: Sequence[Record]) -> Table:
    columns = list(dict.fromkeys(cell.column for cell in sweep.cells))
    rows = list(dict.fromkeys(cell.row for cell in sweep.cells))
    papers = {column: any(c.paper is not None for c in sweep.cells if c.column == column) for column in columns}
    unit = f" ({sweep.unit})" if sweep.unit else ""
    title = f"{sweep.metric.replace('_', ' ')}{unit}" + (f", with {variant}" if variant else "")
    head = [title]
    for column in columns:
        head += [column, "paper"] if papers[column] else [column]
    cells = {(cell.row, cell.column): cell for cell in sweep.cells}
    origins = list(dict.fromkeys(origin(record) for record in records))
    letters = {text: LETTERS[i % 26] * (1 + i // 26) for i, text in enumerate(origins)} if len(origins) > 1 else {}
    table = Table(sweep.title, head, [])
    for row in rows:
        line = [row]
        for column in columns:
            cell = cells.get((row, column))
            here = [r for r in records if cell is not None and r.cell == cell.slug]
            line.append(_figure(sweep, cell, here, letters, table.notes) if cell is not None else "")
            if papers[column]:
                line.append(_paper(sweep, cell) if cell is not None else "")
        table.rows.append(line)
    by_slug = {cell.slug: cell for cell in sweep.cells}
    table.notes += _on_other_data(by_slug, records)
    for record in records:
        if record.cell not in by_slug:
            table.notes.append(f"No longer in the file: {record.cell}, seed {record.seed}{_came_to(sweep, record)}.")
    for text, letter in letters.items():
        table.notes.append(f"[{letter}] {text}")
    if len(origins) == 1:
        table.notes.append(f"All runs: {origins[0]}.")
    if not variant:
        table.notes += [f"{cell.row}, {cell.column}: {cell.note}" for cell in sweep.cells if cell.note]
    return table


def _figure(sweep: Sweep, cell: Cell, records: Sequence[Record], letters: dict[str, str], notes: list[str]) -> str:
    """The text of one cell; details go to the notes."""
    name = f"{cell.row}, {cell.column}"
    good: list[Record] = []
    for record in records:
        differs = record.differs(cell.config)
        if differs:
            notes.append(
                f"Excluded from {name}: seed {record.seed}, run with different settings "
                f"({'; '.join(differs)}){_came_to(sweep, record)}."
            )
        else:
            good.append(record)
    parts = []
    for group in _groups(good):
        first, marks = group[0], list(dict.fromkeys(letters[origin(record)] for record in group)) if letters else []
        if len(marks) > 1:
            each = ", ".join(f"seed {record.seed} [{letters[origin(record)]}]" for record in group)
            notes.append(f"{name} combines runs of different origin: {each}.")
        where = "" if first.state == "complete" else f" at step {first.step} of {first.steps}"
        values = [value for record in group if (value := figure_of(record, sweep.metric)) is not None]
        if first.state == "failed":
            notes += [f"{name}, seed {record.seed} failed{where}: {record.why}" for record in group]
            text = f"failed{where}"
        elif not values:
            text = f"no {sweep.metric.replace('_', ' ')}{where}"
        else:
            finite = math.isfinite(sum(values))  # stdev fails on others
            spread = f" ± {sweep.show(statistics.stdev(values))}" if finite and len(values) > 1 else ""
            about = "" if first.state == "complete" else f"validation of step {first.val_step}, "
            if cell.config.time_budget and first.state == "complete":
                about = "/".join(f"{record.step:,}" for record in group) + " steps, "
            text = f"{sweep.show(statistics.fmean(values))}{spread}{where} ({about}n={len(values)})"
        parts.append(f"{text} [{', '.join(marks)}]" if marks else text)
    return "; ".join(parts) or "—"


def _on_other_data(cells: dict[str, Cell], records: Sequence[Record]) -> list[str]:
    """Names the runs in the table that have read other data than most of those whose settings choose the same data."""
    found: dict[tuple[Any, ...], dict[str, list[str]]] = {}
    for record in records:
        cell = cells.get(record.cell)
        if cell is None or record.state != "complete" or not record.data or record.differs(cell.config):
            continue
        c, model = cell.config, cell.config.model if cell.config.model.startswith("hf:") else ""  # with its tokenizer
        same = c.task, c.data, c.max_length, c.tokenizer, c.text_column, c.label_column, c.skip_unlabelled, model
        names = found.setdefault(same, {}).setdefault(record.data, [])
        names.append(f"{cell.row}, {cell.column}, seed {record.seed}")
    notes = []
    for groups in found.values():
        (most, _), *others = sorted(groups.items(), key=lambda group: -len(group[1]))
        notes += [f"On other data ({data}) than other runs ({most}): {'; '.join(names)}." for data, names in others]
    return notes


def _paper(sweep: Sweep, cell: Cell) -> str:
    """The paper's value, with at least as many digits as ours."""
    if cell.paper is None:
        return ""
    shown = f"{cell.paper:.{sweep.digits}f}"
    return shown if float(shown) == cell.paper else f"{cell.paper!r}"


def _groups(records: Sequence[Record]) -> list[list[Record]]:
    """Complete runs first, in one group; other runs are grouped by the step at which they ended."""
    found: dict[tuple[str, int, int], list[Record]] = {}
    for record in records:
        steps = (0, 0) if record.state == "complete" else (record.step, record.val_step)
        found.setdefault((record.state, *steps), []).append(record)
    return [group for key, group in sorted(found.items(), key=lambda item: item[0][0] != "complete")]


def figure_of(record: Record, metric: str) -> float | None:
    """The test value of a complete run, or the last validation value of an interrupted one."""
    return (record.test if record.state == "complete" else record.val).get(metric)


def _came_to(sweep: Sweep, record: Record) -> str:
    value = figure_of(record, sweep.metric)
    if value is None:
        return ""
    split = "" if record.state == "complete" else f" on validation data at step {record.val_step} of {record.steps}"
    return f"; result: {sweep.show(value)}{split}"


def origin(record: Record) -> str:
    """Code and machine: 'commit 1a2b3c4, NVIDIA H200, torch 2.11'."""
    starts = record.starts
    commits = dict.fromkeys(_commit(start.commit) for start in starts)
    devices = dict.fromkeys(start.device for start in starts)
    torches = dict.fromkeys(f"torch {start.torch}" for start in starts)
    parts = [" then ".join(part) for part in (commits, devices, torches) if part]
    return ", ".join(parts) or "origin unknown"


def _commit(text: str) -> str:
    commit, _, changes = text.partition("+")
    return f"commit {commit[:7]}{' with changes' if changes else ''}" if commit else "commit unknown"


def markdown(sweep: Sweep, made: Sequence[Table]) -> str:
    parts = [f"## {sweep.title}\n", f"`{sweep.file.name}`" + (f": {_first(sweep.about)}" if sweep.about else "") + "\n"]
    for table in made:
        lines = [table.head, *table.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(table.head))]
        for number, line in enumerate(lines):
            texts = (f"{_bar(text):{width}}" for text, width in zip(line, widths, strict=True))
            parts.append("| " + " | ".join(texts) + " |")
            if number == 0:
                parts.append("|" + "|".join("-" * (width + 2) for width in widths) + "|")
        parts.append("")
        parts += [f"* {note}" for note in table.notes]
        parts += [""] if table.notes else []
    return "\n".join(parts)


def page_parts(sweep: Sweep, made: Sequence[Table], records: Sequence[Record]) -> list[Part]:
    """Tables and curves of one sweep: a chart per column, a colour per row, a line per seed."""
    out = [pages.heading(sweep.title)]
    out.append(pages.text(sweep.file.name + (f": {_first(sweep.about)}" if sweep.about else ""), soft=True))
    for table in made:
        out.append(pages.table(table.head, table.rows, f"{table.title}: {table.head[0]}"))
        if table.notes:
            out.append(pages.notes(table.notes))
    cells = {cell.slug: cell for cell in sweep.cells}
    metric = sweep.metric.replace("_", " ")
    for variant in dict.fromkeys(record.variant for record in records):
        for column in dict.fromkeys(cell.column for cell in sweep.cells):
            here = [
                (cells[r.cell].row, r)
                for r in records
                if r.variant == variant and r.cell in cells and cells[r.cell].column == column
                if not r.differs(cells[r.cell].config)
            ]
            more = f" ({variant})" if variant else ""
            scores = [Curve(row, [(x, y * sweep.scale) for x, y in record.curve]) for row, record in here]
            unit = f", {sweep.unit}" if sweep.unit else ""
            out.append(pages.chart(f"{column}{more}: validation {metric}", scores, y=metric + unit))
            losses = [Curve(row, record.loss) for row, record in here]
            out.append(pages.chart(f"{column}{more}: training loss", losses, y="loss"))
    return out


def images(folder: Path) -> list[Part]:
    """The images that the runs of a sweep drew."""
    out = []
    for place in sorted(path.parent for path in folder.glob("*/gallery.json")):
        out += [{**part, "title": f"{place.name}: {part['title']}"} for part in Run(place).galleries()]
    return out


def _first(text: str) -> str:
    """The first paragraph, on one line."""
    return " ".join(text.split("\n\n")[0].split())


def _bar(text: str) -> str:
    return text.replace("|", "\\|")
