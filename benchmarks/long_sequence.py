"""The longest sequence that trains on one GPU, its speed and memory.

    python3 -m benchmarks.long_sequence combiner-fixed linear local [--out FILE.json] [--offload] [--longest 1048576]

A 12-layer, 768-wide language model (12 heads of 64, 50,304 tokens, rotary positions), one sequence per step, float32
weights, bfloat16 autocast, fused AdamW. Blocks are recomputed in the backward pass, and logits exist for 8,192 tokens
at a time. `--offload` keeps the inputs of the blocks in CPU memory. Lengths double until memory or time runs out.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from pathlib import Path
from typing import Any

import torch

from weft.lab.fabric import checkpoint_activations
from weft.lab.run import commit
from weft.models.language import LanguageModel


def make_model(attention: str, length: int, offload: bool, **size: Any) -> LanguageModel:
    torch.manual_seed(0)
    given = dict(vocab=50304, dim=768, heads=12, head_dim=64, layers=12, mlp_dim=3072, device="cuda") | size
    model = LanguageModel(max_length=length, attention=attention, positions="rope", dropout=0.0, **given)
    checkpoint_activations(model, offload)
    return model


def train(attention: str, length: int, offload: bool, steps: int) -> dict[str, Any]:
    """Time and memory of `steps` training steps, after one that is not counted."""
    model = make_model(attention, length, offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    ids = torch.randint(model.vocab, (1, length + 1), device="cuda")
    times, losses = [], []
    for step in range(steps + 1):
        if step == 1:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(ids[:, :-1], targets=ids[:, 1:]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        times.append(time.perf_counter() - began)
    if not all(map(math.isfinite, losses)):
        raise RuntimeError(f"{attention} at {length}: the losses are {losses}")
    seconds = sorted(times[1:])[(len(times) - 1) // 2]
    return {
        "seconds": round(seconds, 4),
        "tokens_per_s": round(length / seconds),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "losses": [round(x, 4) for x in losses],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attention", nargs="+")
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--first", type=int, default=65536)
    parser.add_argument("--longest", type=int, default=1 << 20)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--limit", type=float, default=1e9, help="start no length after this many seconds")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began, rows = time.monotonic(), []
    for attention in args.attention:
        length = args.first
        while length <= args.longest and time.monotonic() - began < args.limit:
            row: dict[str, Any] = {"attention": attention, "length": length, "offload": args.offload}
            try:
                row |= train(attention, length, args.offload, args.steps)
            except torch.OutOfMemoryError as error:
                row["failed"] = str(error).splitlines()[0][:200]
            rows.append(row)
            print(json.dumps(row), flush=True)
            if args.out:
                report = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": commit()}
                args.out.write_text(json.dumps({**report, "rows": rows}, indent=1) + "\n")
            gc.collect()
            torch.cuda.empty_cache()
            if "failed" in row:
                break
            length *= 2


if __name__ == "__main__":
    main()
