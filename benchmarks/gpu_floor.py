"""How close kernels are to the memory: what the card copies and reads, and `combiner-fixed` beside it.

    python3 -m benchmarks.gpu_floor [--out benchmarks/results/gpu_floor.json]
    ncu --profile-from-start off --clock-control none --set full python3 -m benchmarks.gpu_floor --once

bfloat16, 16 heads of 64, 16,384 tokens, causal, medians of CUDA graph replays. With the default pool "max", the forward
of `combiner-fixed` reads q, k and v to summarise blocks, then reads them again and writes the output: 7 tensors, as
many bytes as a copy of 3.5 tensors moves. It is also timed with some heads after the others. Both ways in which
`subsampled` computes bidirectional windows are timed eagerly: its kernels, and PyTorch's attention on gathered keys
(`whole_windows`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

import weft
from benchmarks.gpu_attention import calls
from benchmarks.gpu_timing import TOKENS, D, H, Results, eager_ms, median_ms, wait_for
from weft.attention.subsampled import kernel as subsampled

LENGTHS = (16384, 8192, 4096, 2048, 65536)  # of `subsampled`, with four windows
TENSOR = TOKENS * H * D  # elements of q


@triton.jit
def read(X, OUT, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(OUT + tl.program_id(0), tl.sum(tl.load(X + i, mask=i < n, other=0.0).to(tl.float32)))


def memory() -> Iterator[dict[str, Any]]:
    for tensors in (2, 3.5):
        a, b = (torch.zeros(int(tensors * TENSOR), device="cuda", dtype=torch.bfloat16) for _ in range(2))
        yield _moved("copy", 2 * tensors, lambda a=a, b=b: a.copy_(b))
    x, BLOCK = torch.zeros(3 * TENSOR, device="cuda", dtype=torch.bfloat16), 8192
    out = torch.empty(triton.cdiv(x.numel(), BLOCK), device="cuda")
    yield _moved("read", 3, lambda: read[out.shape](x, out, x.numel(), BLOCK, num_warps=8))


def _moved(name: str, tensors: float, call: Callable[[], Any]) -> dict[str, Any]:
    ms, megabytes = median_ms(call), tensors * TENSOR * 2 / 1e6
    return {
        "name": name,
        "megabytes": round(megabytes, 1),
        "ms": round(ms, 4),
        "tb_per_s": round(megabytes / ms / 1e3, 2),
    }


def fixed(heads: int) -> dict[str, Any]:
    """A few heads at a time, so that their q, k and v (6.3 MB per head) could stay in the L2 cache between kernels."""
    attn = weft.make_attention("combiner-fixed", heads=heads, head_dim=D, causal=True, max_length=TOKENS)
    attn = attn.cuda().bfloat16()
    forward, _ = calls(lambda *qkv: [attn(*x) for x in zip(*(x.split(heads, 1) for x in qkv), strict=True)], TOKENS)
    found = {"name": "combiner-fixed", "heads": heads, "forward_ms": round(median_ms(forward), 4)}
    if heads == H:
        both = calls(attn, TOKENS)[1]
        found["both_ms"] = round(median_ms(both), 4)
    return found


def once() -> None:
    """One forward and backward of `combiner-fixed` for a profiler."""
    attn = weft.make_attention("combiner-fixed", heads=H, head_dim=D, causal=True, max_length=TOKENS)
    both = calls(attn.cuda().bfloat16(), TOKENS)[1]
    both()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    both()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def windows(L: int) -> dict[str, Any]:
    attn, found = weft.make_attention("subsampled", heads=H, head_dim=D, max_length=L).cuda(), {}
    least = subsampled.LEAST_WINDOW
    for way, subsampled.LEAST_WINDOW in (("kernels", 10**9), ("whole", 0)):
        forward, both = calls(attn, L)
        both()
        found |= {f"{way}_forward_ms": round(eager_ms(forward), 4), f"{way}_both_ms": round(eager_ms(both), 4)}
    subsampled.LEAST_WINDOW = least
    return {"L": L, "window": L // 4, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="add the results to this JSON file")
    parser.add_argument("--when", type=Path, default=None, help="take times when this file exists")
    parser.add_argument("--once", action="store_true", help="only one forward and backward, for a profiler")
    args = parser.parse_args()
    if args.once:
        return once()
    results = Results(args.out, "gpu_floor", False)
    rows: list[tuple[str, Any]] = [
        ("memory", memory),
        *[("combiner-fixed", lambda n=n: [fixed(n)]) for n in (H, 8, 4, 2)],
    ]
    rows += [("windows", lambda L=L: [windows(L)]) for L in LENGTHS]
    if args.when:  # compile first
        for _, call in rows:
            list(call())
    wait_for(args.when)
    for kind, call in rows:
        for row in call():
            results.add(kind, row)
            print(kind, row, flush=True)


if __name__ == "__main__":
    main()
