"""Run the papers' tables in order of priority, within a limited amount of GPU time.

    python -m experiments.queue --list                              # what is done, what is next, and its minutes
    python -m experiments.queue --minutes 28 --data data --out runs # run what fits, in order
    python -m experiments.queue --only "wide/listops full/*" --seeds 1 2 --set compile=false
    python -m experiments.queue --only "combiner/enwik8 *" --seeds 0 --share 16  # six at once, 16 % of the GPU each
    python -m experiments.queue --hold alone                        # runs stand still while there is a file `alone`

The minutes are those of a run alone on one H200, and those that it keeps the GPU busy. Several runs share the GPU
(`--jobs`): a set of runs fits if their busy minutes add up to the available ones, and their minutes to those of all
jobs. Small models wait for the CPU most of the time, so sharing pays with NVIDIA's MPS (`nvidia-cuda-mps-control -d`);
without it, use `--jobs 1`. With `--hold FILE`, `touch FILE` gives the GPU to a benchmark and `rm FILE` back to the runs
(not for runs of fixed time). `--share` limits every run to a percentage of the multiprocessors, so that runs of fixed
time are comparable although they share the GPU; their results have the share.

A cell is done when its table's `*.results.json` has a complete run with its config and seed. Runs are those of
`weft sweep`: an interrupted run continues from its checkpoint if `--out` still has it. At the end, the results of all
changed tables are written next to their files.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from weft.lab.run import SHARE, TIME, Run
from weft.lab.sweep import Job, Sweep, jobs_of, load_sweep, parse_override
from weft.lab.sweep.cells import started
from weft.lab.sweep.jobs import DONE, FAILED, Local, Process, State, run_jobs, saved_step
from weft.lab.sweep.results import Record, gather, read_results, results_file, write_results
from weft.lab.sweep.view import View

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Entry:
    table: str  # sweep file without .py
    cell: str  # ROW/COLUMN, as for `weft sweep --only`
    minutes: float  # alone
    seed: int = 0
    busy: float = 0.0  # minutes of the GPU; 0: all

    @property
    def share(self) -> float:
        """The part of the GPU that it needs."""
        return self.busy / self.minutes if self.busy else 1.0


Shared = tuple[float, float]  # minutes, and of these the GPU's

# Minutes of 10,000 steps on ListOps, packed: wide and eager, deep and compiled. Measured: wide linear, local,
# combiner-fixed, full and synthesizer (7.6, 7.7, 7.4, 7.0 and 9.3 ms per step); all deep cells but local, and wide
# sinkhorn, alone on the GPU: 12 (combiner-fixed, linear) to 32 ms (sparse) of a step keep it busy. Those that gather
# their documents (bigbird, linformer, performer, sinkhorn, sparse) should take 2.5 ms less since. Their minutes
# are upper bounds, as kernels were compiled for rare lengths in the measured steps; those of sparse are estimated.
LISTOPS = {
    "linear": ((1.8, 0.9), (5, 2.2)), "local": ((1.8, 0.4), (5, 2.3)), "linformer": ((1.8, 0.8), (6.3, 2.4)),
    "combiner-fixed": ((1.8, 1.0), (4.1, 2.0)), "performer": ((2.5, 1.7), (7, 2.9)),
    "longformer": ((1.8, 0.5), (4.1, 2.4)), "sinkhorn": ((3.2, 2.2), (8.7, 3.4)), "bigbird": ((1.8, 0.8), (8.6, 2.7)),
    "full": ((1.8, 0.8), (3.1, 3.0)), "sparse": ((1.8, 0.8), (8, 4.9)), "synthesizer": ((2, 1.2), (6.8, 4.1)),
}  # fmt: skip
# Minutes of 30,000 steps on IMDb, by bytes and by words: wide and deep. Measured beside other jobs: wide words (7 to 9
# ms per step), deep full words (22), wide full and local bytes (6.5 at first, 16 and 17 on a full GPU), wide linear
# bytes (8.1, 3.8 of them busy). Alone: deep linear bytes (20.3, 10.1 busy).
BYTES = {
    "combiner-fixed": ((5, 2.4), (10.2, 5.2)), "local": ((5, 1), (10.2, 5)), "linear": ((5, 1.9), (10.2, 5.1)),
    "full": ((5, 1.8), (10.2, 6.5)),
}  # fmt: skip
WORDS = {
    "combiner-fixed": ((4.3, 1.2), (12, 4.5)), "local": ((4.7, 0.6), (12, 4)), "linear": ((4.5, 1.3), (12, 4.5)),
    "full": ((4.3, 1), (12, 4.8)),
}  # fmt: skip
# Minutes with the modern recipe, ListOps and IMDb bytes, 5,000 and 15,000 steps of 64: estimated as twice the GPU time
# of a deep step of 32.
MODERN: dict[str, tuple[Shared, Shared]] = {
    "combiner-fixed": ((2.6, 2.0), (6, 5.2)), "local": ((2.6, 2.0), (6, 5.0)), "linear": ((2.7, 2.1), (6, 5.1)),
    "full": ((3.3, 3.0), (7, 6.5)), "performer": ((4, 2.9), (9, 7.5)), "longformer": ((3, 2.4), (7, 6.2)),
}  # fmt: skip
# Minutes of the Long Range Arena's image, Pathfinder and text tasks. Measured alone: image (4.7, 4.8, 7.9 and 14.8 ms
# busy); text, packed and compiled: local (20 ms beside four other runs, 40 on a full GPU, 1.5 minutes for start
# and evaluations), linear (4.7 ms busy), Combiner-Axial (25 ms busy; with `--set packed=false` 16 ms, almost alone,
# which is the figure here). Pathfinder is estimated from image: twice the width, four layers instead of three.
ARENA: dict[str, tuple[Shared, Shared, Shared]] = {
    "Linear Trans.": ((4.8, 2.8), (14, 13), (7, 1.5)), "Local Attention": ((5, 2.8), (14, 13), (7, 1.4)),
    "Combiner-Axial": ((4.9, 4.6), (22, 22), (7, 5)), "Transformer": ((8.8, 8.6), (42, 42), (7, 1.8)),
}  # fmt: skip


def queue() -> list[Entry]:
    """All cells with the first seed, then all with the second and the third. The minutes are estimates from the tokens
    per second that `*.results.json` have of the same or similar cells, with a minute for start and test if the training
    time is fixed."""
    entries: list[Entry] = []

    def add(table: str, cells: Mapping[str, float | Shared]) -> None:
        for cell, minutes in cells.items():
            alone, busy = minutes if isinstance(minutes, tuple) else (minutes, 0.0)
            entries.append(Entry(table, cell, alone, busy=busy))

    def shapes(table: str, rows: Mapping[str, tuple[float | Shared, float | Shared]]) -> None:
        for i, shape in enumerate(("wide", "deep")):
            add(table, {f"{name}/{shape}*": minutes[i] for name, minutes in rows.items()})

    shapes("wide/listops", LISTOPS)
    add("cached/listops", {"full/plain": (3, 1.5), "full/cached": (9.5, 7)})
    add("combiner/enwik8", {f"{row}/10 min": 11 for row in ("dense", "combiner-fixed", "combiner-axial", "cached")})
    add("combiner/enwik8", {"subsampled, dense finish/10 min": 11, "subsampled, ensemble of 10/10 min": 13})
    shapes("wide/imdb_byte", BYTES)
    shapes("wide/imdb_token", WORDS)
    kinds = ("full", "sparse", "combiner-fixed", "combiner-axial", "combiner-mixture")
    add("combiner/cifar10_density", {f"{kind}/10 min": 12 for kind in kinds})
    add("crate/cifar10", {f"{row}/{data}": 11 for data in ("CIFAR-10", "Tiny-*") for row in ("CRATE", "ViT")})
    add("crate/mae", {"pre-training/*": 11, "probe/*": 2, "fine-tuned/*": 3, "not pre-trained/*": 3})
    columns = ("plain", "cached")
    add("cached/tiny_imagenet", {f"{row}/{c}": 11 for row in ("ViT-S", "Swin-T", "PVT-Tiny") for c in columns})
    add("cached/table4", {f"Multi30k {pair}/{c}": 4 for pair in ("De-En", "En-De") for c in columns})
    add("subsampled/molecules", {"0 dropped/QM9 gap": 7, "0.1 dropped/QM9 gap": 7})
    sets = {"FreeSolv": 1, "ESOL": 2, "Lipophilicity": 4}
    add("subsampled/moleculenet", {f"{drop} dropped/{name}": m for name, m in sets.items() for drop in ("0", "0.1")})
    add(
        "wide/modern",
        {f"{name}/{task} *": m[i] for i, task in enumerate(("ListOps", "byte")) for name, m in MODERN.items()},
    )
    for pooling in ("mean", "cls"):
        for i, column in enumerate(("Image", "Pathfinder", "Text")):
            add("combiner/table5", {f"{row}/{column}, {pooling}": minutes[i] for row, minutes in ARENA.items()})
    return [replace(entry, seed=seed) for seed in (0, 1, 2) for entry in entries]


@cache
def sweep_of(table: str) -> Sweep:
    return load_sweep(HERE / f"{table}.py")


def job_of(entry: Entry, data: str, out: Path | None, **overrides: Any) -> Job:
    if data:
        overrides["data"] = data
    (job,) = jobs_of(sweep_of(entry.table), out=out, seeds=[entry.seed], only=[entry.cell], overrides=overrides)
    if job.variant:
        raise ValueError(f"{job.variant} changes what the cells of {entry.table} compute: use weft sweep --set")
    return job


@cache
def results_of(file: Path) -> list[Record]:
    return read_results(file)


def is_done(job: Job) -> bool:
    """Whether the table's results have a complete run with this config and seed, from the present weights of the run
    that it starts from."""
    record = complete(job.sweep, job.cell.slug, job.config.seed)
    if record is None or not job.cell.start:
        return record is not None
    other, _, slug = job.cell.start.rpartition("/")
    sweep = load_sweep(job.sweep.file.with_name(f"{other}.py")) if other else job.sweep
    first = complete(sweep, slug, job.config.seed)
    return first is not None and begun(first) < begun(record)


def begun(record: Record) -> datetime:
    return datetime.strptime(record.starts[0].time, TIME)


def complete(sweep: Sweep, slug: str, seed: int) -> Record | None:
    """The complete run of a cell with its present config."""
    config = next(cell.config for cell in sweep.cells if cell.slug == slug)
    for record in results_of(results_file(sweep)):
        same = (record.state, record.cell, record.seed) == ("complete", slug, seed) and not record.overrides
        if same and not record.differs(config):
            return record
    return None


def left(entry: Entry, job: Job) -> float:
    """The minutes that are left of a run, which may have been interrupted."""
    return entry.minutes * (1 - saved_step(job.folder) / started(job).steps)


def limited(entry: Entry, job: Job, share: float) -> Entry:
    """The entry of a run that may use this share of the GPU: it takes longer, unless its time is fixed."""
    busy = entry.minutes * entry.share
    if job.config.time_budget:
        return replace(entry, busy=share * entry.minutes)
    return replace(entry, minutes=max(entry.minutes, busy / share), busy=busy)


def need_mps() -> None:
    """Without MPS, CUDA ignores the share."""
    try:
        found = subprocess.run(["nvidia-cuda-mps-control"], input=b"get_server_list\n", capture_output=True, timeout=10)
        if found.returncode == 0:
            return
        why = (found.stdout + found.stderr).decode(errors="replace").strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    raise SystemExit(f"--share needs NVIDIA's MPS, which does not run ({why}): start nvidia-cuda-mps-control -d first")


def pick(waiting: Sequence[tuple[Entry, Job]], minutes: float, jobs: int = 1) -> list[tuple[Entry, Job]]:
    """All runs that fit, in order, with `jobs` runs at a time; runs that are too long are skipped. If none fits, the
    first one, which continues in the next portion. A run that starts from another run's weights needs that run."""
    chosen, free, gpu = [], jobs * minutes, minutes
    folders: set[str] = set()
    for entry, job in waiting:
        first, length = job.config.init_from, left(entry, job)
        if first and first not in folders and not Run(Path(first)).result():
            continue
        if length <= min(minutes, free) and length * entry.share <= gpu:
            chosen.append((entry, job))
            folders.add(str(job.folder))
            free, gpu = free - length, gpu - length * entry.share
    return chosen or list(waiting[:1])


class Hold:
    """The view of a sweep that also stops all its runs while the file exists."""

    def __init__(self, file: Path, view: Callable[[Sequence[State], State | None], None]):
        self.file, self.view = file, view
        self.held: set[int] = set()  # process groups

    def __call__(self, states: Sequence[State], changed: State | None) -> None:
        if not self.file.exists():
            self.release()
        else:
            children = (state.handle.child for state in states if isinstance(state.handle, Process))
            for number in {child.pid for child in children if child is not None} - self.held:
                self._send(number, signal.SIGSTOP)
                self.held.add(number)
        self.view(states, changed)

    def release(self) -> None:
        while self.held:
            self._send(self.held.pop(), signal.SIGCONT)

    def _send(self, number: int, what: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(number, what)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=28, help="available minutes")
    parser.add_argument("--jobs", type=int, help="runs at a time, all on the same GPU; default: 4, or 100 / share")
    parser.add_argument("--share", type=float, default=0.0, metavar="PERCENT", help="of the GPU, for every run")
    parser.add_argument("--data", default="", help="folder of the data, if different from the configs")
    parser.add_argument("--out", type=Path, help="folder of the runs; default: runs/ next to each table")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="CELL", help='as listed: "wide/listops full/wide*"')
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="settings that change no result")
    parser.add_argument("--hold", type=Path, metavar="FILE", help="stop all runs while this file exists")
    parser.add_argument("--list", action="store_true", help="show the queue without starting anything")
    given = parser.parse_args()
    if not 0 <= given.share <= 100:
        parser.error(f"--share is a percentage of the GPU, got {given.share:g}")
    count = given.jobs or (int(100 / given.share) if given.share else 4)
    if count * given.share > 100:
        parser.error(f"{count} jobs with {given.share:g} % each need more than one GPU: use fewer, or a smaller share")
    overrides = dict(parse_override(text) for text in given.set)
    entries = [entry for entry in queue() if entry.seed in given.seeds and matches(entry, given.only)]
    jobs = [(entry, job_of(entry, given.data, given.out, **overrides)) for entry in entries]
    if given.share:
        jobs = [(limited(entry, job, given.share / 100), job) for entry, job in jobs]
    waiting = [(entry, job) for entry, job in jobs if not is_done(job)]
    chosen = pick(waiting, given.minutes, count)
    for entry, job in jobs:
        state = "done" if (entry, job) not in waiting else "next" if (entry, job) in chosen else "waiting"
        length = left(entry, job)
        print(f"{state:8} {length:5.1f} min, busy {length * entry.share:5.1f}  {entry.table:24} {job.name}")
    busy = sum(left(e, j) * e.share for e, j in waiting)
    print(f"{len(jobs) - len(waiting)} of {len(jobs)} done, {busy:.0f} minutes of GPU time left")
    if given.list or not chosen:
        return
    if given.share:
        need_mps()
        os.environ[SHARE] = f"{given.share:g}"
    view = View()
    hold = Hold(given.hold, view) if given.hold else None
    try:
        states = run_jobs([job for _, job in chosen], Local(count), minutes=given.minutes, view=hold or view)
    finally:
        if hold is not None:
            hold.release()
        view.close()
    for sweep in {str(job.sweep.file): job.sweep for _, job in chosen}.values():
        write_results(results_file(sweep), sweep, gather(sweep, given.out))
    done = sum(state.state == DONE for state in states)
    print(f"{done} of {len(states)} done, {sum(state.state == FAILED for state in states)} failed")


def matches(entry: Entry, patterns: Sequence[str]) -> bool:
    """Whether a pattern "TABLE CELL" fits the entry, by its name in the queue or the cell's own."""
    cell = job_of(entry, "", None).cell
    names = (f"{entry.table} {entry.cell}", f"{entry.table} {cell.row}/{cell.column}")
    return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns)


if __name__ == "__main__":
    main()
