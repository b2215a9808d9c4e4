"""Timing for the GPU benchmarks: shared tensors, medians of calls and CUDA graph replays, host time and memory."""

from __future__ import annotations

import os
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

    guess = timed(5)[2]
    times = timed(max(5, min(200, int(budget_ms / max(guess, 1e-3)))))
    return times[len(times) // 2]


def eager_ms(fn: Callable[[], Any], rep: int = 80) -> float:
    """Median of plain calls, with a cold cache before each."""
    from triton.testing import do_bench

    return do_bench(fn, warmup=15, rep=rep, return_mode="median")


def host_ms(fn: Callable[[], Any], calls: int = 50, rounds: int = 5) -> float:
    """The time the CPU needs to queue one call: the median of several rounds, which differ by up to a factor of two."""
    found = []
    for _ in range(rounds):
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


def tensors(L: int) -> tuple[list[Tensor], Tensor]:
    """q, k, v in the layout of a projection, (B, L, H, D) in memory, and a gradient for the output."""
    B = max(1, TOKENS // L)
    made = [torch.randn(B, L, H, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(4)]
    return [x.requires_grad_() for x in made[:3]], made[3]


def sdpa(backend: SDPBackend, causal: bool) -> Callable[..., Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return attention


def about(module: str) -> dict[str, Any]:
    """What a file of results starts with."""
    arguments = list(sys.argv[1:])
    if "--out" in arguments:
        at = arguments.index("--out")
        del arguments[at : at + 2]
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": commit(),
        "command": " ".join([f"python3 -m benchmarks.{module}", *(f"'{x}'" if " " in x else x for x in arguments)]),
    }


def commit() -> str:
    """The commit of the code; outside a repository, $WEFT_COMMIT."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or os.environ.get("WEFT_COMMIT", "unknown")


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
