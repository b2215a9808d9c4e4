"""The commands of the lab: train, eval, list, sweep, report, data. Heavy imports wait until a command runs."""

from __future__ import annotations

import inspect
import signal
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import CANNOT_SAVE, DIVERGED, INTERRUPTED, MISCOMPILED, NO_DATA, NO_MEMORY
from .say import console, plain, say


def train_command() -> Callable[..., None]:
    """`weft train`, with an option for every field of the TrainConfig."""
    from ..tasks.config import TrainConfig, field_help, field_types

    def train(task: str, resume: bool = False, **given: Any) -> None:
        from ..tasks.config import make_config

        values = {name: value for name, value in given.items() if value is not None}
        from .loop import train as run

        run(make_config(task, **values), resume=resume)

    train.__doc__ = (
        "Train a model on a TASK of `weft list`. Options left out take the task's values, or the preset's.\n\n"
        f"Exit codes: {NO_DATA} data missing, {DIVERGED} diverged, {MISCOMPILED} compiled wrongly, "
        f"{NO_MEMORY} too large for the memory, {CANNOT_SAVE} disk full, {INTERRUPTED} stopped by a signal and saved."
    )
    defaults = TrainConfig()
    parameters = [
        inspect.Parameter(
            "task",
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            annotation=Annotated[str, typer.Argument(help=field_help()["task"])],
        ),
        inspect.Parameter(
            "resume",
            inspect.Parameter.KEYWORD_ONLY,
            default=False,
            annotation=Annotated[
                bool, typer.Option("--resume", help="go on with the run in --out, or start it if there is none")
            ],
        ),
    ]
    for name, kind in field_types().items():
        if name == "task":
            continue
        kind = _plain(kind)
        flag = "--" + name.replace("_", "-")
        flags = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
        shown = getattr(defaults, name)
        text = field_help()[name] + (f" [{shown}]" if shown not in ("", None) else "")
        option = typer.Option(flags, help=text, show_default=False)
        parameters.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[typing.Optional[kind], option],  # noqa: UP045  kind is a value here
            )
        )
    train.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    train.__annotations__ = {p.name: p.annotation for p in parameters}
    return train


def resume_run(
    run: Annotated[Path, typer.Argument(help="the run's folder")],
) -> None:
    """Go on with an interrupted run, with the settings it was started with."""
    from .loop import train
    from .run import Run

    config = Run(run).config()
    config.out = str(run)
    train(config, resume=True)


def eval_run(
    run: Annotated[Path, typer.Argument(help="the run's folder")],
    split: Annotated[str, typer.Option(help="train, val or test")] = "test",
    which: Annotated[str, typer.Option(help="weights: best, last or average; not given: as the run tests")] = "",
    ensemble: Annotated[int, typer.Option(help="sub-models of subsampled attention that predict together")] = 0,
    data: Annotated[str, typer.Option(help="where the data is, if not where the run found it")] = "",
    batch_size: Annotated[int, typer.Option(help="examples at a time, if not as in training")] = 0,
    accelerator: Annotated[str, typer.Option(help="cpu, cuda, mps or auto")] = "auto",
) -> None:
    """Evaluate a run on a split of its task's data."""
    from .evaluate import evaluate_run

    changes: dict[str, Any] = {"accelerator": accelerator}
    changes |= {"data": data} if data else {}
    changes |= {"batch_size": batch_size} if batch_size else {}
    found, step = evaluate_run(run, split=split, which=which, ensemble=ensemble, **changes)
    say(f"{run}, step {step}, {split}:")
    for name, value in found.items():
        say(f"  {name} {value:.4f}")


def list_all() -> None:
    """What can be trained: the tasks with their presets, and the attention mechanisms."""
    from rich.table import Table

    from ..attention import attention_info, attentions
    from ..tasks import get_task, tasks

    screen = console()
    table = Table("task", "what", "metric", "presets", title="tasks")
    for name in tasks():
        task = get_task(name)
        table.add_row(name, task.about, task.metric, " ".join(task.presets))
    screen.print(table)
    table = Table("attention", "cost", "causal", "bidirectional", "steps", "options", title="attention")
    for name in attentions():
        info = attention_info(name)
        yes = ["yes" if flag else "" for flag in (info.causal, info.bidirectional, info.steps)]
        table.add_row(name, info.cost, *yes, " ".join(f"{k}={v}" for k, v in info.options.items()))
    screen.print(table)


def sweep_files(
    files: Annotated[list[Path], typer.Argument(help="Python files that define TITLE, METRIC and cells()")],
    jobs: Annotated[int, typer.Option(help="runs at a time, all on the same device; with Ray or Slurm 0: all")] = 0,
    seeds: Annotated[str, typer.Option(help="in place of the file's own: 0,1,2")] = "",
    only: Annotated[list[str] | None, typer.Option(help="a row, a column or row/column; * and ? match")] = None,
    steps: Annotated[int, typer.Option(help="in place of the configs' own; 0: their own")] = 0,
    data: Annotated[str, typer.Option(help="where the data is, if not where the configs say")] = "",
    set_: Annotated[list[str] | None, typer.Option("--set", help="field=value for every config")] = None,
    out: Annotated[
        Path | None, typer.Option(help="for the runs, OUT/FOLDER/FILE/…; not given: runs/ beside the file")
    ] = None,
    minutes: Annotated[float, typer.Option(help="stop after this long, all saved; 0: no limit")] = 0.0,
    on: Annotated[str, typer.Option(help="local, ray or slurm")] = "local",
    address: Annotated[str, typer.Option(help="of the Ray cluster; empty: the one running here, or a new one")] = "",
    gpus: Annotated[float, typer.Option(help="per run on Ray or Slurm; a fraction shares one; -1: 1 if any")] = -1,
    cpus: Annotated[int, typer.Option(help="per run on Ray or Slurm")] = 1,
    partition: Annotated[str, typer.Option(help="of Slurm")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="list the runs and start nothing")] = False,
) -> None:
    """Run the tables of FILES: every cell with every seed, skipping what is done and going on with what was cut.

    Settings that change what is computed (--steps, --set) get folders of their own.

    Exit codes: 0 all done, 1 something failed, 75 stopped by a signal or by --minutes, saved, go on with it again.
    """
    from .sweep import jobs_of, load_sweep, parse_override
    from .sweep.cells import keep_sweep
    from .sweep.jobs import DONE, FAILED, Local, run_jobs, survey
    from .sweep.view import View, failures, table

    overrides = dict(parse_override(text) for text in set_ or [])
    overrides |= {"steps": steps} if steps else {}
    overrides |= {"data": data} if data else {}
    numbers = [int(seed) for seed in seeds.replace(",", " ").split()] if seeds else None
    sweeps = [load_sweep(file) for file in files]
    work = [
        job for sweep in sweeps for job in jobs_of(sweep, out=out, seeds=numbers, only=only or (), overrides=overrides)
    ]
    if overrides:
        say("in every config: " + ", ".join(f"{name}={value}" for name, value in overrides.items()))
    if dry_run:
        console().print(table(survey(work)))
        return
    engine: Any
    if on == "local":
        engine = Local(jobs or 1)
    elif on == "ray":
        from .sweep.remote import RayEngine

        engine = RayEngine(jobs, address=address, gpus=gpus, cpus=cpus)
    elif on == "slurm":
        from .sweep.remote import SlurmEngine

        place = work[0].folder.parent / ".slurm"
        engine = SlurmEngine(jobs, place, gpus=gpus, cpus=cpus, minutes=minutes, partition=partition)
    else:
        raise ValueError(f"--on takes local, ray or slurm; got {on!r}")
    for sweep in sweeps:
        keep_sweep(sweep, out)
    view = View()
    try:
        states = run_jobs(work, engine, minutes=minutes, view=view)
    finally:
        view.close()
    failed = [state for state in states if state.state == FAILED]
    left = [state for state in states if state.state not in (DONE, FAILED)]
    if failed:
        say(failures(states), error=True)
    done = len(states) - len(failed) - len(left)
    say(f"{done} done, {len(failed)} failed, {len(left)} left")
    if failed:
        raise SystemExit(1)
    if left:
        raise SystemExit(INTERRUPTED)


def report_runs(
    paths: Annotated[list[Path], typer.Argument(help="folders of runs, or folders with sweeps, or sweeps")],
    out: Annotated[Path | None, typer.Option(help="runs: the page; sweeps: the folder to write to")] = None,
    runs: Annotated[Path | None, typer.Option(help="what --out of weft sweep was, if it was given")] = None,
) -> None:
    """Runs side by side on one self-contained page; or the tables of sweeps beside the papers' figures.

    A sweep's file is Python. It is run, which is said, only where `weft sweep` has kept no sweep.json beside its runs.

    For a folder with sweeps: report.md, report.html, and for each sweep a NAME.results.json, which holds enough to
    make the tables again without the runs.
    """
    if all((path / "config.json").exists() for path in paths):
        from .report import report

        say(f"wrote {report(paths, out or Path('report.html'))}")
        return
    from .sweep.tables import report_sweeps, sweep_folders

    found = sweep_folders(paths)
    for place, files in found.items():
        if out is not None:
            place = out / place.parent.name / place.name if len(found) > 1 else out / place.name
        say(report_sweeps(files, place, runs))
        say(f"wrote {place}.md and {place}.html")


def _plain(kind: Any) -> Any:
    """`float | None` -> float."""
    if isinstance(kind, types.UnionType):
        return next(part for part in typing.get_args(kind) if part is not type(None))
    return kind


data_app = typer.Typer(no_args_is_help=True, help="The data sets: what is here, what can be made or fetched.")
DataFolder = Annotated[Path, typer.Option(help="the folder that holds the data sets")]


@data_app.command("list")
def data_list(data: DataFolder = Path("data")) -> None:
    """What is in the data folder, and how to get what is not."""
    from rich.table import Table

    from ..tasks.fetch import SOURCES, present

    table = Table("data set", "here", "how to get it", "checksum of the makers' archive")
    for source in SOURCES:
        path = present(source, data)
        table.add_row(source.name, plain(path) if path else "no", source.how, source.checksum)
    table.add_row("digits", "in scikit-learn", "pip install 'weft[lab]'", "")
    console().print(table)


@data_app.command("make")
def data_make(
    name: Annotated[str, typer.Argument(help="listops, or pathfinder32-easy … pathfinder128-hard")],
    data: DataFolder = Path("data"),
    seed: Annotated[int, typer.Option(help="the same seed gives the same data")] = 0,
    count: Annotated[int, typer.Option(help="training examples (listops) or pictures; 0: as in the papers")] = 0,
    workers: Annotated[int, typer.Option(help="processes; 0: one per core")] = 0,
) -> None:
    """Generate a data set."""
    import os
    import shutil
    import time

    from ..tasks.fetch import make
    from ..tasks.files import read_array

    # A kill that can be heard leaves no half-made folder behind.
    def leave(number: int, frame: Any) -> None:
        for temporary in data.glob(f".*.{os.getpid()}.tmp"):
            shutil.rmtree(temporary, ignore_errors=True)
        os._exit(128 + number)  # an exception could be raised, and lost, in the middle of a fork

    before = [(number, signal.signal(number, leave)) for number in (signal.SIGTERM, signal.SIGHUP)]
    workers = workers or os.cpu_count() or 1
    start = time.perf_counter()
    try:
        folder = make(name, data, seed=seed, workers=workers, count=count)
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    took = time.perf_counter() - start
    made = sum(len(read_array(folder, path.stem)) for path in folder.glob("*label*.npy"))
    say(f"made {folder}: {made:,} examples in {took:.1f} s, {made / took:,.0f} per second, {workers} processes")


@data_app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(help="imdb, cifar10, cifar100 or enwik8")],
    data: DataFolder = Path("data"),
) -> None:
    """Fetch a data set from the network."""
    from ..tasks.fetch import get

    say(f"fetched {get(name, data)}")
