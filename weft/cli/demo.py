"""The command `weft demo`: a deep and a wide model on handwritten digits, one of them killed and resumed.

Three runs of the lab go on at once, each its own process: a wide model, a deep one, and the deep one again, which is
killed (SIGKILL) in the middle and started anew. It must come out the same to the last bit as the one left in peace.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

PRESETS = {"deep": "deep", "deep, killed": "deep", "wide": "wide"}


def demo(
    out: Annotated[Path, typer.Option(help="where the runs and the page go; emptied first")] = Path("runs/demo"),
    steps: Annotated[int, typer.Option(min=20, help="updates of each model")] = 300,
    seed: Annotated[int, typer.Option(help="of the weights and the order of the images")] = 0,
) -> None:
    """Train a deep and a wide model on handwritten digits, kill and resume one of them, compare, write a page."""
    from rich.console import Console
    from rich.table import Table

    from ..lab.checkpoint import Checkpoints
    from ..lab.report import Curve, chart, origin, page, read_run, smooth
    from ..lab.say import say

    console = Console()
    began = time.perf_counter()
    _empty(out)
    console.print(f"[bold]weft demo[/]: three runs of {steps} steps, side by side")
    folders = {name: out / name.replace(", ", "-") for name in PRESETS}
    processes = {name: _start(folder, PRESETS[name], steps, seed) for name, folder in folders.items()}
    victim = folders["deep, killed"]
    killed_at = _kill_half_way(processes["deep, killed"], victim, steps)
    resumed_at = max(Checkpoints(victim / "checkpoints").steps(), default=0)
    console.print(
        f"killed the second deep run after step {killed_at}; it resumes from its checkpoint of step {resumed_at}"
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
        f"Killed after step {killed_at} and resumed from step {resumed_at}: {equal} of {len(whole)} losses are equal, "
        "to the last bit, to those of the run left in peace."
    )
    console.print(verdict)

    curves = [Curve(name, smooth(run["losses"])) for name, run in runs.items()]
    curves[1].marks = [(killed_at, "killed")]
    charts = [chart(curves, "training loss by step")]
    charts.append(chart([Curve(n, run["val"]) for n, run in runs.items()], "validation accuracy by step"))
    footer = origin(runs["deep"]["environment"])
    (out / "report.html").write_text(
        page("weft demo: deep, wide, and killed in between", verdict, rows, charts, footer)
    )
    say(f"The page: {out / 'report.html'}   ({time.perf_counter() - began:.0f} s in all)")
    if equal != len(whole):
        raise typer.Exit(1)


def _empty(out: Path) -> None:
    """Remove an earlier demo, and nothing else."""
    if out.exists() and any(out.iterdir()) and not (out / "deep").exists():
        raise typer.BadParameter(f"{out} holds something that is no earlier demo: choose another --out")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)


def _start(folder: Path, preset: str, steps: int, seed: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "weft.cli", "train", "digits", "--resume", f"--preset={preset}", f"--out={folder}"]
    options = [f"--steps={steps}", f"--seed={seed}", "--accelerator=cpu", "--log-every=5", "--checkpoint-every=20"]
    # One thread each: the models are too small to share, and the three have two cores between them.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(folder.with_suffix(".log"), "ab") as log:
        return subprocess.Popen([*command, *options], stdout=log, stderr=log, env=environment)


def _kill_half_way(process: subprocess.Popen[bytes], folder: Path, steps: int) -> int:
    """SIGKILL as soon as half of the steps are in the log; the step it came after."""
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


@torch.inference_mode()
def latency(model: nn.Module, ids: torch.Tensor, repeats: int = 50) -> float:
    """Median milliseconds for one image on one thread, after a warm-up."""
    torch.set_num_threads(1)
    times = []
    for turn in range(repeats + 10):
        started = time.perf_counter()
        model(ids)
        if turn >= 10:
            times.append(time.perf_counter() - started)
    return 1000 * sorted(times)[len(times) // 2]
