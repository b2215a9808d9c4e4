"""Milliseconds and memory of attention on the GPU, one run, the same tensors for all, medians of CUDA graph replays.

    python3 -m benchmarks.gpu_attention [--out FILE.json] [--lengths 256 16384 ...] [--tune] [--profile] [--plain]

bfloat16, 16 heads of 64, causal, 16,384 tokens per batch (one sequence where L is longer). Against PyTorch's cuDNN
attention and FlashAttention. --tune tries other tile sizes for each kernel at 16,384 and 65,536 and prints the best;
--profile prints each kernel's own time; --plain adds the plain versions, compiled.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from weft.attention.partitions import default_block  # noqa: E402
from weft.kernels import combiner_fixed as kernels  # noqa: E402
from weft.kernels.combiner_fixed import combiner_fixed  # noqa: E402
from weft.kernels.launch import Tiles  # noqa: E402

TOKENS, H, D = 16384, 16, 64
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)

TRIALS = {
    "summarise": [
        Tiles(128, 0, 4, 1),
        Tiles(64, 0, 4, 1),
        Tiles(128, 0, 8, 1),
        Tiles(256, 0, 8, 1),
        Tiles(256, 0, 16, 1),
        Tiles(64, 0, 2, 1),
    ],
    "summarise and keep": [
        Tiles(128, 0, 8, 1),
        Tiles(128, 0, 4, 1),
        Tiles(128, 0, 4, 1, 168),
        Tiles(64, 0, 4, 1),
        Tiles(64, 0, 8, 1),
        Tiles(256, 0, 16, 1),
    ],
    "attend": [
        Tiles(64, 32, 4, 3),
        Tiles(64, 32, 4, 2),
        Tiles(64, 32, 4, 4),
        Tiles(64, 32, 4, 3, 80),
        Tiles(64, 32, 4, 2, 72),
        Tiles(64, 64, 4, 2),
        Tiles(64, 64, 4, 3),
        Tiles(64, 64, 4, 2, 104),
        Tiles(128, 32, 4, 3),
        Tiles(128, 32, 8, 3),
        Tiles(128, 64, 8, 2),
        Tiles(64, 16, 4, 4),
    ],
    "span gradients": [
        Tiles(32, 64, 4, 3),
        Tiles(32, 64, 4, 2),
        Tiles(32, 64, 4, 4),
        Tiles(64, 64, 4, 3),
        Tiles(64, 64, 4, 2),
        Tiles(64, 64, 4, 3, 168),
        Tiles(32, 128, 8, 3),
        Tiles(64, 128, 8, 3),
    ],
    "key gradients": [
        Tiles(32, 64, 4, 3),
        Tiles(32, 64, 4, 2),
        Tiles(32, 64, 4, 1),
        Tiles(32, 64, 4, 2, 128),
        Tiles(64, 64, 4, 2),
        Tiles(64, 64, 4, 1),
        Tiles(64, 64, 4, 2, 168),
        Tiles(64, 128, 8, 2),
        Tiles(32, 128, 8, 2),
    ],
    "query gradients": [
        Tiles(64, 32, 4, 3),
        Tiles(64, 32, 4, 2),
        Tiles(64, 32, 4, 4),
        Tiles(64, 32, 4, 3, 80),
        Tiles(64, 64, 4, 2),
        Tiles(64, 64, 4, 1),
        Tiles(128, 32, 8, 3),
        Tiles(128, 64, 8, 2),
        Tiles(64, 16, 4, 4),
    ],
}


def median_ms(fn: Callable[[], Any], budget_ms: float = 150.0) -> float:
    """Median time of a CUDA graph's replays: no launch gaps in it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            fn()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    return median_of(graph.replay, budget_ms)


def median_of(fn: Callable[[], Any], budget_ms: float) -> float:
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


def peak_mib(fn: Callable[[], Any]) -> float:
    """What one eager call adds to the memory in use, at most."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fn()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def tensors(L: int) -> tuple[list[Tensor], Tensor]:
    """q, k, v as a projection leaves them, (B, L, H, D) in memory, and a gradient for the output."""
    B = max(1, TOKENS // L)
    made = [torch.randn(B, L, H, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(4)]
    return [x.requires_grad_() for x in made[:3]], made[3]


def sdpa(backend: SDPBackend) -> Callable[..., Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attention


def fused(block_size: int) -> Callable[..., Tensor]:
    return lambda q, k, v: combiner_fixed(q, k, v, None, block_size=block_size, pool="max", causal=True)


def plain(block_size: int) -> Callable[..., Tensor]:
    import weft

    attn = weft.make_attention(
        "combiner-fixed", heads=H, head_dim=D, causal=True, block_size=block_size, backend="torch"
    )
    return torch.compile(attn, dynamic=False)


def contestants(L: int, with_plain: bool) -> dict[str, Callable[..., Tensor]]:
    chosen: dict[str, Callable[..., Tensor]] = {
        "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
        "flash": sdpa(SDPBackend.FLASH_ATTENTION),
    }
    best = default_block(L, None)
    for block in sorted({best // 2, best, best * 2} if L >= 16384 else {best, 128}):
        if block <= L:
            chosen[f"combiner-fixed m={block}{' (default)' if block == best else ''}"] = fused(block)
    if with_plain:
        chosen[f"plain m={best}"] = plain(best)
    return chosen


def compare(lengths: list[int], with_plain: bool) -> list[dict[str, Any]]:
    rows = []
    print(f"{'L':>6} {'what':<30} {'forward':>9} {'fwd+bwd':>9} {'x cuDNN':>8} {'x cuDNN':>8} {'MiB':>7}")
    for L in lengths:
        base: dict[str, float] = {}
        for name, fn in contestants(L, with_plain).items():
            inputs, dout = tensors(L)

            def forward(fn=fn, inputs=inputs) -> Any:
                with torch.no_grad():
                    return fn(*inputs)

            def both(fn=fn, inputs=inputs, dout=dout) -> Any:
                return torch.autograd.grad(fn(*inputs), inputs, dout)

            try:
                row = {"L": L, "name": name, "forward_ms": median_ms(forward), "both_ms": median_ms(both)}
                row["peak_mib"] = peak_mib(both)
            except Exception as error:  # one that cannot run must not hide the others
                print(f"{L:>6} {name:<30} {type(error).__name__}: {str(error)[:160]}", flush=True)
                torch.cuda.synchronize()
                continue
            if name == "cudnn":
                base = row
            ratio = [base[k] / row[k] if base else float("nan") for k in ("forward_ms", "both_ms")]
            rows.append(row)
            print(
                f"{L:>6} {name:<30} {row['forward_ms']:9.4f} {row['both_ms']:9.4f} {ratio[0]:8.2f} {ratio[1]:8.2f} "
                f"{row['peak_mib']:7.0f}",
                flush=True,
            )
    return rows


def crossover(rows: list[dict[str, Any]], key: str) -> int | None:
    """The least length from which on the kernel beats both full attentions at every length measured."""
    lengths = sorted({r["L"] for r in rows})
    first = None
    for L in reversed(lengths):
        mine = [r[key] for r in rows if r["L"] == L and r["name"].startswith("combiner")]
        others = [r[key] for r in rows if r["L"] == L and r["name"] in ("cudnn", "flash")]
        if not mine or not others or min(mine) > min(others):
            break
        first = L
    return first


def trial_call(kernel: str, L: int, block: int) -> Callable[[], Any]:
    """The operator that runs this kernel, without autograd around it: the whole forward, or the whole backward."""
    inputs, dout = tensors(L)
    q, k, v = (x.detach() for x in inputs)
    options = (block, "max", True)
    if kernel in ("summarise", "attend"):
        return lambda: torch.ops.weft.combiner_fixed(q, k, v, None, *options, False)
    if kernel == "summarise and keep":
        return lambda: torch.ops.weft.combiner_fixed(q, k, v, None, *options, True)
    saved = torch.ops.weft.combiner_fixed(q, k, v, None, *options, True)
    return lambda: torch.ops.weft.combiner_fixed_backward(dout, q, k, v, None, *saved, *options)


TUNED_SHAPES = ((16384, 128), (65536, 128), (65536, 256))


def tune(part: tuple[int, int] | None = None) -> list[dict[str, Any]]:
    """Time every trial; with `part`, only run the share i of n once, to fill Triton's cache from many processes."""
    results = []
    number = 0
    for L, block in TUNED_SHAPES:
        for kernel, trials in TRIALS.items():
            key = (kernel, 64, 2)
            usual = kernels.TILES[key]
            call = None
            for trial in trials:
                number += 1
                if part and number % part[1] != part[0]:
                    continue
                call = call or trial_call(kernel, L, block)
                kernels.TILES[key] = trial
                try:
                    if part:
                        call()
                        torch.cuda.synchronize()
                        continue
                    ms = median_ms(call, 30.0)
                    results.append({"L": L, "block": block, "kernel": kernel, "trial": trial.__dict__, "ms": ms})
                except Exception as error:
                    print(f"{L} m={block} {kernel} {trial}: {type(error).__name__} {str(error)[:100]}", flush=True)
                finally:
                    kernels.TILES[key] = usual
    return results


def compile_in_parallel(workers: int = 14) -> None:
    began = time.time()
    jobs = [
        subprocess.Popen([sys.executable, "-m", "benchmarks.gpu_attention", "--part", str(i), str(workers)], cwd=ROOT)
        for i in range(workers)
    ]
    for job in jobs:
        job.wait()
    print(f"compiled the trials in {time.time() - began:.0f} s", flush=True)


def print_best(results: list[dict[str, Any]]) -> None:
    for L, block in TUNED_SHAPES:
        for kernel in TRIALS:
            some = [r for r in results if (r["L"], r["block"], r["kernel"]) == (L, block, kernel)]
            for r in sorted(some, key=lambda r: r["ms"])[:3]:
                print(f"tune {L} m={block} {kernel:<18} {r['ms']:.4f} ms  {tuple(r['trial'].values())}")


def profile(L: int, block: int) -> dict[str, float]:
    """Microseconds of each kernel, from PyTorch's profiler."""
    inputs, dout = tensors(L)
    fn = fused(block)
    for _ in range(3):
        torch.autograd.grad(fn(*inputs), inputs, dout)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(10):
            torch.autograd.grad(fn(*inputs), inputs, dout)
        torch.cuda.synchronize()
    times = {e.key: e.self_device_time_total / 10 for e in seen.key_averages() if e.self_device_time_total > 0}
    for name, us in sorted(times.items(), key=lambda x: -x[1])[:10]:
        print(f"profile {L} m={block} {us:8.1f} us  {name[:60]}", flush=True)
    return times


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="write the numbers here as JSON")
    parser.add_argument("--lengths", type=int, nargs="*", default=list(LENGTHS))
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--commit", default=None, help="the commit to write down, where git is not at hand")
    parser.add_argument("--part", type=int, nargs=2, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        tune((args.part[0], args.part[1]))
        return
    torch.manual_seed(int(time.time()))
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": args.commit or commit(),
        "tiles": {str(k): v.__dict__ for k, v in kernels.TILES.items()},
    }
    report["rows"] = compare(args.lengths, args.plain)
    if args.profile:
        report["profile"] = {f"{L} m={m}": profile(L, m) for L, m in TUNED_SHAPES}
    if args.tune:
        compile_in_parallel()
        report["tune"] = tune()
        print_best(report["tune"])
    for key in ("forward_ms", "both_ms"):
        report[f"crossover_{key}"] = crossover(report["rows"], key)
        print(f"crossover {key}: L = {report[f'crossover_{key}']}")
    print(f"{report['gpu']}, torch {report['torch']}, commit {report['commit']}")
    if args.out:
        args.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
