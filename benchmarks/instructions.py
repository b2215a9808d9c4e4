"""Count the instructions of a mechanism's kernels, compiled for a GPU that is not here. Needs Triton, but no GPU.

    python -m benchmarks.instructions NAME [--length 16384] [--capability 9.0] [--options '{"block_size": 128}']

Forward and backward in bfloat16 with 16 heads of 64, causal where the mechanism can be. For every kernel: programs,
warps of each, registers, shared memory, the instructions outside of loops, and those of one round of each loop. A GPU
also waits, for memory above all, which this does not show.
"""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

import torch

import weft
from benchmarks.compile_kernels import SHARED, Elsewhere, with_zeros
from benchmarks.gpu_timing import D, H
from benchmarks.machine_code import instructions, resources
from weft.core import dispatch
from weft.kernels import launch

BACK = re.compile(r"\bBRA\b.* 0x([0-9a-f]+)")  # a branch
BYTES, SHORTEST = 16, 8  # of an instruction; instructions of a loop, to leave out the end's branch to itself


def counted(built: Any) -> tuple[int, list[int]]:
    """Instructions outside of loops, and of one round of each loop that is in no other."""
    lines = [(at // BYTES, what) for at, what in instructions(built)]
    loops = []
    for at, what in lines:
        found = BACK.search(what)
        if found and at - int(found[1], 16) // BYTES >= SHORTEST:
            loops.append((int(found[1], 16) // BYTES, at))
    outer = [x for x in loops if not any(y != x and y[0] <= x[0] and x[1] <= y[1] for y in loops)]
    sizes = [last - first + 1 for first, last in outer]
    return len(lines) - sum(sizes), sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=weft.attentions(), metavar="NAME")
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--capability", default="9.0", choices=list(SHARED))
    parser.add_argument("--options", type=json.loads, default={}, help="of the mechanism, as JSON")
    args = parser.parse_args()

    import triton
    from triton.runtime.driver import driver

    driver.set_active(Elsewhere(args.capability))
    dispatch._INTERPRETED = True  # let tensors on the CPU reach the launches
    with_zeros()

    def compile_only(kernel: Any, grid: tuple[int, ...], arguments: tuple, options: dict[str, Any]) -> None:
        built = kernel.warmup(*arguments, grid=grid, **options)
        used, (straight, loops) = resources(built), counted(built)
        rounds = " + ".join(f"{size} a round" for size in loops)
        print(
            f"{kernel.__name__:18} {grid[0]:6} programs of {built.metadata.num_warps} warps, {used['registers']:3} "
            f"registers, {used['shared']:6} bytes shared, {straight:5} instructions{' + ' if loops else ''}{rounds}"
        )

    launch._timed = compile_only  # type: ignore[assignment]
    print(f"Triton {triton.__version__}, compute capability {args.capability}")
    info = weft.attention_info(args.name)
    attn = weft.make_attention(
        args.name, heads=H, head_dim=D, causal=info.causal, max_length=args.length, backend="triton", **args.options
    )
    *tensors, dout = torch.randn(4, 1, args.length, H, D, dtype=torch.bfloat16).transpose(2, 3)
    inputs = [x.requires_grad_() for x in tensors]
    torch.autograd.grad(attn(*inputs), inputs, dout, allow_unused=True)


if __name__ == "__main__":
    main()
