"""The command `weft demo`: a deep and a wide model on handwritten digits, one of them killed and resumed.

Three runs train at the same time, each in its own process: a wide model, a deep one, and the deep one again, which is
killed (SIGKILL) halfway and resumed. Its losses must be bit-identical to those of the uninterrupted run.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch
    from torch import nn

PRESETS = {"deep": "deep", "deep, killed": "deep", "wide": "wide"}


def demo(
    out: Annotated[Path, typer.Option(help="output folder; an earlier demo in it is removed")] = Path("runs/demo"),
    steps: Annotated[int, typer.Option(min=20, help="training steps of each model")] = 300,
    seed: Annotated[int, typer.Option(help="seed of weights and data order")] = 0,
) -> None:
    """Train a deep and a wide model on handwritten digits, kill and resume one of them, and compare the results."""
    from rich.console import Console
    from rich.table import Table

    from ..lab.checkpoint import Checkpoints
    from ..lab.report import origin, read_run, smooth
    from ..lab.say import say
    from ..pages import Curve, chart, page
    from ..pages import table as page_table

    console = Console()
    began = time.perf_counter()
    _empty(out)
    console.print(f"[bold]weft demo[/]: three runs of {steps} steps at the same time")
    folders = {name: out / name.replace(", ", "-") for name in PRESETS}
    processes = {name: _start(folder, PRESETS[name], steps, seed) for name, folder in folders.items()}
    victim = folders["deep, killed"]
    killed_at = _kill_half_way(processes["deep, killed"], victim, steps)
    resumed_at = max(Checkpoints(victim / "checkpoints").steps(), default=0)
    console.print(
        f"killed the second deep run after step {killed_at}; resuming from its checkpoint of step {resumed_at}"
    )
    processes["deep, killed"] = _start(victim, "deep", steps, seed)
    for name, process in processes.items():
        _watch(console, name, process, folders[name], steps)

    runs = {name: read_run(folder) for name, folder in folders.items()}
    whole, mended = runs["deep"]["losses"], runs["deep, killed"]["losses"]
    equal = sum(a == b for a, b in zip(whole, mended, strict=True))
    rows = [_row(name, runs[name], folders[name]) for name in PRESETS]
    table = Table(*rows[0], title="Handwritten digits: a deep model and a single wide layer", title_justify="left")
    for row in rows:
        table.add_row(*row.values())
    console.print(table)
    verdict = (
        f"Killed after step {killed_at} and resumed from step {resumed_at}: {equal} of {len(whole)} losses are "
        "bit-identical to those of the uninterrupted run."
    )
    console.print(verdict)

    curves = [Curve(name, smooth(run["losses"])) for name, run in runs.items()]
    curves[1].marks = [(killed_at, "killed")]
    scores = [Curve(name, [(x, 100 * y) for x, y in run["val"]]) for name, run in runs.items()]
    parts = [
        page_table(list(rows[0]), [list(row.values()) for row in rows], "Results"),
        chart("Training loss", curves, y="loss"),
        chart("Validation accuracy", scores, y="accuracy, %"),
    ]
    title, footer = "weft demo: deep, wide, and killed and resumed", origin(runs["deep"]["environment"])
    (out / "report.html").write_text(page(title, parts, lead=verdict, footer=footer), encoding="utf-8")
    say(f"report: {out / 'report.html'}   ({time.perf_counter() - began:.0f} s in total)")
    if equal != len(whole):
        raise typer.Exit(1)


def _empty(out: Path) -> None:
    """Remove an earlier demo; any other content raises an error."""
    if out.exists() and any(out.iterdir()) and not (out / "deep").exists():
        raise typer.BadParameter(f"{out} contains files that are not from an earlier demo: choose another --out")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)


def _start(folder: Path, preset: str, steps: int, seed: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "weft.cli", "train", "digits", "--resume", f"--preset={preset}", f"--out={folder}"]
    options = [f"--steps={steps}", f"--seed={seed}", "--accelerator=cpu", "--log-every=5", "--checkpoint-every=20"]
    # One thread each: the models are too small to benefit from more.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(folder.with_suffix(".log"), "ab") as log:
        return subprocess.Popen([*command, *options], stdout=log, stderr=log, env=environment)


def _kill_half_way(process: subprocess.Popen[bytes], folder: Path, steps: int) -> int:
    """Kill the process when half of the steps are in the log, and return the number of logged steps."""
    while process.poll() is None and _steps_done(folder) < steps // 2:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return _steps_done(folder)


def _steps_done(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return metrics.read_bytes().count(b'"kind": "train"') if metrics.exists() else 0


def _watch(console: Any, name: str, process: subprocess.Popen[bytes], folder: Path, steps: int) -> None:
    with console.status(f"{name} …") as status:
        while process.poll() is None:
            status.update(f"{name}: step {_steps_done(folder)} of {steps}")
            time.sleep(0.1)
    if process.returncode:
        console.print(folder.with_suffix(".log").read_text()[-2000:], markup=False)
        raise typer.Exit(process.returncode)


def _row(name: str, run: dict[str, Any], folder: Path) -> dict[str, str]:
    from ..lab import load_run

    result = run["result"]
    model, _, data = load_run(folder)
    return {
        "model": name,
        "layers x heads": run["shape"],
        "test accuracy, %": f"{100 * result['test']['accuracy']:.1f}",
        "best step": str(result["best_step"]),
        "parameters": f"{result['parameters']:,}",
        "latency, ms": f"{latency(model, data.test['ids'][:1].long()):.2f}",
    }


def latency(model: nn.Module, ids: torch.Tensor, repeats: int = 50) -> float:
    """Median milliseconds for one image on one thread, after a warm-up."""
    import torch

    torch.set_num_threads(1)
    times = []
    with torch.inference_mode():
        for turn in range(repeats + 10):
            started = time.perf_counter()
            model(ids)
            if turn >= 10:
                times.append(time.perf_counter() - started)
    return 1000 * sorted(times)[len(times) // 2]
