"""Time and memory of attention on the GPU: medians, with the same tensors for all mechanisms.

    python3 -m benchmarks.gpu_attention [--out FILE.json] [--lengths 256 16384 ...] [--only NAME ...] [--profile]

bfloat16, 16 heads of 64, causal and in both directions, 16,384 tokens per batch (one sequence where L is longer), every
mechanism that has a kernel, against PyTorch's cuDNN attention and FlashAttention. "eager" is the time of a plain call,
"host" the time the CPU needs to queue a forward and a backward, "graph" the replay of a CUDA graph, which is the time
of the kernels. --compiled adds the same call in torch.compile, --profile prints each kernel's time, and --plain adds
the plain versions at up to 4,096 tokens. Kernels are compiled first, in a process per mechanism.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import weft  # noqa: E402
from benchmarks.gpu_timing import ROOT, D, H, commit, host_ms, median_ms, median_of, peak_mib, sdpa, tensors  # noqa: E402
from weft.core.partitions import default_block  # noqa: E402

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
OPTIONS: dict[str, dict[str, Any]] = {"subsampled": {"windows": 4}}
BOTH_WAYS = ("combiner-fixed", "combiner-axial", "subsampled", "local")  # also timed without the causal mask


def made(name: str, causal: bool, backend: str, **options: Any) -> Callable[..., Tensor]:
    return weft.make_attention(
        name, heads=H, head_dim=D, causal=causal, backend=backend, **OPTIONS.get(name, {}), **options
    ).cuda()


def contestants(L: int, causal: bool, only: list[str], with_plain: bool) -> dict[str, Callable[[], Callable]]:
    """By name, how to make each attention."""
    chosen: dict[str, Callable[[], Callable]] = {
        "cudnn": lambda: sdpa(SDPBackend.CUDNN_ATTENTION, causal),
        "flash": lambda: sdpa(SDPBackend.FLASH_ATTENTION, causal),
    }
    for name in only:
        if not causal and name not in BOTH_WAYS:
            continue
        if name == "combiner-fixed":
            best = default_block(L, None)
            for m in sorted({best // 2, best, best * 2} if L >= 16384 else {best, 128}):
                if m <= L:
                    label = f"{name} m={m}{' (default)' if m == best else ''}"
                    chosen[label] = lambda name=name, m=m: made(name, causal, "triton", block_size=m)
        else:
            chosen[name] = lambda name=name: made(name, causal, "triton")
        if name == "sparse":
            chosen["sparse, strided"] = lambda: made("sparse", causal, "triton", pattern="strided")
            if with_plain and L <= 4096:
                chosen["sparse, strided, plain"] = lambda: made("sparse", causal, "torch", pattern="strided")
        if with_plain and L <= 4096:
            chosen[f"{name}, plain"] = lambda name=name: made(name, causal, "torch")
    if causal and "linear" in only:
        chosen["linear, published chunked form"] = lambda: reference("chunked_linear")
        chosen["... its scan alone"] = lambda: reference("chunked_scan")
    return chosen


def reference(name: str) -> Callable[..., Tensor]:
    from benchmarks import linear_reference

    return getattr(linear_reference, name)


def compare(
    lengths: list[int], causal: bool, only: list[str], with_plain: bool, with_compiled: bool
) -> list[dict[str, Any]]:
    rows = []
    print(f"{'causal' if causal else 'both directions'}")
    print(f"{'':41} {'eager':>18} {'x cuDNN':>17} {'host':>9} {'graph':>18}")
    columns = ["forward", "fwd+bwd", "forward", "fwd+bwd", "fwd+bwd", "forward", "fwd+bwd", "MiB"]
    print(f"{'L':>6} {'what':<34} " + " ".join(f"{name:>{8 if i in (2, 3) else 9}}" for i, name in enumerate(columns)))
    for L in lengths:
        if causal and "linear" in only:
            from benchmarks.linear_reference import tune_walk

            tune_walk(L)
        base: dict[str, float] = {}
        for name, make in contestants(L, causal, only, with_plain).items():
            try:
                fn = make()
                row: dict[str, Any] = {"L": L, "causal": causal, "name": name, **measure(fn, L)}
                if with_compiled and isinstance(fn, torch.nn.Module):
                    torch.compiler.reset()
                    row |= in_compiled(torch.compile(fn, dynamic=False), L)
            except Exception as error:  # continue with the other mechanisms
                print(f"{L:>6} {name:<34} {type(error).__name__}: {str(error)[:160]}", flush=True)
                torch.cuda.synchronize()
                continue
            if name == "cudnn":
                base = row
            ratio = [base[k] / row[k] if base else float("nan") for k in ("eager_forward_ms", "eager_both_ms")]
            rows.append(row)
            print(
                f"{L:>6} {name:<34} {row['eager_forward_ms']:9.4f} {row['eager_both_ms']:9.4f} "
                f"{ratio[0]:8.2f} {ratio[1]:8.2f} {row['host_ms']:9.4f} "
                f"{row['forward_ms']:9.4f} {row['both_ms']:9.4f} {row['peak_mib']:9.0f} "
                + " ".join(f"{row[key]:9.4f}" for key in row if key.startswith("compiled")),
                flush=True,
            )
    return rows


def warm_up(args: argparse.Namespace) -> None:
    """Fill Triton's cache: a process per mechanism runs each of its calls once."""
    began = time.time()
    base = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_attention", "--once", "--lengths"]
    base += [str(L) for L in args.lengths]
    jobs = [
        subprocess.Popen([*base, "--only", name], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for name in args.only
    ]
    for job in jobs:
        job.wait()
    print(f"compiled in {time.time() - began:.0f} s", flush=True)


def run_once(lengths: list[int], only: list[str]) -> None:
    for causal in (True, False):
        for L in lengths:
            for make in list(contestants(L, causal, only, False).values())[2:]:
                with contextlib.suppress(Exception):  # the real run reports the error
                    inputs, dout = tensors(L)
                    fn = make()
                    with torch.no_grad():
                        fn(*inputs)
                    torch.autograd.grad(fn(*inputs), inputs, dout, allow_unused=True)


def measure(fn: Callable[..., Tensor], L: int) -> dict[str, float]:
    inputs, dout = tensors(L)

    def forward() -> Any:
        with torch.no_grad():
            return fn(*inputs)

    def both() -> Any:
        return torch.autograd.grad(fn(*inputs), inputs, dout, allow_unused=True)

    return {
        "eager_forward_ms": median_of(forward, 100),
        "eager_both_ms": median_of(both, 100),
        "host_ms": host_ms(both),
        "forward_ms": median_ms(forward),
        "both_ms": median_ms(both),
        "peak_mib": peak_mib(both),
    }


def in_compiled(fn: Callable[..., Tensor], L: int) -> dict[str, float]:
    inputs, dout = tensors(L)

    def both() -> Any:
        return torch.autograd.grad(fn(*inputs), inputs, dout, allow_unused=True)

    return {"compiled_both_ms": median_of(both, 100), "compiled_host_ms": host_ms(both)}


def crossovers(rows: list[dict[str, Any]], only: list[str]) -> dict[str, dict[str, int | None]]:
    """By mechanism, the shortest length from which its eager call beats both full attentions at every longer length."""
    found: dict[str, dict[str, int | None]] = {}
    for name in only:
        for key in ("eager_forward_ms", "eager_both_ms"):
            first = None
            for L in sorted({r["L"] for r in rows}, reverse=True):
                here = [r for r in rows if r["L"] == L and r["causal"]]
                mine = [r[key] for r in here if r["name"].split(" m=")[0] == name]
                others = [r[key] for r in here if r["name"] in ("cudnn", "flash")]
                if not mine or not others or min(mine) > min(others):
                    break
                first = L
            found.setdefault(name, {})[key] = first
    return found


def profile(name: str, L: int) -> dict[str, float]:
    """Microseconds of each kernel, from PyTorch's profiler."""
    inputs, dout = tensors(L)
    fn = made(name, True, "triton")
    for _ in range(3):
        torch.autograd.grad(fn(*inputs), inputs, dout)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(10):
            torch.autograd.grad(fn(*inputs), inputs, dout)
        torch.cuda.synchronize()
    times = {e.key: e.self_device_time_total / 10 for e in seen.key_averages() if e.self_device_time_total > 0}
    for kernel, us in sorted(times.items(), key=lambda x: -x[1])[:10]:
        print(f"profile {name} {L} {us:8.1f} us  {kernel[:60]}", flush=True)
    return times


def main() -> None:
    with_kernels = [name for name in weft.attentions() if "triton" in weft.attention_info(name).backends]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="write the results to this JSON file")
    parser.add_argument("--lengths", type=int, nargs="*", default=list(LENGTHS))
    parser.add_argument("--only", nargs="*", default=with_kernels, help="these mechanisms")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--commit", default=None, help="commit to record, if git is not available")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        run_once(args.lengths, args.only)
        return
    warm_up(args)
    torch.manual_seed(int(time.time()))
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": args.commit or commit(),
        "command": " ".join(["python3 -m benchmarks.gpu_attention", *sys.argv[1:]]),
    }
    rows = compare(args.lengths, True, args.only, args.plain, args.compiled)
    rows += compare([L for L in args.lengths if L >= 4096], False, args.only, args.plain, args.compiled)
    report["rows"] = rows
    if args.profile:
        names = [name for name in args.only if name in with_kernels]
        report["profile"] = {f"{name} {L}": profile(name, L) for name in names for L in (16384, 65536)}
    report["crossovers"] = crossovers(rows, args.only)
    for name, found in report["crossovers"].items():
        print(f"crossover {name}: forward L = {found['eager_forward_ms']}, both L = {found['eager_both_ms']}")
    print(f"{report['gpu']}, torch {report['torch']}, commit {report['commit']}")
    if args.out:
        args.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
