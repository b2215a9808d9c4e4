"""The results of a sweep as a small text file that can be committed: `NAME.results.json` next to `NAME.py`.

For every run it has the config (shared values once), seed, commit, device, completed steps, final metrics and
downsampled curves. Tables can be made from it without the run folders. If both exist, the run that matches the file's
config counts, then a complete one, then the one with more steps.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...tasks.config import TrainConfig, portable
from ...tasks.files import atomic
from ..run import Run
from ..say import say
from .cells import Sweep, changed

FORMAT = 1
POINTS = 60  # per curve
NAME = r"(.+)-s(-?\d+)"  # the folder of a run: the cell's slug and the seed
NEVER_KEPT = ("out", "data", "task_file", "init_from")  # paths of one machine

Points = list[tuple[float, float]]


@dataclass
class Start:
    """Where a run was started or resumed."""

    commit: str
    device: str
    torch: str
    time: str


@dataclass
class Record:
    """One run."""

    cell: str  # the cell's slug, the name of the run's folder without the seed
    seed: int
    config: dict[str, Any]  # all fields except paths
    overrides: dict[str, Any] = field(default_factory=dict)  # given on the command line
    state: str = "complete"  # or "cut" (interrupted), "failed"
    why: str = ""  # why it failed
    step: int = 0  # steps done
    val: dict[str, float] = field(default_factory=dict)  # of the best checkpoint, or the last one of a cut run
    val_step: int = 0
    test: dict[str, float] = field(default_factory=dict)
    parameters: int = 0
    tokens_per_s: float = 0.0
    seconds: float = 0.0  # of training; 0 if not known
    data: str = ""  # digest of the rows; empty if not known
    starts: list[Start] = field(default_factory=list)
    loss: Points = field(default_factory=list)
    curve: Points = field(default_factory=list)  # of the sweep's metric on validation data
    clock: Points = field(default_factory=list)  # seconds of training at the steps of the curve

    @property
    def steps(self) -> int:
        return int(self.config["steps"])

    @property
    def variant(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in sorted(self.overrides.items()))

    def differs(self, expected: TrainConfig) -> list[str]:
        """The settings that differ from the sweep file's current config."""
        known = {f.name for f in dataclasses.fields(TrainConfig)}
        gone = [f"{name}: {value!r} -> no such setting" for name, value in self.config.items() if name not in known]
        mine = TrainConfig(**{name: value for name, value in self.config.items() if name in known})
        given = {name: value for name, value in self.overrides.items() if name in known}
        return gone + changed(mine, dataclasses.replace(expected, seed=self.seed, **given))


def read_folder(folder: Path, metric: str) -> Record:
    """The record of a run's folder."""
    run = Run(folder)
    config, result, train, val = run.config(), run.result(), run.entries("train"), run.entries("val")
    name, seed = re.fullmatch(NAME, folder.name).groups()  # type: ignore[union-attr]  # by its caller
    overrides = folder.parent / "overrides.json"
    record = Record(
        cell=name,
        seed=int(seed),
        config={k: v for k, v in asdict(portable(config)).items() if k not in NEVER_KEPT},
        overrides=_read_json(overrides, {}),
        step=int(train[-1]["step"]) if train else 0,
        data=_data(folder),
        starts=_starts(run, config),
        loss=thin([(entry["step"], entry["loss"]) for entry in train]),
        curve=thin([(entry["step"], entry[metric]) for entry in val if metric in entry]),
    )
    clock = {entry["step"]: entry["seconds"] for entry in train if "seconds" in entry}
    record.clock = [(step, _digits(clock[step])) for step, _ in record.curve if step in clock]
    record.seconds = max(clock.values(), default=0.0)
    rates = [entry["tokens_per_s"] for entry in train if "tokens_per_s" in entry]
    record.tokens_per_s = sorted(rates)[len(rates) // 2] if rates else 0.0
    if result is not None and result["step"] >= config.steps:
        record.step, record.test, record.parameters = result["step"], result["test"], result["parameters"]
        record.val, record.val_step = result["val"], result["best_step"]
        return record
    record.why = _failed(folder)
    record.state = "failed" if record.why else "cut"
    if val:
        record.val = {k: v for k, v in val[-1].items() if k not in ("kind", "step")}
        record.val_step = val[-1]["step"]
    return record


def gather(sweep: Sweep, runs: Path | None = None) -> list[Record]:
    """All known runs: from the run folders and from earlier results."""
    found: dict[tuple[str, str, int], tuple[tuple[bool, bool, int, bool], Record]] = {}
    cells = {cell.slug: cell for cell in sweep.cells}
    here = [(record, True) for record in read_runs(sweep, sweep.runs(runs))]
    for record, fresh in [*here, *((old, False) for old in read_results(results_file(sweep), sweep.metric))]:
        if record.state == "cut" and not record.step:
            continue  # started, no results yet
        fits = record.cell in cells and not record.differs(cells[record.cell].config)
        key = record.variant, record.cell, record.seed
        rank = fits, record.state == "complete", record.step, fresh
        if key not in found or rank > found[key][0]:
            found[key] = (rank, record)
    order = list(cells)
    return sorted(
        (record for _, record in found.values()),
        key=lambda r: (r.variant, order.index(r.cell) if r.cell in order else len(order), r.cell, r.seed),
    )


def read_runs(sweep: Sweep, base: Path) -> list[Record]:
    """The records of all run folders of this sweep that have results or an error."""
    records = []
    for group in [base / sweep.name, *sorted(base.glob(f"{sweep.name}+*"))]:
        for config in sorted(group.glob("*-s*/config.json")):
            folder = config.parent
            if (_failed(folder) or (folder / "environment.json").exists()) and re.fullmatch(NAME, folder.name):
                records.append(read_folder(folder, sweep.metric))
    return records


def results_file(sweep: Sweep, folder: Path | None = None) -> Path:
    return (folder or sweep.file.parent) / f"{sweep.name}.results.json"


def write_results(path: Path, sweep: Sweep, records: Sequence[Record]) -> None:
    """One run per line, for readable diffs."""
    first = records[0].config if records else {}
    common = {k: v for k, v in first.items() if all(k in r.config and r.config[k] == v for r in records)}
    lines = []
    for record in records:
        kept = asdict(record)
        kept["config"] = {k: v for k, v in record.config.items() if k not in common}
        lines.append(json.dumps(_plain(kept), allow_nan=False))
    head = {"format": FORMAT, "sweep": sweep.file.name, "title": sweep.title, "metric": sweep.metric, "common": common}
    text = json.dumps(head, allow_nan=False)[:-1] + ',\n"runs": [\n' + ",\n".join(lines) + "\n]}\n"
    with atomic(path) as temporary:
        temporary.write_text(text)


def read_results(path: Path, metric: str = "") -> list[Record]:
    """The runs of the file; with `metric`, without curves of another one."""
    if not path.exists():
        return []
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
        records = [_record(written, run) for run in written["runs"]] if written.get("format") == FORMAT else []
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}): restore it, or remove it if the run folders exist"
        ) from None
    if written.get("format") != FORMAT:
        raise ValueError(f"{path} has format {written.get('format')}, this version reads {FORMAT}")
    if metric and written.get("metric") != metric:
        records = [dataclasses.replace(record, curve=[], clock=[]) for record in records]
    return records


def _record(written: dict[str, Any], run: dict[str, Any]) -> Record:
    config, starts = written["common"] | run["config"], [Start(**start) for start in run["starts"]]
    figures = {split: {k: math.nan if v is None else v for k, v in run[split].items()} for split in ("val", "test")}
    return Record(**{**run, **figures, "config": config, "starts": starts})


def thin(points: Sequence[tuple[float, float]], most: int = POINTS) -> Points:
    """At most `most` points: means over equal intervals, each at its last step."""
    points = [(x, y) for x, y in points if math.isfinite(y)]
    if len(points) <= most:
        return [(x, _digits(y)) for x, y in points]
    cuts = [round(i * len(points) / most) for i in range(most + 1)]
    parts = [points[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    return [(part[-1][0], _digits(sum(y for _, y in part) / len(part))) for part in parts]


def _failed(folder: Path) -> str:
    """Why the last attempt failed; empty if it did not."""
    path = folder / "outcome.json"
    ended = _read_json(path, {})
    return str(ended.get("why", "")) if ended.get("state") == "failed" else ""


def _data(folder: Path) -> str:
    rows = _read_json(folder / "data.json", {}).get("sha256")
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:8] if rows else ""


def _read_json(path: Path, otherwise: dict[str, Any]) -> dict[str, Any]:
    """The object in a JSON file, or `otherwise` if it cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else otherwise
    except FileNotFoundError:
        return otherwise
    except (OSError, ValueError) as error:
        say(f"{path} cannot be read ({error}) and is ignored", error=True)
        return otherwise


def _starts(run: Run, config: TrainConfig) -> list[Start]:
    starts: list[Start] = []
    for entry in run.starts():
        on_gpu = config.accelerator != "cpu" and "gpu" in entry
        known = {name: str(entry.get(name, "")) for name in ("commit", "torch", "time")}
        share = f"{entry['gpu_share']:g} % of one " if "gpu_share" in entry else ""
        device = f"{share}{entry['gpu']}" if on_gpu else "CPU"
        start = Start(known["commit"], device, known["torch"], known["time"])
        if not starts or dataclasses.replace(start, time=starts[-1].time) != starts[-1]:
            starts.append(start)
    return starts


def _plain(value: Any) -> Any:
    """Replace NaN and infinity by null, which is valid JSON."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _digits(value: float) -> float:
    return float(f"{value:.5g}")
