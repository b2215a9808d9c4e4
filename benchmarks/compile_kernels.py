"""Compile the kernels of every mechanism for GPUs that are not here. Needs Triton, but no GPU.

    python -m benchmarks.compile_kernels [--out benchmarks/results/compiled_kernels.json] [--capability 8.0 9.0 ...]

Forward and backward in bfloat16 with heads of 64 and 128, with heads of 40 and a mask, and with a mask and dropout;
causal where the mechanism can be. Triton specialises the kernels as on such a GPU. One that needs more shared memory
than the GPU has is compiled with fewer pipeline stages, as a launch does (`weft/kernels/launch.py`). Machine code that
reads registers before they are set, an error of some assemblers (`machine_code.py`), counts as a failure. That a kernel
compiles does not show that it is right: the self-test of `backend="auto"` does, on the GPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

import weft
from benchmarks.machine_code import instructions, resources, unset_registers
from weft.core import dispatch
from weft.kernels import launch
from weft.lab.run import commit

# Shared memory that a program can have, in bytes (CUDA C++ Programming Guide, table of technical specifications).
SHARED = {"8.0": 163 << 10, "8.6": 99 << 10, "8.9": 99 << 10, "9.0": 227 << 10, "10.0": 227 << 10, "12.0": 99 << 10}
L, H = 2048, 4
PROBLEMS = "spills", "fewer_stages", "unset_registers", "failed"
CALLS: tuple[dict[str, Any], ...] = (
    {"D": 64},
    {"D": 128},
    {"D": 40, "masked": True},
    {"D": 64, "masked": True, "dropout": 0.1},
)


class Elsewhere:
    """The part of Triton's driver that its compiler reads, for a GPU of this capability."""

    def __init__(self, capability: str):
        from triton.backends.compiler import GPUTarget

        self.number = int(capability.replace(".", ""))
        self.target = GPUTarget("cuda", self.number, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.number  # Triton keeps compiled kernels by device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def compiled(name: str, capability: str) -> dict[str, Any]:
    """The kernels of a mechanism for one GPU: their number, and what is unusual about them."""
    from triton.runtime.driver import driver

    driver.set_active(Elsewhere(capability))
    dispatch._INTERPRETED = True  # let tensors on the CPU reach the launches
    found: dict[str, dict[str, Any]] = {}

    def compile_only(kernel: Any, grid: tuple[int, ...], args: tuple, options: dict[str, Any]) -> None:
        stages = None
        while True:
            built = kernel.warmup(*args, grid=grid, **options)
            if built.metadata.shared <= SHARED[capability]:
                break
            stages = (options.get("num_stages") or 3) - 1
            if not stages:
                raise RuntimeError(f"{kernel.__name__} needs {built.metadata.shared} bytes of shared memory")
            options["num_stages"] = stages
            if "STAGES" in options:
                options["STAGES"] = stages
        place = f"{kernel.__module__.removeprefix('weft.')}.{kernel.__name__}"
        unset = float(capability) < 10 and bool(unset_registers(instructions(built)))
        found[built.hash] = {"kernel": place, "stages": stages, "unset": unset, **resources(built)}

    launch._timed = compile_only  # type: ignore[assignment]
    failed = {}
    for call in CALLS:
        try:
            run(name, **call)
        except Exception as error:
            failed[str(call)] = f"{type(error).__name__}: {error}"[:300]
    kernels = list(found.values())
    return {
        "name": name,
        "capability": capability,
        "kernels": len(kernels),
        "registers": max((x["registers"] for x in kernels), default=0),
        "shared": max((x["shared"] for x in kernels), default=0),
        "spills": sorted({x["kernel"] for x in kernels if x["stack"]}),
        "fewer_stages": sorted({x["kernel"] for x in kernels if x["stages"]}),
        "unset_registers": sorted({x["kernel"] for x in kernels if x["unset"]}),
        "failed": failed,
    }


def run(name: str, D: int, masked: bool = False, dropout: float = 0.0) -> None:
    info = weft.attention_info(name)
    attn = weft.make_attention(
        name, heads=H, head_dim=D, causal=info.causal, max_length=L, dropout=dropout, backend="triton"
    )
    *tensors, dout = torch.randn(4, 1, L, H, D, dtype=torch.bfloat16).transpose(2, 3)
    inputs = [x.requires_grad_() for x in tensors]
    mask = (torch.arange(L) < L - 5)[None] if masked else None
    torch.autograd.grad(attn(*inputs, mask), inputs, dout, allow_unused=True)


def with_zeros() -> None:
    """Fill new memory with zeros: the kernels do not run, and what they would write are indices in places."""

    def filled(function: Any) -> Any:
        return functools.wraps(function)(lambda *args, **kwargs: function(*args, **kwargs).zero_())

    for owner, names in ((torch, ("empty", "empty_like", "empty_strided")), (torch.Tensor, ("new_empty",))):
        for name in names:
            setattr(owner, name, filled(getattr(owner, name)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="write the results to this JSON file")
    parser.add_argument("--capability", nargs="+", default=list(SHARED), choices=list(SHARED), metavar="X.Y")
    able = [name for name in weft.attentions() if weft.attention_info(name).kernel is not None]
    parser.add_argument("--only", nargs="+", default=able, metavar="NAME", help="these mechanisms")
    args = parser.parse_args()
    for name in args.only:
        if name not in able:
            parser.error(f"{name!r} has no kernel; those that have one: {', '.join(able)}")
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("TRITON_INTERPRET=1 compiles nothing: unset it")
    import triton

    jobs = [(name, capability) for capability in args.capability for name in args.only]
    rows = []
    with ProcessPoolExecutor(os.cpu_count(), initializer=with_zeros, max_tasks_per_child=1) as pool:
        for row in pool.map(compiled, *zip(*jobs, strict=True)):
            rows.append(row)
            problems = [f"{key}: {', '.join(row[key])}" for key in PROBLEMS if row[key]]
            print(f"{row['capability']} {row['name']:<26} {row['kernels']:>3} kernels", *problems, flush=True)
    command = f"python -m benchmarks.compile_kernels --capability {' '.join(args.capability)}"
    about = {"commit": commit(), "torch": torch.__version__, "triton": triton.__version__, "command": command}
    if args.out:
        args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    failed = sum(bool(row["failed"] or row["unset_registers"]) for row in rows)
    print(f"{sum(row['kernels'] for row in rows):,} kernels compiled, {failed} of {len(rows)} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
