"""Timing for the GPU benchmarks: shared tensors, medians of calls and CUDA graph replays, host time and memory."""

from __future__ import annotations

import functools
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from weft.lab.run import commit

ROOT = Path(__file__).resolve().parents[1]
TOKENS, H, D = 16384, 16, 64


def median_ms(fn: Callable[[], Any], budget_ms: float = 150.0) -> float:
    """Median time of CUDA graph replays, without launch gaps."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_sync_debug_mode("error")  # a capture that fails would leave PyTorch's generator unusable
    try:
        with torch.cuda.stream(stream):
            for _ in range(3):
                fn()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    return median_of(graph.replay, budget_ms)


def median_of(fn: Callable[[], Any], budget_ms: float) -> float:
    """Median time of a call; if the CPU is slower than the GPU, the time to queue it."""

    def timed(repeats: int) -> list[float]:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        marks[0].record()
        for mark in marks[1:]:
            fn()
            mark.record()
        torch.cuda.synchronize()
        return sorted(a.elapsed_time(b) for a, b in zip(marks[:-1], marks[1:], strict=True))

    guess = timed(3)[1]
    times = timed(max(3, min(200, int(budget_ms / max(guess, 1e-3)))))
    return times[len(times) // 2]


def eager_ms(fn: Callable[[], Any], rep: int = 80) -> float:
    """Median of plain calls, with a cold cache before each; of more calls where they differ."""
    from triton.testing import do_bench

    times = do_bench(fn, warmup=5, rep=rep // 4, return_mode="all")
    low, middle, high = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
    if high - low > 0.02 * middle and middle < 50:
        times += do_bench(fn, warmup=5, rep=rep, return_mode="all")
    return statistics.median(times)


def host_ms(fn: Callable[[], Any], takes_ms: float, rounds: int = 5) -> float:
    """The time the CPU needs to queue one call: the median of several rounds, which differ by up to a factor of two.
    `takes_ms` is the time of a call: slow ones are repeated less often."""
    found, calls = [], 25 if takes_ms < 5 else 3
    for _ in range(rounds if takes_ms < 20 else 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        found.append((time.perf_counter() - start) / calls * 1e3)
    torch.cuda.synchronize()
    return statistics.median(found)


def peak_mib(fn: Callable[[], Any]) -> float:
    """Peak memory that one eager call adds."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fn()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


@functools.cache
def generator() -> torch.Generator:
    """For inputs. After "reduce-overhead", PyTorch's own was left in its capturing state and raised (torch 2.11)."""
    return torch.Generator("cuda").manual_seed(0)


def tensors(L: int) -> tuple[list[Tensor], Tensor]:
    """q, k, v in the layout of a projection, (B, L, H, D) in memory, and a gradient for the output."""
    shape, options = (max(1, TOKENS // L), L, H, D), {"device": "cuda", "dtype": torch.bfloat16}
    made = [torch.randn(shape, generator=generator(), **options).transpose(1, 2) for _ in range(4)]
    return [x.requires_grad_() for x in made[:3]], made[3]


def sdpa(backend: SDPBackend, causal: bool) -> Callable[..., Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return attention


def about(module: str) -> dict[str, Any]:
    """What a file of results starts with."""
    arguments = list(sys.argv[1:])
    for option in ("--out", "--when"):
        if option in arguments:
            at = arguments.index(option)
            del arguments[at : at + 2]
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": commit(),
        "command": " ".join([f"python3 -m benchmarks.{module}", *(f"'{x}'" if " " in x else x for x in arguments)]),
    }


class Results:
    """A file with runs, newest first. Each has the commit, GPU and command, and lists of rows by kind.

    With `resume`, the newest run is continued if it is of the same commit, GPU and torch. The file is written after
    every row, so that a run which is stopped keeps what it measured.
    """

    def __init__(self, path: Path | None, module: str, resume: bool, **more: Any):
        self.path, self.run = path, about(module) | more
        self.runs = json.loads(path.read_text())["runs"] if path is not None and path.exists() else []
        same = ("gpu", "torch", "commit")
        if resume and self.runs and all(self.runs[0][key] == self.run[key] for key in same):
            self.run = self.runs[0]
        else:
            self.runs.insert(0, self.run)

    def has(self, kind: str, **row: Any) -> bool:
        return any(row.items() <= other.items() for other in self.run.get(kind, []))

    def add(self, kind: str, row: dict[str, Any]) -> None:
        self.run.setdefault(kind, []).append(row)
        self.save()

    def save(self) -> None:
        if self.path is not None:
            self.path.write_text(json.dumps({"runs": self.runs}, indent=1) + "\n")


def wait_for(path: Path | None) -> None:
    """Wait until the file exists: kernels can be compiled beside other work, but times need the GPU alone."""
    gc.collect()
    gc.freeze()  # no collection of what the warm-up left, while times are taken
    torch.cuda.empty_cache()
    if path is not None:
        print(f"ready; waiting for {path}", flush=True)
        while not path.exists():
            time.sleep(0.05)


def in_parallel(module: str, jobs: list[list[str]], at_once: int) -> Iterator[tuple[list[str], str]]:
    """Run `python3 -m benchmarks.MODULE ARGUMENTS` for every job and yield what it printed."""
    waiting, running = list(jobs), []
    while waiting or running:
        while waiting and len(running) < at_once:
            job = waiting.pop(0)
            command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.{module}", *job]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            running.append((job, subprocess.Popen(command, cwd=ROOT, text=True, **pipes)))
        for job, process in [pair for pair in running if pair[1].poll() is not None]:
            running.remove((job, process))
            yield job, process.stdout.read()
        time.sleep(0.1)
