"""The order in which the papers' tables are filled, for GPU time that comes in portions.

    python -m experiments.queue --list                              # what is done, what is next, the minutes it takes
    python -m experiments.queue --minutes 28 --data data --out runs # run what fits, first things first

`minutes` is what a run takes alone on one H200. Runs that share a card take turns on it, so a portion holds the cells
whose minutes add up to it. A cell is done when its table's `*.results.json` has the complete run of its config and
seed. Runs are those of `weft sweep`: one that was cut goes on from its checkpoint if `--out` still has it. At the end
the results of every table that was touched are written back beside its file.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.lab.sweep import Job, jobs_of, load_sweep
from weft.lab.sweep.jobs import DONE, FAILED, Local, run_jobs
from weft.lab.sweep.results import gather, read_results, results_file, write_results
from weft.lab.sweep.view import View

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Entry:
    table: str  # a sweep's file, without the .py
    cell: str  # ROW/COLUMN, as `weft sweep --only` takes it
    minutes: float
    seed: int = 0


def queue() -> list[Entry]:
    """First seeds first. Minutes follow from the tokens per second that `*.results.json` have of each cell."""
    wide = {"linear": 6, "local": 4, "linformer": 3, "combiner-fixed": 4, "performer": 8, "bigbird": 9, "full": 14}
    deep = {"combiner-fixed": 7, "linformer": 8, "local": 12, "linear": 13, "performer": 13, "bigbird": 17, "full": 20}
    entries = [Entry("wide/listops", f"{name}/wide*", minutes) for name, minutes in wide.items()]
    entries += [Entry("wide/listops", f"{name}/deep*", minutes) for name, minutes in deep.items()]
    entries += [Entry("cached/listops", "full/plain", 10), Entry("cached/listops", "full/cached", 12)]
    for seed in (1, 2):
        entries += [Entry("wide/listops", f"{name}/wide*", minutes, seed) for name, minutes in wide.items()]
        entries += [Entry("wide/listops", f"{name}/deep*", minutes, seed) for name, minutes in deep.items()]
    return entries


def job_of(entry: Entry, data: str, out: Path | None) -> Job:
    overrides: dict[str, Any] = {"data": data} if data else {}
    sweep = load_sweep(HERE / f"{entry.table}.py")
    (job,) = jobs_of(sweep, out=out, seeds=[entry.seed], only=[entry.cell], overrides=overrides)
    return job


def is_done(job: Job) -> bool:
    """Whether the table's results hold the complete run of this config and seed."""
    return any(
        record.state == "complete"
        and (record.cell, record.seed) == (job.cell.slug, job.config.seed)
        and not record.overrides
        and not record.differs(job.cell.config)
        for record in read_results(results_file(job.sweep))
    )


def pick(waiting: Sequence[tuple[Entry, Job]], minutes: float) -> list[tuple[Entry, Job]]:
    """In order, every run that still fits: a long one that does not fit lets shorter ones pass."""
    chosen, left = [], minutes
    for entry, job in waiting:
        if entry.minutes <= left:
            chosen.append((entry, job))
            left -= entry.minutes
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=28, help="how long this portion is")
    parser.add_argument("--jobs", type=int, default=4, help="runs at a time, all on the same device")
    parser.add_argument("--data", default="", help="where the data is, if not where the configs say")
    parser.add_argument("--out", type=Path, help="for the runs; not given: runs/ beside each table")
    parser.add_argument("--list", action="store_true", help="show the queue and start nothing")
    given = parser.parse_args()
    jobs = [(entry, job_of(entry, given.data, given.out)) for entry in queue()]
    waiting = [(entry, job) for entry, job in jobs if not is_done(job)]
    chosen = pick(waiting, given.minutes)
    for entry, job in jobs:
        state = "done" if (entry, job) not in waiting else "next" if (entry, job) in chosen else "waiting"
        print(f"{state:8} {entry.minutes:5.0f} min  {entry.table:16} {job.name}")
    print(f"{len(jobs) - len(waiting)} of {len(jobs)} done, {sum(e.minutes for e, _ in waiting):.0f} minutes left")
    if given.list or not chosen:
        return
    view = View()
    try:
        states = run_jobs([job for _, job in chosen], Local(given.jobs), minutes=given.minutes, view=view)
    finally:
        view.close()
    for sweep in {str(job.sweep.file): job.sweep for _, job in chosen}.values():
        write_results(results_file(sweep), sweep, gather(sweep, given.out))
    done = sum(state.state == DONE for state in states)
    print(f"{done} of {len(states)} done, {sum(state.state == FAILED for state in states)} failed")


if __name__ == "__main__":
    main()
