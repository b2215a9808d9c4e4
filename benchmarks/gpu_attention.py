"""What a user gets on a GPU: calls of every mechanism, against full attention in the same process.

    python3 -m benchmarks.gpu_attention [--out benchmarks/results/gpu_attention.json] [--lengths L ...] [--only ...]

bfloat16, 16 heads of 64, 16,384 tokens per batch (one sequence where L is longer), max_length=L, backend="auto" (and
"triton" for kernels that "auto" does not use yet), causal where the mechanism can be, some in both directions. "eager"
is the median of plain calls (triton.testing.do_bench), "host" the time the CPU needs to queue one forward and backward,
"graph" the replay of a CUDA graph (at 16,384 and 65,536 tokens), which is the time of the kernels, "compiled" and
"reduced" the same calls in torch.compile, without and with mode="reduce-overhead". "first call" are the seconds of the
first forward and backward, length by length, in a process with an empty Triton cache. Full attention is PyTorch's with
cuDNN, with FlashAttention, and as compiled FlexAttention, also with the sliding window of `longformer`;
flash-linear-attention is timed if it is installed. It chooses its tiles in its first call, by their times. "empty" is
an autograd.Function that only allocates its output and gradients.

Kernels are compiled first, by several processes, and then loaded. With --when FILE, the times are taken once the file
exists: the first part can share the GPU with other work, the second cannot. --resume adds the rows that the newest run
in the file does not have. Compiled calls are timed last: after "reduce-overhead", PyTorch's random generator was left
in its capturing state, and later draws in the process failed (torch 2.11).

`python -m benchmarks.tables` writes the tables of the documentation.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

import weft
from benchmarks.gpu_timing import (
    D,
    H,
    Results,
    eager_ms,
    host_ms,
    in_parallel,
    median_ms,
    peak_mib,
    sdpa,
    tensors,
    wait_for,
)

LENGTHS = (16384, 2048, 512, 1024, 4096, 65536, 8192)  # most important first
FORWARD = (16384, 65536)  # lengths at which the forward is also timed alone, and CUDA graphs
COMPILED = (16384,)  # lengths at which these are also compiled, which takes seconds for each
TO_COMPILE = ("combiner-fixed", "linear", "local", "longformer", "sparse", "subsampled")
MODES = {"eager": "", "compiled": None, "reduced": "reduce-overhead"}
BOTH_WAYS = ("combiner-fixed", "linear", "local", "performer", "subsampled")  # also timed without the causal mask
AT = (16384, 65536)  # lengths of the rows that are no mechanism with its defaults
FULL = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
EMPTY, WINDOW = "empty", 512
VARIANTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "strided": lambda L: {"pattern": "strided"},
    "keep 0.5": lambda L: {"keep": 0.5},
}
MORE = ("sparse, strided", "subsampled, keep 0.5")
TOO_LONG = {"synthesizer": 16384}  # full attention with wider heads, so it is slower at any length


def made(name: str, L: int, causal: bool) -> Any:
    """The attention of a row: a mechanism with its variant or backend after a comma, or a full attention."""
    if name in FULL:
        return sdpa(FULL[name], causal)
    if name == EMPTY:
        return Empty.apply
    if name.startswith("flex"):
        return flex(L, name != "flex")
    if name == "fla linear":
        return fla_linear
    name, _, variant = name.partition(", ")
    options = VARIANTS[variant](L) if variant in VARIANTS else {}
    attn = weft.make_attention(
        name, heads=H, head_dim=D, causal=causal, max_length=L,
        backend="triton" if variant == "triton" else "auto", **options,
    )  # fmt: skip
    return attn.to("cuda", torch.bfloat16)


@functools.cache
def flex(L: int, window: bool) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i - j < WINDOW) if window else j <= i

    blocks = create_block_mask(allowed, None, None, L, L, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=blocks)


class Empty(torch.autograd.Function):
    """Only allocates what an attention has to: what PyTorch takes to queue a call without any kernel."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors)


def fla_linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from fla.ops.linear_attn import chunk_linear_attn

    q, k = F.elu(q) + 1, F.elu(k) + 1
    return chunk_linear_attn(*(x.transpose(1, 2) for x in (q, k, v)), scale=1.0, normalize=True)[0].transpose(1, 2)


def contestants(only: list[str], L: int) -> list[tuple[str, bool]]:
    """Names and directions of the rows at this length."""
    found = [("cudnn", True), ("cudnn", False)]
    if L == AT[0]:
        found += [(EMPTY, True), ("flash", True), ("flex", True), (f"flex, window of {WINDOW}", True)]
        if importlib.util.find_spec("fla") is not None:
            found.append(("fla linear", True))
    for name in only:
        info = weft.attention_info(name)
        if name == "full" or L > TOO_LONG.get(name, L):
            continue
        found.append((name, info.causal))
        if info.kernel is not None and not info.kernel.auto(made(name, 512, info.causal)):
            found.append((f"{name}, triton", info.causal))
        if L in AT:
            found += [(more, info.causal) for more in MORE if more.startswith(f"{name}, ")]
            found += [(name, False)] if name in BOTH_WAYS else []
    return found


def fused(name: str) -> bool:
    """Whether calls of this row compile kernels."""
    return name not in weft.attentions() or weft.attention_info(name).kernel is not None


shared_tensors = functools.cache(tensors)


def calls(fn: Any, L: int) -> tuple[Any, Any]:
    inputs, dout = shared_tensors(L)

    def forward() -> Any:
        with torch.no_grad():
            return fn(*inputs)

    return forward, lambda: torch.autograd.grad(fn(*inputs), inputs, dout, allow_unused=True)


@functools.cache
def prepared(name: str, L: int, causal: bool, mode: str) -> tuple[Any, Any]:
    """The calls of a row in this mode, after their first calls."""
    fn = made(name, L, causal)
    if mode != "eager":
        fn = torch.compile(fn, dynamic=False, mode=MODES[mode])
    forward, both = calls(fn, L)
    for _ in range(3):  # a CUDA graph is recorded in the second
        both()
    if mode == "eager":
        forward()
    return forward, both


def measure(name: str, L: int, causal: bool, mode: str) -> dict[str, float]:
    forward, both = prepared(name, L, causal, mode)
    found = {f"{mode}_both_ms": eager_ms(both, 80 if L in FORWARD else 40)}
    found["host_ms" if mode == "eager" else f"{mode}_host_ms"] = host_ms(both, found[f"{mode}_both_ms"])
    if mode == "eager":
        found["peak_mib"] = peak_mib(both)
    if mode == "eager" and L in FORWARD and name != EMPTY:
        found["eager_forward_ms"] = eager_ms(forward, 40)
        try:
            found |= {"forward_ms": median_ms(forward, 20), "both_ms": median_ms(both, 20)}
        except Exception as error:  # work on the CPU cannot be captured
            print(f"{L:>6} {name:<26} no CUDA graph: {str(error)[:120]}", flush=True)
            torch.cuda.synchronize()
    return {key: round(value, 4) for key, value in found.items()}


def first_calls(args: argparse.Namespace) -> None:
    """Print the seconds of the first call at each length, for every n-th row. This fills Triton's cache."""
    torch.zeros(1, device="cuda")
    number, at_once = args.first
    for (name, causal), lengths in list(kernel_rows(args).items())[number::at_once]:
        seconds = {}
        for L in lengths:
            began = time.perf_counter()
            try:
                calls(made(name, L, causal), L)[1]()
                torch.cuda.synchronize()
            except Exception:  # reported when it is timed
                continue
            seconds[L] = round(time.perf_counter() - began, 2)
        print(json.dumps({"name": name, "causal": causal, "seconds": seconds}), flush=True)


def kernel_rows(args: argparse.Namespace) -> dict[tuple[str, bool], list[int]]:
    """Rows whose calls compile kernels, with their lengths."""
    found: dict[tuple[str, bool], list[int]] = {}
    for L in args.lengths:
        for row in contestants(args.only, L):
            if row[0] not in (*FULL, EMPTY) and fused(row[0]):
                found.setdefault(row, []).append(L)
    return found


def warm_up(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds of the first calls of every row, by processes that fill a new Triton cache."""
    os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp())
    given = ["--lengths", *map(str, args.lengths), "--only", *args.only]
    jobs = [["--first", str(i), str(args.at_once), *given] for i in range(args.at_once)]
    found = [printed for _, printed in in_parallel("gpu_attention", jobs, args.at_once)]
    return [json.loads(line) for printed in found for line in printed.splitlines() if line.startswith("{")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="add the results to this JSON file")
    parser.add_argument("--resume", action="store_true", help="continue the newest run if it is of this commit")
    parser.add_argument("--when", type=Path, default=None, help="take times when this file exists")
    parser.add_argument("--lengths", type=int, nargs="*", default=list(LENGTHS))
    parser.add_argument("--only", nargs="*", default=weft.attentions(), help="these mechanisms")
    parser.add_argument("--modes", nargs="*", default=list(MODES), help="eager, compiled, reduced")
    parser.add_argument("--at-once", type=int, default=8, help="processes that compile at the same time; 0: none")
    parser.add_argument("--first", type=int, nargs=2, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch._dynamo.config.recompile_limit = 256  # all rows are calls of the same few functions
    if args.first:
        return first_calls(args)
    began = time.time()
    shape = "bfloat16, 16 heads of 64, 16,384 tokens per batch, max_length"
    results = Results(args.out, "gpu_attention", args.resume, shape=shape)
    rows = [(mode, L, *row) for mode in args.modes for L in args.lengths for row in contestants(args.only, L)]
    rows = [row for row in rows if row[0] == "eager" or (row[1] in COMPILED and row[2] in TO_COMPILE)]
    rows = [x for x in rows if not results.has("rows", mode=x[0], L=x[1], name=x[2], causal=x[3])]
    if args.at_once and "eager" in args.modes:
        results.run |= {"first_calls": warm_up(args), "at_once": args.at_once}
        results.save()
    print(f"compiled in {time.time() - began:.0f} s", flush=True)
    for mode, L, name, causal in rows:
        if args.when and args.when.exists():
            break
        if (mode != "eager" and "eager" in args.modes) or not fused(name):
            continue
        try:
            prepared(name, L, causal, mode)
            print(f"{time.time() - began:5.0f} s {L:>6} {name:<26} loaded", flush=True)
        except Exception as error:  # reported when it is timed
            print(f"{L:>6} {name:<26} {type(error).__name__}: {str(error)[:120]}", flush=True)
    print(f"loaded in {time.time() - began:.0f} s", flush=True)
    wait_for(args.when)
    began = time.time()
    for mode, L, name, causal in rows:
        try:
            times = measure(name, L, causal, mode)
        except Exception as error:  # continue with the other mechanisms
            print(f"{L:>6} {name:<26} {type(error).__name__}: {str(error)[:120]}", flush=True)
            torch.cuda.synchronize()
            continue
        results.add("rows", {"L": L, "causal": causal, "name": name, "mode": mode, **times})
        shown = " ".join(f"{value:8.3f}" for value in times.values())
        print(f"{time.time() - began:5.1f} s {L:>6} {name:<26} {'causal' if causal else 'both':<6} {shown}", flush=True)
    print("finished", flush=True)


if __name__ == "__main__":
    main()
