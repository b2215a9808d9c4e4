"""What the stories of the digits read from a run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..lab import load_run
from ..lab.report import read_run, smooth
from ..pages import Curve, Part, chart


def latency(model: nn.Module, ids: torch.Tensor, repeats: int = 50) -> float:
    """Median milliseconds for one image on one thread, after a warm-up."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    times = []
    with torch.inference_mode():
        for turn in range(repeats + 10):
            started = time.perf_counter()
            model(ids)
            if turn >= 10:
                times.append(time.perf_counter() - started)
    torch.set_num_threads(threads)
    return 1000 * sorted(times)[len(times) // 2]


def row(name: str, folder: Path) -> list[str]:
    """Model, shape, accuracy, parameters and latency."""
    run = read_run(folder)
    model, _, data = load_run(folder)
    accuracy, count = 100 * run["result"]["test"]["accuracy"], run["result"]["parameters"]
    took = latency(model, data.test["ids"][:1].long())
    return [name, run["shape"], f"{accuracy:.1f}", f"{count:,}", f"{took:.2f}"]


HEAD = ["model", "layers × heads", "test accuracy, %", "parameters", "latency, ms"]


def charts(runs: dict[str, Path], marks: dict[str, Any] | None = None) -> list[Part]:
    found = {name: read_run(folder) for name, folder in runs.items()}
    losses = [Curve(name, smooth(run["losses"]), (marks or {}).get(name, [])) for name, run in found.items()]
    scores = [Curve(name, [(x, 100 * y) for x, y in run["val"]]) for name, run in found.items()]
    return [chart("Training loss", losses, y="loss"), chart("Validation accuracy", scores, y="accuracy, %")]
