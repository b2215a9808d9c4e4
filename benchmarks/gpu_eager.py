"""What a user gets on a GPU: plain eager calls of every mechanism, against cuDNN's full attention in the same process.

    python3 -m benchmarks.gpu_eager [--out benchmarks/results/gpu_eager.json] [--lengths 512 ...] [--only NAME ...]

bfloat16, 16 heads of 64, 16,384 tokens per batch (one sequence where L is longer), backend="auto" (and "triton" for
kernels that "auto" does not use yet), causal where the mechanism can be. "eager" is triton.testing.do_bench's median of
plain calls, "host" the time the CPU needs to queue one forward and backward, "graph" the replay of a CUDA graph,
"first" the seconds of the first forward and backward in a process with an empty Triton cache.
`python -m benchmarks.tables` writes the tables of the documentation.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend
from triton.testing import do_bench

import weft
from benchmarks.gpu_timing import ROOT, D, H, commit, host_ms, median_ms, peak_mib, sdpa, tensors

LENGTHS = (16384, 512, 1024, 2048, 4096, 8192, 65536)
OPTIONS: dict[str, dict[str, Any]] = {"subsampled": {"windows": 4}}
TOO_LONG = {"synthesizer": 8192}  # a parameter per pair of positions


def make(name: str, L: int) -> Any:
    """The mechanism; "NAME, triton" for that backend."""
    name, _, backend = name.partition(", ")
    info = weft.attention_info(name)
    settings = {"causal": info.causal, "max_length": L if info.needs_max_length else None, **OPTIONS.get(name, {})}
    attn = weft.make_attention(name, heads=H, head_dim=D, backend=backend or "auto", **settings)
    return attn.to("cuda", torch.bfloat16)


def contestants(names: list[str]) -> list[str]:
    found = []
    for name in names:
        kernel = weft.attention_info(name).kernel
        found.append(name)
        if kernel is not None and not kernel.auto(make(name, 512)):
            found.append(f"{name}, triton")
    return found


def compiles(name: str) -> bool:
    kernel = weft.attention_info(name.split(",")[0]).kernel
    return kernel is not None and ("," in name or kernel.auto(make(name, 512)))


def calls(fn: Any, L: int) -> tuple[Any, Any]:
    inputs, dout = tensors(L)

    def forward() -> Any:
        with torch.no_grad():
            return fn(*inputs)

    return forward, lambda: torch.autograd.grad(fn(*inputs), inputs, dout, allow_unused=True)


def measure(fn: Any, L: int) -> dict[str, float]:
    forward, both = calls(fn, L)
    found = {
        "eager_forward_ms": do_bench(forward, warmup=15, rep=60, return_mode="median"),
        "eager_both_ms": do_bench(both, warmup=15, rep=80, return_mode="median"),
        "host_ms": host_ms(both),
        "peak_mib": peak_mib(both),
    }
    try:
        found["both_ms"] = median_ms(both, 40)
    except Exception:  # samples and other work on the CPU cannot be captured
        torch.cuda.synchronize()
    return found


def first_call(name: str, lengths: list[int]) -> None:
    """Print the seconds of the first call, then fill Triton's cache for all lengths."""
    torch.zeros(1, device="cuda")
    began = time.perf_counter()
    forward, both = calls(make(name, 2048), 2048)
    both()
    torch.cuda.synchronize()
    print(time.perf_counter() - began, flush=True)
    for L in lengths:
        if L <= TOO_LONG.get(name, L):
            forward, both = calls(make(name, L), L)
            forward()
            both()


def warm_up(names: list[str], lengths: list[int], at_once: int) -> dict[str, float]:
    """By mechanism, seconds of the first call. A process per mechanism fills a new Triton cache."""
    os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp())
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_eager", "--lengths", *map(str, lengths), "--first"]
    waiting, running, seconds = list(names), {}, {}
    while waiting or running:
        while waiting and len(running) < at_once:
            name = waiting.pop(0)
            running[name] = subprocess.Popen(
                [*command, name], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        done = [name for name, job in running.items() if job.poll() is not None]
        for name in done:
            lines = running.pop(name).stdout.read().split()
            seconds |= {name: float(lines[0])} if lines else {}
        time.sleep(0.1)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="write the results to this JSON file")
    parser.add_argument("--lengths", type=int, nargs="*", default=list(LENGTHS))
    parser.add_argument("--only", nargs="*", default=weft.attentions(), help="these mechanisms")
    parser.add_argument("--commit", default=None, help="commit to record, if git is not available")
    parser.add_argument("--at-once", type=int, default=8, help="processes that compile at the same time")
    parser.add_argument("--first", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.first:
        return first_call(args.first, args.lengths)
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": args.commit or commit(),
        "command": "python3 -m benchmarks.gpu_eager",
        "shape": "bfloat16, 16 heads of 64, 16,384 tokens per batch",
        "first_call_s": warm_up([x for x in contestants(args.only) if compiles(x)], args.lengths, args.at_once),
        "at_once": args.at_once,
        "rows": [],
    }
    for L in args.lengths:
        names = [name for name in contestants(args.only) if name != "full" and L <= TOO_LONG.get(name, L)]
        for name in ["cudnn", "cudnn, bidirectional", *names]:
            full = name.startswith("cudnn")
            causal = name == "cudnn" if full else weft.attention_info(name.split(",")[0]).causal
            try:
                fn = sdpa(SDPBackend.CUDNN_ATTENTION, causal) if full else make(name, L)
                times = {key: round(value, 4) for key, value in measure(fn, L).items()}
            except Exception as error:  # continue with the other mechanisms
                print(f"{L:>6} {name:<26} {type(error).__name__}: {str(error)[:120]}", flush=True)
                torch.cuda.synchronize()
                continue
            report["rows"].append({"L": L, "causal": causal, "name": "cudnn" if full else name, **times})
            print(f"{L:>6} {name:<26} " + " ".join(f"{value:8.3f}" for value in times.values()), flush=True)
            if args.out:  # kept if the run is stopped
                args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
