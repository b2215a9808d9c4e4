"""Find the fastest tile sizes: every kernel with every trial, at common lengths.

    python3 -m benchmarks.gpu_tune [--out FILE.json] [--only NAME ...] [--lengths L ...] [--when FILE]

bfloat16, 16 heads of 64, causal. Times the whole forward (and the backward, for its kernels) with the tiles of one
kernel changed. Trials are compiled first, in many processes. With --when FILE, times are taken once the file exists.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import weft
from benchmarks.gpu_timing import ROOT, D, H, median_ms, tensors, wait_for
from weft.core.partitions import default_block
from weft.core.tiles import Tiles
from weft.kernels.launch import forget


@dataclass(frozen=True, eq=False)
class Trial:
    mechanism: str
    folder: str  # module in weft; its kernel.py has the TILES
    key: tuple[str, int, int]  # in TILES
    backward: bool  # whether it runs in the backward
    lengths: tuple[int, ...]
    tiles: str  # queries/keys/warps/stages, and /registers if they are limited
    options: Callable[[int], dict[str, Any]] = lambda L: {}

    def choices(self) -> list[Tiles]:
        return [Tiles(*map(int, word.split("/"))) for word in self.tiles.split()]


def square_root(L: int) -> dict[str, Any]:
    return {"block_size": default_block(L, None)}


def four_windows(L: int) -> dict[str, Any]:
    return {"windows": 4}


def strided(L: int) -> dict[str, Any]:
    return {"pattern": "strided"}


LONG = (16384, 65536)
TRIALS = [
    Trial(
        "combiner-fixed",
        "attention.combiner.fixed",
        ("summarise short blocks", 64, 2),
        False,
        (16384,),
        "32/0/4/3 32/0/4/4 16/0/2/4 64/0/8/3 32/0/4/2 32/0/2/3 16/0/4/4 16/0/1/4",
        square_root,
    ),  # fmt: skip
    Trial(
        "combiner-fixed",
        "attention.combiner.fixed",
        ("summarise and keep short blocks", 64, 2),
        True,
        (16384,),
        "32/0/2/3 32/0/4/3 32/0/4/4 16/0/2/4 64/0/8/3 16/0/4/4 32/0/8/3 32/0/4/3/128",
        square_root,
    ),  # fmt: skip
    Trial(
        "combiner-fixed",
        "attention.combiner.fixed",
        ("summarise", 64, 2),
        False,
        (65536,),
        "32/0/4/3 32/0/2/3 16/0/2/4 16/0/4/4",
        square_root,
    ),  # fmt: skip
    Trial(
        "combiner-fixed",
        "attention.combiner.fixed",
        ("summarise and keep", 64, 2),
        True,
        (65536,),
        "32/0/4/3 32/0/2/3 16/0/2/4 16/0/4/4",
        square_root,
    ),  # fmt: skip
    Trial(
        "combiner-fixed",
        "attention.combiner.fixed",
        ("attend", 64, 2),
        False,
        LONG,
        "64/32/4/3 64/32/4/2 64/32/4/4 64/64/4/2 64/64/4/3 128/64/8/3 128/32/8/3 64/32/4/3/80 64/64/4/2/96",
        square_root,
    ),  # fmt: skip
    Trial(
        "combiner-fixed",
        "attention.combiner.fixed",
        ("span gradients", 64, 2),
        True,
        LONG,
        "32/64/4/3/168 32/64/4/3 32/64/4/3/128 32/64/4/2/128 32/128/8/3/128 32/128/8/2/128 64/64/4/2 64/64/8/2",
        square_root,
    ),  # fmt: skip
    Trial(
        "combiner-fixed",
        "attention.combiner.fixed",
        ("key gradients", 64, 2),
        True,
        LONG,
        "32/64/4/3 32/64/4/3/128 32/64/4/2/128 64/64/4/2 32/128/8/2 16/64/4/3 32/32/4/3",
        square_root,
    ),  # fmt: skip
    Trial(
        "combiner-fixed",
        "attention.combiner.fixed",
        ("query gradients", 64, 2),
        True,
        LONG,
        "64/32/4/3 64/32/4/3/80 64/32/4/2 64/64/4/2 128/32/8/3 128/64/8/2",
        square_root,
    ),  # fmt: skip
    Trial(
        "subsampled",
        "attention.subsampled",
        ("attend", 64, 2),
        False,
        (16384,),
        "128/64/8/3/128 128/64/8/4/128 128/64/4/3 64/64/4/3/128 64/64/4/4/128 128/128/8/2/128 128/32/8/4/128 "
        "64/64/4/3/168",
        four_windows,
    ),  # fmt: skip
    Trial(
        "subsampled",
        "attention.subsampled",
        ("query gradients", 64, 2),
        True,
        (16384,),
        "128/64/8/3/128 128/64/8/4/128 64/64/4/3/128 128/32/8/4/128 128/64/8/2/128 64/64/4/3/168",
        four_windows,
    ),  # fmt: skip
    Trial(
        "subsampled",
        "attention.subsampled",
        ("key gradients", 64, 2),
        True,
        (16384,),
        "32/64/4/3 64/64/4/3 32/128/8/3/128 32/128/8/2/128 64/128/8/2/128 64/128/8/3/128 32/64/4/3/128 32/64/4/4 "
        "64/64/4/3/160 64/64/4/4/160 32/128/8/4/128 64/128/8/3",
        four_windows,
    ),  # fmt: skip
    Trial(
        "subsampled",
        "attention.subsampled",
        ("key gradients of many", 64, 2),
        True,
        (65536,),
        "32/64/4/3 64/64/4/3 32/128/8/3/128 32/128/8/2/128 64/128/8/2/128 64/128/8/3/128 32/64/4/3/128 32/64/4/4 "
        "64/64/4/3/160 64/64/4/4/160 32/128/8/4/128 64/128/8/3",
        four_windows,
    ),  # fmt: skip
    Trial(
        "linear",
        "kernels.linear_scan",
        ("states", 64, 2),
        True,
        (16384,),
        "32/32/4/3 64/64/4/2 32/32/4/4 128/128/4/1 64/64/8/2",
    ),  # fmt: skip
    Trial(
        "linear",
        "kernels.linear_scan",
        ("outputs", 64, 2),
        False,
        (16384,),
        "64/32/4/3 64/32/4/2 64/64/4/2 128/64/8/2 64/64/8/2 128/32/8/3",
    ),  # fmt: skip
    Trial(
        "linear",
        "kernels.linear_scan",
        ("query gradients", 64, 2),
        True,
        (16384,),
        "64/32/4/3 64/32/4/2 64/64/4/2 128/32/8/3 128/64/8/2",
    ),  # fmt: skip
    Trial(
        "linear",
        "kernels.linear_scan",
        ("key gradients", 64, 2),
        True,
        (16384,),
        "32/64/4/2 32/64/4/3 16/64/4/3 32/64/4/1 64/64/8/2 64/128/8/2",
    ),  # fmt: skip
    Trial(
        "performer",
        "attention.performer",
        ("features", 64, 2),
        False,
        LONG,
        "64/32/4/3 64/32/4/2 64/64/4/3 64/16/4/3 128/32/8/3 128/32/4/3 128/64/8/3 128/16/4/3",
    ),  # fmt: skip
    Trial(
        "performer",
        "attention.performer",
        ("feature gradients", 64, 2),
        True,
        LONG,
        "64/32/4/3 64/32/4/2 64/32/4/4 64/16/4/3 64/64/4/2 128/32/8/3 128/64/8/2",
    ),  # fmt: skip
    Trial(
        "performer",
        "kernels.linear_scan",
        ("wide states", 64, 2),
        True,
        (16384,),
        "64/64/4/2 64/64/4/2/128 128/128/4/1 32/32/4/3 64/64/8/2",
    ),  # fmt: skip
    Trial(
        "performer",
        "kernels.linear_scan",
        ("wide outputs", 64, 2),
        False,
        LONG,
        "64/32/4/3 64/64/4/2 64/32/4/2 64/64/4/3 64/32/4/3/128 128/32/8/3 128/64/8/2 64/16/4/4",
    ),  # fmt: skip
    Trial(
        "performer",
        "kernels.linear_scan",
        ("wide query gradients", 64, 2),
        True,
        LONG,
        "64/32/4/3 64/16/4/3 64/32/4/2 64/64/4/2 32/32/4/3 64/32/8/3 128/32/8/3",
    ),  # fmt: skip
    Trial(
        "performer",
        "kernels.linear_scan",
        ("wide key gradients", 64, 2),
        True,
        LONG,
        "64/32/4/3/168 64/32/4/2/168 64/16/4/3/168 64/32/4/3 64/64/4/2 64/32/8/3 32/32/4/3",
    ),  # fmt: skip
    Trial(
        "performer",
        "kernels.linear_scan",
        ("wide value gradients", 64, 2),
        True,
        LONG,
        "64/32/4/2 64/32/4/3 64/32/4/3/168 64/64/4/2 64/64/4/2/168 64/32/8/3 128/32/8/2",
    ),  # fmt: skip
    Trial(
        "longformer",
        "kernels.band",
        ("attend", 64, 2),
        False,
        (16384,),
        "64/32/4/3 64/64/4/3 64/64/4/2 128/64/8/3 128/32/8/3",
    ),  # fmt: skip
    Trial(
        "longformer",
        "kernels.band",
        ("query gradients", 64, 2),
        True,
        (16384,),
        "64/32/4/3 64/32/4/2 64/64/4/2 128/32/8/3",
    ),  # fmt: skip
    Trial(
        "longformer",
        "kernels.band",
        ("key gradients", 64, 2),
        True,
        (16384,),
        "32/64/4/3 32/64/4/2 64/64/4/2 32/128/8/2 32/64/4/3/128",
    ),  # fmt: skip
    Trial(
        "sparse",
        "kernels.band",
        ("attend", 64, 2),
        False,
        (16384,),
        "64/32/4/3 64/64/4/3 64/64/4/2 128/64/8/3",
    ),  # fmt: skip
    Trial(
        "sparse",
        "kernels.band",
        ("extra gradients", 64, 2),
        True,
        (16384,),
        "32/64/4/3 32/64/4/2 64/64/4/2 32/128/8/2",
    ),  # fmt: skip
    Trial(
        "sparse",
        "kernels.lines",
        ("attend", 64, 2),
        False,
        LONG,
        "64/32/4/3 64/64/4/2 64/64/4/3 128/32/8/3 64/32/4/2",
        strided,
    ),  # fmt: skip
    Trial(
        "sparse",
        "kernels.lines",
        ("query gradients", 64, 2),
        True,
        LONG,
        "64/32/4/3 64/32/4/2 64/64/4/2 128/32/8/3",
        strided,
    ),  # fmt: skip
    Trial(
        "sparse",
        "kernels.lines",
        ("key gradients", 64, 2),
        True,
        LONG,
        "32/64/4/3/168 32/64/4/3 64/64/4/2 32/64/4/2 32/64/4/3/128",
        strided,
    ),  # fmt: skip
    Trial(
        "combiner-axial",
        "attention.combiner.axial",
        ("summarise", 64, 2),
        False,
        (16384,),
        "64/32/4/3/128 64/32/4/3 64/64/4/2 128/32/8/3 128/64/8/2",
    ),  # fmt: skip
    Trial(
        "combiner-axial",
        "attention.combiner.axial",
        ("row query gradients", 64, 2),
        True,
        (16384,),
        "64/32/4/2 64/32/4/3 64/64/4/2 128/32/8/2",
    ),  # fmt: skip
    Trial(
        "combiner-axial",
        "attention.combiner.axial",
        ("row key gradients", 64, 2),
        True,
        (16384,),
        "32/64/4/2/168 32/64/4/2 64/64/4/2 32/64/4/3 64/64/8/2",
    ),  # fmt: skip
    Trial(
        "combiner-axial",
        "kernels.lines",
        ("attend", 64, 2),
        False,
        (16384,),
        "64/32/4/3 64/64/4/2 64/64/4/3 128/32/8/3",
    ),  # fmt: skip
    Trial(
        "combiner-axial",
        "kernels.lines",
        ("key gradients", 64, 2),
        True,
        (16384,),
        "32/64/4/3/168 32/64/4/3 64/64/4/2 32/64/4/2",
    ),  # fmt: skip
]


def call(trial: Trial, L: int) -> Callable[[], Any]:
    inputs, dout = tensors(L)
    attn = weft.make_attention(
        trial.mechanism, heads=H, head_dim=D, causal=True, backend="triton", **trial.options(L)
    ).cuda()
    if trial.backward:
        return lambda: torch.autograd.grad(attn(*inputs), inputs, dout)

    def forward() -> Any:
        with torch.no_grad():
            return attn(*inputs)

    return forward


def runs(args: argparse.Namespace) -> Iterator[tuple[Trial, int, Any]]:
    for trial in TRIALS:
        if args.only is None or trial.mechanism in args.only:
            for L in trial.lengths:
                if args.lengths is None or L in args.lengths:
                    for tiles in trial.choices():
                        yield trial, L, tiles


def tune(args: argparse.Namespace, part: tuple[int, int] | None = None) -> list[dict[str, Any]]:
    """Time every trial; with `part` (i, n), only run part i of n once, to fill Triton's cache from many processes."""
    results = []
    made: dict[tuple[int, int], Callable[[], Any]] = {}
    for number, (trial, L, tiles) in enumerate(runs(args)):
        if part and number % part[1] != part[0]:
            continue
        table = importlib.import_module(f"weft.{trial.folder}.kernel").TILES
        usual = table[trial.key]
        table[trial.key] = tiles
        forget()
        try:
            key = (id(trial), L)
            if key not in made:
                made.clear()
                made[key] = call(trial, L)
            if part:
                made[key]()
                torch.cuda.synchronize()
                continue
            ms = median_ms(made[key], 30.0)
            results.append({"L": L, "kernel": f"{trial.mechanism}: {trial.key[0]}", "tiles": str(tiles), "ms": ms})
        except Exception as error:
            if not part:
                print(f"{L} {trial.key} {tiles}: {type(error).__name__} {str(error)[:100]}", flush=True)
        finally:
            table[trial.key] = usual
    return results


def compile_in_parallel() -> None:
    began = time.time()
    workers = min(14, os.cpu_count() or 1)
    command = [sys.executable, "-m", "benchmarks.gpu_tune", *sys.argv[1:]]
    jobs = [subprocess.Popen([*command, "--part", str(i), str(workers)], cwd=ROOT) for i in range(workers)]
    for job in jobs:
        job.wait()
    print(f"compiled the trials in {time.time() - began:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="write the results to this JSON file")
    parser.add_argument("--only", nargs="*", default=None, help="these mechanisms")
    parser.add_argument("--lengths", type=int, nargs="*", default=None, help="these lengths")
    parser.add_argument("--when", type=Path, default=None, help="take times when this file exists")
    parser.add_argument("--part", type=int, nargs=2, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        tune(args, (args.part[0], args.part[1]))
        return
    compile_in_parallel()
    wait_for(args.when)
    results = tune(args)
    for kernel, L in dict.fromkeys((r["kernel"], r["L"]) for r in results):
        some = sorted((r for r in results if (r["kernel"], r["L"]) == (kernel, L)), key=lambda r: r["ms"])
        for r in some[:4]:
            print(f"{L} {kernel:<34} {r['ms']:.4f} ms  {r['tiles']}")
        print(f"{L} {kernel:<34} {some[-1]['ms']:.4f} ms  {some[-1]['tiles']}  (worst of {len(some)})")
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
