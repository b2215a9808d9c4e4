"""Training steps of the wide-attention study's ListOps models: GPU time, time, and tokens per second.

    python benchmarks/train_listops.py --out benchmarks/results/train_listops.json

The lab's loop with everything that `weft train` does in a step: 32 examples of up to 2,000 tokens, bfloat16, dropout,
Adam. `tokens_per_s` counts 32 x 2,000 tokens per step, as for padded batches; `real_tokens_per_s` does not count
padding, about half of a batch. The time is that of `--steps` steps after `--warmup` others, with nothing else on the
GPU. GPU time is the sum of all kernels, from PyTorch's profiler. The file is written after every model.

A model is ATTENTION:LAYERSxHEADS, with ":padded" or ":compile" added for these. A tiny run on the CPU:

    python benchmarks/train_listops.py --models linear:1x2 --tiny
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from weft.lab import make_config
from weft.lab.bench.report import Report, Table, cell
from weft.lab.bench.timing import How, forget, reason
from weft.lab.data import lengths_of
from weft.lab.loop import Training
from weft.models.presets import STUDY_ATTENTIONS
from weft.tasks import listops

NAMES = [*STUDY_ATTENTIONS, "combiner-fixed"]
MODELS = [f"{name}:{shape}" for shape in ("1x48", "6x8:compile") for name in NAMES]  # as the study's cells run
PROFILED = 6  # steps


def measured(config: Any, steps: int, warmup: int, how: How) -> dict[str, float]:
    began = time.perf_counter()
    if how.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    training = Training(config)
    training.model.train()

    def run(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            training.step += 1
            training._update(training.step)
        training.pending.clear()
        how.wait()
        return time.perf_counter() - start

    run(1)
    found = {"first_step_s": time.perf_counter() - began}
    run(warmup - 1)
    first = training.step
    seconds = run(steps)
    lengths, _ = lengths_of(training.rows.columns["ids"])
    real = sum(int(lengths[training.order.on_host(step)].sum()) for step in range(first, first + steps))
    found["step_ms"] = 1e3 * seconds / steps
    found["tokens_per_s"] = steps * config.batch_size * training.data.length / seconds
    found["real_tokens_per_s"] = real / seconds
    if how.device == "cuda":
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            run(PROFILED)
        kernels = [x for x in profiler.key_averages() if x.self_device_time_total]  # the others are calls of the host
        found["gpu_ms"] = sum(x.self_device_time_total for x in kernels) / PROFILED / 1e3
        found["kernels"] = sum(x.count for x in kernels) / PROFILED
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.0, help="start no further model after this time; 0: all")
    parser.add_argument("--data", default="", help="a folder with ListOps; by default, 960 examples are generated")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on the CPU")
    parser.add_argument("--out", default="", help="also write the results to this JSON file")
    args = parser.parse_args()
    began = time.perf_counter()
    how = How("cpu") if args.tiny else How("cuda", "bf16-mixed")
    report = Report("train_listops", how, vars(args), Path(args.out) if args.out else None)
    sizes = {"dim": 16, "head_dim": 8, "mlp_dim": 16, "batch_size": 4} if args.tiny else {}
    table = Table("ListOps", ["", "GPU, ms", "step, ms", "M tokens/s", "M real tokens/s", "first step, s"])
    with tempfile.TemporaryDirectory() as folder:
        if not args.data:
            listops.make(Path(folder), sizes={"train": 960, "val": 32, "test": 32})
        for number, model in enumerate(args.models.split(",")):
            if args.seconds and time.perf_counter() - began > args.seconds:
                print(f"not measured, the time is up: {model}", flush=True)
                continue
            name, shape, *flags = model.split(":")
            layers, heads = map(int, shape.split("x"))
            try:
                forget(how)
                config = make_config(
                    "listops", data=args.data or folder, out=f"{folder}/{number}", attention=name, layers=layers,
                    heads=heads, attention_dropout=0.0 if name == "combiner-fixed" else None,
                    packed="padded" not in flags, compile="compile" in flags, precision=how.precision,
                    accelerator=how.device, **sizes,
                )  # fmt: skip
                entry: dict[str, Any] = {"model": model, **measured(config, args.steps, args.warmup, how)}
            except Exception as error:  # show failures in the table
                entry = {"model": model, "error": reason(error)}
            report.add(entry)
            rates = [entry.get(key, float("nan")) / 1e6 for key in ("tokens_per_s", "real_tokens_per_s")]
            times = [cell(entry.get(key), 2) for key in ("gpu_ms", "step_ms")]
            table.rows.append([model, *times, *(cell(x, 2) for x in rates), cell(entry.get("first_step_s"))])
            print(
                f"[{time.perf_counter() - began:.0f} s] {' '.join(table.rows[-1])} {entry.get('error', '')}", flush=True
            )
    report.finish([table], [], markdown=False)


if __name__ == "__main__":
    main()
