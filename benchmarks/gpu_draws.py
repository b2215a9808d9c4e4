"""The cost of drawing a sample of subsampled attention on the GPU.

    python3 -m benchmarks.gpu_draws [--layers 16] [--lengths 1024 4096 16384] [--host]

For each length one draw as a fused forward uses it: milliseconds until the call returns, milliseconds on the GPU, and
the number of kernels and copies. Then eager forwards of a stack of attention layers (bfloat16, causal, 4 windows),
where PyTorch raises an error on any synchronisation. The plain versions also run in a CUDA graph. --host: only the CPU
part, without a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import weft  # noqa: E402
from benchmarks.gpu_timing import commit, tensors  # noqa: E402
from weft.attention.subsampled.kernel import place_indices  # noqa: E402


def make(**options: Any) -> nn.Module:
    return weft.make_attention("subsampled", heads=16, head_dim=64, **options)


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


def host_and_device_ms(fn: Callable[[], Any], repeats: int = 30) -> tuple[float, float]:
    """Medians of calls on an idle GPU: until the call returns, and from the first to the last kernel on the GPU."""
    for _ in range(5):
        fn()
    host, device = [], []
    for _ in range(repeats):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000)  # keeps the GPU busy while everything is queued, so that no gap is timed
        first.record()
        began = time.perf_counter()
        fn()
        host.append((time.perf_counter() - began) * 1e3)
        last.record()
        torch.cuda.synchronize()
        device.append(first.elapsed_time(last))
    return sorted(host)[repeats // 2], sorted(device)[repeats // 2]


def host(lengths: list[int]) -> None:
    for L, causal in itertools.product(lengths, (True, False)):
        attn = make(causal=causal, windows=4)
        ms = median_ms(lambda: place_indices(attn.draw(L), torch.device("cpu"), True))  # noqa: B023
        print(f"L {L:>6} causal {causal!s:<5} {ms:.3f} ms")


def median_ms(fn: Callable[[], Any], repeats: int = 300) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        fn()
        times.append((time.perf_counter() - began) * 1e3)
    return sorted(times)[repeats // 2]


def launches(fn: Callable[[], Any]) -> int:
    fn()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        fn()
        torch.cuda.synchronize()
    return sum(e.count for e in seen.key_averages() if e.self_device_time_total > 0)


def draws(lengths: list[int]) -> None:
    gpu = torch.device("cuda", torch.cuda.current_device())
    for L, causal in itertools.product(lengths, (True, False)):

        def draw(attn: Any = make(causal=causal, windows=4), L: int = L) -> Tensor:  # noqa: B008
            return place_indices(attn.draw(L), gpu, True)

        with no_waiting():
            for _ in range(3):
                draw()
        host, device = host_and_device_ms(draw)
        print(f"L {L:>6} causal {causal!s:<5} {host:.3f} ms until the call returns, {device:.3f} ms on the GPU, "
              f"{launches(draw)} kernels and copies", flush=True)  # fmt: skip


def forwards(lengths: list[int], layers: int) -> None:
    for L in lengths:
        qkv, _ = tensors(L)
        sampled = [make(causal=True, windows=4).cuda().train() for _ in range(layers)]
        dense = [weft.make_attention("full", heads=16, head_dim=64, causal=True).cuda() for _ in range(layers)]
        times = [eager_ms(stack, qkv) / layers for stack in (dense, sampled)]
        print(f"L {L:>6}: a layer's eager forward {times[0]:.3f} ms dense, {times[1]:.3f} sampled", flush=True)


def eager_ms(stack: list[nn.Module], qkv: list[Tensor]) -> float:
    def run() -> None:
        x, k, v = qkv
        for attn in stack:
            x = attn(x, k, v)

    for _ in range(3):
        run()
    with no_waiting():
        run()
    times = []
    for _ in range(10):
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    return sorted(times)[5]


def captured(L: int = 2048) -> None:
    (q, k, v), _ = tensors(L)
    for name, causal in itertools.product(("subsampled", "sparse"), (True, False)):
        attn = weft.make_attention(name, heads=16, head_dim=64, causal=causal, backend="torch").cuda().train()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad():
            attn(q, k, v)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), torch.no_grad():
            out = attn(q, k, v)
        torch.manual_seed(1)
        another_forward(attn, q, k, v)  # the graph replays its own sample, independent of other draws
        graph.replay()
        graph.replay()
        if name == "subsampled":
            with attn.fixed(attn.last_indices), torch.no_grad():
                expected = attn(q, k, v)
        else:
            expected = attn(q, k, v)
        print(f"{name}, plain, causal {causal}, in a CUDA graph: within {(out - expected).abs().max().item():.1e}")


def another_forward(attn: Any, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Another forward, which must not change the tensors of a graph."""
    kept = getattr(attn, "last_indices", None)
    with torch.no_grad():
        attn(q, k, v)
    attn.last_indices = kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 4096, 16384])
    parser.add_argument("--host", action="store_true")
    args = parser.parse_args()
    if args.host:
        host(args.lengths)
        return
    captured()
    draws(args.lengths)
    forwards(args.lengths, args.layers)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, commit {commit()}")


if __name__ == "__main__":
    main()
