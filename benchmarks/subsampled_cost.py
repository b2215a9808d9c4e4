"""Does subsampled attention pay? Forward + backward against dense attention, and both against their number of pairs.

    python benchmarks/subsampled_cost.py                    one table, about two minutes on two cores
    python benchmarks/subsampled_cost.py --length 8192 --windows 8

share = sampled pairs / dense pairs, legal ones only (causal: j ≤ i); over share = (time / dense time) / share: 1 would
be attention that costs nothing but its pairs. Dense and sampled runs alternate, and the fastest run of each counts.
Memory is the peak that one forward + backward adds, measured in a process of its own. Without a bias dense attention
never holds its L² logits either (PyTorch's fused kernel), and there is little to save; with one (ALiBi here) it does.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from pathlib import Path

import torch

import weft

HEADS, HEAD_DIM = 8, 64
clock = time.perf_counter


def make(name: str, causal: bool, windows: int):
    options = {"windows": windows} if name == "subsampled" else {}
    return weft.make_attention(name, heads=HEADS, head_dim=HEAD_DIM, causal=causal, **options)


def inputs(length: int):
    torch.manual_seed(0)
    return [torch.randn(1, HEADS, length, HEAD_DIM, requires_grad=True) for _ in range(3)]


def once(attn, qkv, grad, bias=None) -> float:
    for t in qkv:
        t.grad = None
    start = clock()
    attn(*qkv, bias=bias).backward(grad)
    return clock() - start


def pair_share(sources: torch.Tensor, length: int, causal: bool) -> float:
    if not causal:
        return sources.shape[1] / length
    targets = torch.arange(length).view(sources.shape[0], -1)
    pairs = torch.searchsorted(sources.sort(-1).values, targets, right=True).sum().item()
    return pairs / (length * (length + 1) / 2)


def measure(length: int, windows: int, causal: bool, alibi: bool, rounds: int) -> tuple[float, float, float]:
    """Seconds dense, seconds sampled, mean share of the pairs."""
    dense, sampled, qkv = make("full", causal, windows), make("subsampled", causal, windows), inputs(length)
    grad, bias = torch.randn_like(qkv[0]), weft.ALiBi(HEADS) if alibi else None
    best, shares = {"dense": float("inf"), "sampled": float("inf")}, []
    for _ in range(rounds):
        best["dense"] = min(best["dense"], once(dense, qkv, grad, bias))
        best["sampled"] = min(best["sampled"], once(sampled, qkv, grad, bias))
        shares.append(pair_share(sampled.last_indices, length, causal))
    return best["dense"], best["sampled"], sum(shares) / len(shares)


def peak_memory(name: str, length: int, windows: int, causal: bool, alibi: bool) -> float:
    """MiB that forward + backward add to the peak of a fresh process."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_peak, (name, length, windows, causal, alibi))


def _peak(name: str, length: int, windows: int, causal: bool, alibi: bool) -> float:
    attn, bias = make(name, causal, windows), weft.ALiBi(HEADS) if alibi else None
    once(attn, inputs(64), torch.randn(1, HEADS, 64, HEAD_DIM), bias)  # what the first call alone allocates
    qkv = inputs(length)
    grad = torch.randn_like(qkv[0])
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is held now (Linux)
    before = _resident("VmRSS")
    once(attn, qkv, grad, bias)
    return (_resident("VmHWM") - before) / 1024


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=0, help="0: PyTorch's own choice")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--cpu-time", action="store_true", help="processor time, for a machine that others use too")
    arguments = parser.parse_args()
    if arguments.cpu_time:
        globals()["clock"] = time.process_time
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    length, windows = arguments.length, arguments.windows
    print(f"L = {length}, W = {windows}, {HEADS} heads of {HEAD_DIM}, {torch.get_num_threads()} threads, float32\n")
    print("| | dense ms | sampled ms | ratio | share of pairs | over share |\n|---|---|---|---|---|---|")
    kinds = {"bidirectional": (False, False), "bidirectional, ALiBi": (False, True)}
    kinds |= {"causal": (True, False), "causal, ALiBi": (True, True)}
    for name, kind in kinds.items():
        dense, sampled, share = measure(length, windows, *kind, arguments.rounds)
        cells = f"{dense * 1e3:.0f} | {sampled * 1e3:.0f} | {sampled / dense:.3f} | {share:.3f}"
        print(f"| {name} | {cells} | {sampled / dense / share:.2f} |", flush=True)
    if arguments.no_memory:
        return
    print("\n| peak memory added | dense MiB | sampled MiB | ratio |\n|---|---|---|---|")
    for name, kind in kinds.items():
        dense, sampled = (peak_memory(n, length, windows, *kind) for n in ("full", "subsampled"))
        print(f"| {name} | {dense:.0f} | {sampled:.0f} | {sampled / dense:.2f} |", flush=True)


if __name__ == "__main__":
    main()
