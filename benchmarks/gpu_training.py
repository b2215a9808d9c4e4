"""A Llama-like layer, and training steps of a 12-layer model, with each attention: eager and compiled.

    python3 -m benchmarks.gpu_training [--out benchmarks/results/gpu_training.json] [--lengths L ...] [--only NAME ...]

Width 768, 12 heads of 64, RMSNorm, rotary positions, gated feed-forward of 2,048, over bytes; float32 weights, bfloat16
autocast, fused AdamW; 32,768 tokens per step (one sequence where L is longer). `full` is PyTorch's attention. In
compiled mode every layer is compiled. For one layer, forward and backward: eager and compiled calls with their host
times, and the replay of a CUDA graph of the eager layer. At 8,192 tokens also with the backward in the calling thread
(torch.autograd.set_multithreading_enabled(False)), compiled with mode="reduce-overhead", and with q + k + v in place of
attention ("none"): what PyTorch and torch.compile take without our code.

Layers are compiled first, by several processes, and then loaded. With --when FILE, the times are taken once the file
exists. --resume adds the rows that the newest run in the file does not have. "reduce-overhead" is timed last: after it,
PyTorch's random generator was left in its capturing state, and later draws in the process failed (torch 2.11).

`python -m benchmarks.tables` writes the tables of the documentation.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from benchmarks.gpu_timing import Results, eager_ms, generator, host_ms, in_parallel, median_ms, peak_mib, wait_for

TOKENS, DIM, HEADS, MLP, LAYERS = 32768, 768, 12, 2048, 12
LENGTHS = (8192, 512, 32768, 2048, 131072)
NONE = "none"  # q + k + v in place of attention
ATTENTIONS = ("combiner-fixed", "full", NONE, "linear", "local")
CLOSER = (8192,)  # lengths at which a layer is also timed in one thread, with mode="reduce-overhead", without attention
MODES = ("eager", "compiled", "reduced")


class Sum(nn.Module):
    """In place of attention."""

    name, heads, head_dim, causal, reads_q, reads_k = "sum", HEADS, DIM // HEADS, True, True, True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, bias: Any = None) -> Tensor:
        return q + k + v


class Layer(nn.Module):
    def __init__(self, attention: str):
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        chosen: Any = Sum() if attention == NONE else attention
        self.attention = weft.MultiheadAttention(DIM, HEADS, attention=chosen, causal=True, rope=True)
        self.gate, self.up = (nn.Linear(DIM, MLP, bias=False) for _ in range(2))
        self.down = nn.Linear(MLP, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    def __init__(self, attention: str):
        super().__init__()
        self.embed = nn.Embedding(256, DIM)
        self.layers = nn.ModuleList(Layer(attention) for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, 256, bias=False)

    def forward(self, ids: Tensor, layers: list[Any]) -> Tensor:
        x = self.embed(ids)
        for layer in layers:
            x = layer(x)
        return self.head(self.norm(x))


def autocast() -> Any:
    return torch.autocast("cuda", torch.bfloat16)


def layer_call(layer: nn.Module, L: int) -> Callable[[], Any]:
    """A forward and backward of one layer."""
    shape = max(1, TOKENS // L), L, DIM
    x, dout = (torch.randn(shape, device="cuda", generator=generator()) for _ in range(2))
    x.requires_grad_()
    wanted = [x, *layer.parameters()]

    def call() -> Any:
        with autocast():
            out = layer(x)
        return torch.autograd.grad(out, wanted, dout)

    return call


def time_calls(call: Callable[[], Any], way: str) -> dict[str, float]:
    found = {f"{way}_mib": peak_mib(call), f"{way}_ms": eager_ms(call, 60)}
    return found | {f"{way}_host_ms": host_ms(call, found[f"{way}_ms"])}


@functools.cache
def built(name: str) -> dict[str, Any]:
    """A model, and its layers by mode, which share their weights."""
    torch.manual_seed(0)
    model = Model(name).cuda()
    compiled = [torch.compile(layer, dynamic=False, fullgraph=True) for layer in model.layers]
    reduced = torch.compile(model.layers[0], dynamic=False, fullgraph=True, mode="reduce-overhead")
    return {"model": model, "eager": list(model.layers), "compiled": compiled, "reduced": [reduced]}


def load(name: str, L: int, modes: tuple[str, ...]) -> None:
    """Make the first calls of one layer."""
    for mode in modes:
        call = layer_call(built(name)[mode][0], L)
        for _ in range(4 if mode == "reduced" else 1):  # a CUDA graph is recorded in the second
            call()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def time_steps(model: nn.Module, layers: list[Any], optimizer: torch.optim.Optimizer, L: int) -> dict[str, float]:
    torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    while len(times) < 2 or len(times) < 7 and sum(times[1:]) < 0.5:
        ids = torch.randint(256, (max(1, TOKENS // L), L + 1), device="cuda", generator=generator())
        torch.cuda.synchronize()
        began = time.perf_counter()
        with autocast():
            logits = model(ids[:, :-1], layers)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    if not math.isfinite(loss.item()):
        raise RuntimeError(f"the loss is {loss.item()}")
    seconds = sorted(times[1:])[len(times[1:]) // 2]
    return {
        "step_ms": round(seconds * 1e3, 2),
        "tokens_per_s": round(max(TOKENS, L) / seconds),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "loss": round(loss.item(), 4),
    }


def measure(name: str, L: int, modes: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of one attention at one length: one layer, and training steps in each mode."""
    load(name, L, modes)
    model, found = built(name)["model"], {}
    for mode in modes:
        call = layer_call(built(name)[mode][0], L)
        found |= time_calls(call, mode)
        if L in CLOSER and mode != "reduced":
            with torch.autograd.set_multithreading_enabled(False):
                found |= time_calls(call, f"{mode}_one_thread")
    if "eager" in modes and L <= TOKENS:
        try:
            found["graph_ms"] = median_ms(layer_call(built(name)["eager"][0], L), 60)
        except RuntimeError as error:  # work on the CPU cannot be captured
            print(f"{name} {L}: no CUDA graph: {str(error)[:200]}", flush=True)
    yield (
        "layers",
        {"name": name, "L": L, "modes": list(modes), **{key: round(value, 4) for key, value in found.items()}},
    )
    for mode in modes if name != NONE else ():
        if mode != "reduced":
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
            steps = time_steps(model, built(name)[mode], optimizer, L)
            yield "steps", {"name": name, "L": L, "mode": mode, **steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="add the results to this JSON file")
    parser.add_argument("--resume", action="store_true", help="continue the newest run if it is of this commit")
    parser.add_argument("--when", type=Path, default=None, help="take times when this file exists")
    parser.add_argument("--lengths", type=int, nargs="*", default=list(LENGTHS))
    parser.add_argument("--only", nargs="*", default=list(ATTENTIONS), help="these mechanisms")
    parser.add_argument("--modes", nargs="*", default=list(MODES), help="eager, compiled, reduced")
    parser.add_argument("--at-once", type=int, default=12, help="processes that compile at the same time; 0: none")
    parser.add_argument("--warm", nargs=2, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch._dynamo.config.recompile_limit = 256  # all models are calls of the same layer
    if args.warm:
        return load(args.warm[0], int(args.warm[1]), tuple(args.modes))
    began, results = time.time(), Results(args.out, "gpu_training", args.resume, tokens=TOKENS)
    passes = [tuple(mode for mode in args.modes if mode != "reduced"), ("reduced",) if "reduced" in args.modes else ()]
    passes = [modes for modes in passes if modes]
    rows = [(name, L, modes) for modes in passes for L in args.lengths for name in args.only]
    rows = [(name, L, modes) for name, L, modes in rows if L in CLOSER or (name != NONE and modes != ("reduced",))]
    rows = [x for x in rows if not results.has("layers", name=x[0], L=x[1], modes=list(x[2]))]
    jobs = [["--warm", name, str(L), "--modes", *modes] for name, L, modes in rows] if args.at_once else []
    for _ in in_parallel("gpu_training", jobs, args.at_once):
        pass
    print(f"compiled in {time.time() - began:.0f} s", flush=True)
    for name, L, modes in rows:
        if modes == passes[0] and not (args.when and args.when.exists()):
            load(name, L, modes)
    print(f"loaded in {time.time() - began:.0f} s", flush=True)
    wait_for(args.when)
    began = time.time()
    for name, L, modes in rows:
        try:
            for kind, row in measure(name, L, modes):
                results.add(kind, row)
                print(f"{time.time() - began:4.0f} s {kind} {json.dumps(row)}", flush=True)
        except Exception as error:  # continue with the others
            print(f"{name} {L}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    print("finished", flush=True)


if __name__ == "__main__":
    main()
