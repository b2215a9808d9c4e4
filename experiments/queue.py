"""Run the papers' tables in order of priority, within a limited amount of GPU time.

    python -m experiments.queue --list                              # what is done, what is next, and its minutes
    python -m experiments.queue --minutes 28 --data data --out runs # run what fits, in order

`minutes` is the time of a run alone on one H200. Runs on the same GPU alternate, so the minutes of the chosen cells add
up. A cell is done when its table's `*.results.json` has a complete run with its config and seed. Runs are those of
`weft sweep`: an interrupted run continues from its checkpoint if `--out` still has it. At the end, the results of all
changed tables are written next to their files.
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
    table: str  # sweep file without .py
    cell: str  # ROW/COLUMN, as for `weft sweep --only`
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
    """Whether the table's results have a complete run with this config and seed."""
    return any(
        record.state == "complete"
        and (record.cell, record.seed) == (job.cell.slug, job.config.seed)
        and not record.overrides
        and not record.differs(job.cell.config)
        for record in read_results(results_file(job.sweep))
    )


def pick(waiting: Sequence[tuple[Entry, Job]], minutes: float) -> list[tuple[Entry, Job]]:
    """All runs that fit, in order; runs that are too long are skipped."""
    chosen, left = [], minutes
    for entry, job in waiting:
        if entry.minutes <= left:
            chosen.append((entry, job))
            left -= entry.minutes
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=28, help="available minutes")
    parser.add_argument("--jobs", type=int, default=4, help="runs at a time, all on the same device")
    parser.add_argument("--data", default="", help="folder of the data, if different from the configs")
    parser.add_argument("--out", type=Path, help="folder of the runs; default: runs/ next to each table")
    parser.add_argument("--list", action="store_true", help="show the queue without starting anything")
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
