"""The commands of the lab: resume, eval, list, sweep, report, data. Heavy imports happen inside the commands."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import INTERRUPTED, Group
from .say import console, plain, say, show_table


def resume_run(
    run: Annotated[Path, typer.Argument(help="the run's folder")],
    data: Annotated[str, typer.Option(help="where the data is, if not where the run found it")] = "",
    accelerator: Annotated[
        str, typer.Option("--device", "--accelerator", help="cpu, cuda, mps or auto; default: as before")
    ] = "",
) -> None:
    """Continue an interrupted run with its original settings."""
    say(f"resuming {run}: loading PyTorch …")
    from .loop import train
    from .run import Run

    config = Run(run).config()
    config.out, config.data = str(run), data or config.data
    config.accelerator = accelerator or config.accelerator
    train(config, resume=True)


def eval_run(
    run: Annotated[Path, typer.Argument(help="the folder of a run or of an exported model")],
    split: Annotated[str, typer.Option(help="train, val or test")] = "test",
    which: Annotated[str, typer.Option(help="weights: best, last or average; default: the run's test_on")] = "",
    ensemble: Annotated[
        int | None, typer.Option(help="average this many sampled sub-models, 0: none; default: the run's")
    ] = None,
    stride: Annotated[int, typer.Option(min=0, help="language models: overlap windows, one every STRIDE tokens")] = 0,
    data: Annotated[
        str, typer.Option(help="other data, all of it if it has no parts; or where the run's data is now")
    ] = "",
    text_column: Annotated[str, typer.Option(help="column of the texts in --data; default: the run's")] = "",
    label_column: Annotated[str, typer.Option(help="column of the labels in --data; default: the run's")] = "",
    skip_unlabelled: Annotated[bool, typer.Option("--skip-unlabelled", help="leave out rows without a label")] = False,
    batch_size: Annotated[int, typer.Option(help="batch size, if different from training")] = 0,
    accelerator: Annotated[str, typer.Option("--device", "--accelerator", help="cpu, cuda, mps or auto")] = "auto",
) -> None:
    """Evaluate a run on a split of its task's data."""
    say(f"evaluating {run}: loading PyTorch …", error=True)
    from .evaluate import evaluate_run
    from .progress import Count, figure

    changes: dict[str, Any] = {"accelerator": accelerator}
    changes |= {"data": data} if data else {}
    given = {"text_column": text_column, "label_column": label_column, "skip_unlabelled": skip_unlabelled}
    changes |= {name: value for name, value in {**given, "batch_size": batch_size}.items() if value}
    with Count("batch") as count:
        how: dict[str, Any] = dict(split=split, which=which, ensemble=ensemble, stride=stride, tell=count)
        found, step = evaluate_run(run, **how, **changes)
    say(f"{run}, step {step}, {split}{' part of ' + data if data else ''}:")
    for name, value in found.items():
        say(f"  {name} {figure(value)}")


def list_all() -> None:
    """List the tasks with their presets, and the attention mechanisms."""
    from ..attention import attention_info, attentions
    from ..tasks import get_task, tasks

    entries = [get_task(name) for name in tasks()]
    rows = [(task.name, task.about, task.metric, " ".join(task.presets)) for task in entries]
    show_table(("task", "what", "metric", "presets"), rows, "tasks", wrap=("what", "presets"))
    found = []
    for name in attentions():
        info = attention_info(name)
        yes = ["yes" if flag else "" for flag in (info.causal, info.bidirectional, info.steps)]
        found.append((name, info.cost, *yes, " ".join(f"{k}={v}" for k, v in info.options.items())))
    columns = ("attention", "cost", "causal", "bidirectional", "steps", "options")
    show_table(columns, found, "attention", wrap=("options",))


def sweep_files(
    files: Annotated[list[Path], typer.Argument(help="Python files that define TITLE, METRIC and cells()")],
    jobs: Annotated[int, typer.Option(help="runs at a time on one device; 0: one, with Ray or Slurm all")] = 0,
    seeds: Annotated[str, typer.Option(help="seeds instead of the file's, e.g. 0,1,2")] = "",
    only: Annotated[
        list[str] | None, typer.Option(help="a row, a column or row/column; wildcards: * ?; repeatable")
    ] = None,
    steps: Annotated[int, typer.Option(help="steps of every run; 0: as in the configs")] = 0,
    data: Annotated[str, typer.Option(help="where the data is, if not where the configs say")] = "",
    set_: Annotated[list[str] | None, typer.Option("--set", help="set field=value in every config; repeatable")] = None,
    out: Annotated[
        Path | None, typer.Option(help="write runs to OUT/FOLDER/FILE/…; default: runs/ next to the file")
    ] = None,
    minutes: Annotated[float, typer.Option(help="save and stop after this many minutes; 0: no limit")] = 0.0,
    on: Annotated[str, typer.Option(help="local, ray or slurm")] = "local",
    address: Annotated[str, typer.Option(help="address of the Ray cluster; empty: the local one, or a new one")] = "",
    gpus: Annotated[float, typer.Option(help="GPUs per run on Ray or Slurm; fractions share a GPU; -1: 1 if any")] = -1,
    cpus: Annotated[int, typer.Option(help="CPUs per run on Ray or Slurm")] = 1,
    partition: Annotated[str, typer.Option(help="Slurm partition")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="list the runs without starting them")] = False,
) -> None:
    """Run the tables of FILES: every cell with every seed. Complete runs are skipped, interrupted runs continue.

    Settings that change the computation (--steps, --set) get their own folders.

    Exit codes: 0 all complete, 1 some runs failed, 75 saved and stopped by a signal or --minutes (run it again).
    """
    from .sweep import jobs_of, load_sweep, parse_override
    from .sweep.cells import check_folders, keep_sweep
    from .sweep.jobs import DONE, FAILED, Local, run_jobs, survey
    from .sweep.view import View, failures, table

    overrides = dict(parse_override(text) for text in set_ or [])
    overrides |= {"steps": steps} if steps else {}
    overrides |= {"data": data} if data else {}
    for name, value, least in (("jobs", jobs, 0), ("minutes", minutes, 0), ("cpus", cpus, 1), ("gpus", gpus, 0)):
        if value < least and (name, value) != ("gpus", -1):
            raise ValueError(f"--{name} must be at least {least}, got {value:g}")
    if on not in ("local", "ray", "slurm"):
        raise ValueError(f"--on must be local, ray or slurm, got {on!r}")
    if seeds and not re.fullmatch(r"[\s,]*(-?\d+([\s,]+|$))+", seeds):
        raise ValueError(f"--seeds takes whole numbers such as 0,1,2; got {seeds!r}")
    numbers = [int(seed) for seed in seeds.replace(",", " ").split()] if seeds else None
    sweeps = [load_sweep(file) for file in files]
    work = [
        job for sweep in sweeps for job in jobs_of(sweep, out=out, seeds=numbers, only=only or (), overrides=overrides)
    ]
    if overrides:
        say("in every config: " + ", ".join(f"{name}={value}" for name, value in overrides.items()))
    if dry_run:
        check_folders(work)
        console().print(table(survey(work)))
        return
    engine: Any
    if on == "local":
        engine = Local(jobs or 1)
    elif on == "ray":
        from .sweep.remote import RayEngine

        engine = RayEngine(jobs, address=address, gpus=gpus, cpus=cpus)
    else:
        from .sweep.remote import SlurmEngine

        place = work[0].folder.parent / ".slurm"
        engine = SlurmEngine(jobs, place, gpus=gpus, cpus=cpus, minutes=minutes, partition=partition)
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
    paths: Annotated[list[Path], typer.Argument(help="folders of runs, folders with sweeps, or sweep files")],
    out: Annotated[Path | None, typer.Option(help="output page (for runs) or folder (for sweeps)")] = None,
    runs: Annotated[Path | None, typer.Option(help="the --out of weft sweep, if it was given")] = None,
) -> None:
    """Compare runs on one self-contained page, or print the tables of sweeps next to the papers' values.

    A sweep file is Python code. It is run, with a note, only if `weft sweep` has left no sweep.json next to its runs.

    For a folder with sweeps: writes report.md, report.html and, for each sweep, NAME.results.json. The tables can be
    made again from these files without the runs.
    """
    from .report import name_of, report

    folders = [path for path in paths if path.name not in ("sweep.json", "overrides.json")]  # beside a sweep's runs
    if folders and all((path / "config.json").exists() for path in folders):
        say(f"wrote {report(folders, out or Path('report.html'))}")
        return
    from .sweep.tables import report_sweeps, sweep_folders

    found = sweep_folders(paths)
    every = [file.resolve() for files in found.values() for file in files]
    if runs is not None and not any(any(runs.glob(f"{file.parent.name}/{file.stem}*")) for file in every):
        names = ", ".join(file.stem for file in every)
        raise FileNotFoundError(f"{runs} has no runs of {names}: pass the --out of weft sweep")
    for place, files in found.items():
        if out is not None:
            folder = name_of(place.parent, [other.parent for other in found]) if len(found) > 1 else ""
            place = out / folder / place.name
        say(report_sweeps(files, place, runs))
        say(f"wrote {place}.md and {place}.html")


def watch_runs(
    folders: Annotated[list[Path], typer.Argument(help="folders of runs; folders inside them are searched too")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="port on this machine; 0: a free one")] = 8642,
) -> None:
    """Show running jobs with their curves on a page that is served to this machine only."""
    from .._interrupt import listen
    from .watch import serve

    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is not a folder")
    try:
        server = serve(folders, port)
    except OSError as error:  # such as another weft watch
        raise ValueError(f"port {port} cannot be used ({error.strerror}): choose another with --port") from None
    with server:
        listen()
        say(f"open http://localhost:{server.server_port} in a browser; Ctrl-C ends it")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("")


data_app = typer.Typer(
    cls=Group, no_args_is_help=True, rich_markup_mode=None, help="List, generate and download data sets."
)
DataFolder = Annotated[Path, typer.Option(help="folder of the data sets")]


@data_app.command("list")
def data_list(data: DataFolder = Path("data")) -> None:
    """List the data sets in the data folder, and how to get the others."""
    from ..tasks.fetch import SOURCES, present

    rows = []
    for source in SOURCES:
        path = present(source, data)
        rows.append((source.name, plain(path) if path else "no", source.how, source.checksum))
    rows.append(("digits", "in scikit-learn", "pip install 'weft[lab]'", ""))
    show_table(("data set", "here", "how to get it", "checksum of the original archive"), rows)
    say("FOLDER: the data set as its makers distribute it. All other tasks read your own files, given with --data.")


@data_app.command("make")
def data_make(
    name: Annotated[str, typer.Argument(help="listops, or pathfinder32-easy … pathfinder128-hard")],
    data: DataFolder = Path("data"),
    seed: Annotated[int, typer.Option(help="the same seed gives the same data")] = 0,
    count: Annotated[int, typer.Option(help="training examples (listops) or images; 0: as in the papers")] = 0,
    workers: Annotated[int, typer.Option(help="processes; 0: one per core")] = 0,
) -> None:
    """Generate a data set."""
    import os
    import shutil
    import time

    from ..tasks.fetch import make
    from ..tasks.files import read_array

    # On a signal, remove the incomplete folder.
    def leave(number: int, frame: Any) -> None:
        for temporary in data.glob(f".*.{os.getpid()}.tmp"):
            shutil.rmtree(temporary, ignore_errors=True)
        os._exit(128 + number)  # an exception during a fork could be lost

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
    """Download a data set."""
    from ..tasks.fetch import get

    say(f"fetched {get(name, data)}")


@data_app.command("convert")
def data_convert(
    name: Annotated[str, typer.Argument(help="wikitext-103, wiki40b, c4, iwslt, aan, flowers, pets, imagenet, …")],
    source: Annotated[Path, typer.Argument(help="file or folder as its makers distribute it")],
    data: DataFolder = Path("data"),
) -> None:
    """Convert a data set from its makers' layout to the one that the tasks read."""
    from ..tasks.convert import convert

    say(f"converted to {convert(name, source, data)}")
