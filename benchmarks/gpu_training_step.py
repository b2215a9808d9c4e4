"""Tokens per second of a whole training step, and the longest sequence that trains, with each attention.

    python3 -m benchmarks.gpu_training_step [--out FILE.json] [--limit SECONDS]

A 12-layer, 768-wide decoder over bytes, 12 heads of 64, rotary positions; float32 weights, bfloat16 autocast, fused
AdamW, every block compiled. `full` must use cuDNN's attention and `combiner-fixed` its kernels. Speeds are for 32,768
tokens per step; the longest sequence is found by doubling, one sequence per step, first as above and
then with every block recomputed in the backward. Each attention runs in its own process.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from weft.models.language import LanguageModel  # noqa: E402

TOKENS = 32768
ATTENTIONS: dict[str, dict[str, Any]] = {"full": {}, "combiner-fixed": {"backend": "triton"}}


class Recomputed(nn.Module):
    """A block whose activations are recomputed in the backward."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, *args: Any) -> Tensor:
        return checkpoint(self.block, *args, use_reentrant=False)


def make_model(attention: str, L: int, recompute: bool) -> nn.Module:
    torch.manual_seed(0)
    model = LanguageModel(
        256, max_length=L, dim=768, heads=12, head_dim=64, layers=12, mlp_dim=3072, attention=attention,
        attention_options=ATTENTIONS[attention], positions="rope", dropout=0.0, device="cuda",
    )  # fmt: skip
    for i, block in enumerate(model.blocks):
        block.compile(fullgraph=True, dynamic=False)
        if recompute:
            model.blocks[i] = Recomputed(block)
    return model


def only_cudnn() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_math_sdp(False)


def train(attention: str, L: int, *, recompute: bool = False, steps: int = 8, warmup: int = 3) -> dict[str, Any]:
    B = max(1, TOKENS // L)
    model = make_model(attention, L, recompute)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    torch.cuda.reset_peak_memory_stats()
    times = []
    for step in range(warmup + steps):
        ids = torch.randint(256, (B, L + 1), device="cuda")
        torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        if step >= warmup:
            times.append(time.perf_counter() - began)
    if not math.isfinite(loss.item()):
        raise RuntimeError(f"{attention} at {L}: the loss is {loss.item()}")
    seconds = sorted(times)[len(times) // 2]
    return {
        "attention": attention,
        "L": L,
        "batch": B,
        "recompute": recompute,
        "seconds": seconds,
        "tokens_per_second": B * L / seconds,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "loss": loss.item(),
    }


def worker(attention: str, part: str, limit: float) -> None:
    """Prints one line of JSON per result, so that results before a time limit are kept."""
    began = time.time()
    if attention == "full":
        only_cudnn()
    if part == "speed":
        for L in (8192, 32768):
            print(json.dumps(train(attention, L)), flush=True)
        return
    recompute = part == "recompute"
    L = 524288 if recompute else 131072
    while time.time() - began < limit:
        try:
            print(json.dumps(train(attention, L, recompute=recompute, steps=1, warmup=1)), flush=True)
        except torch.OutOfMemoryError:
            print(json.dumps({"attention": attention, "L": L, "recompute": recompute, "failed": "memory"}), flush=True)
            return
        gc.collect()
        torch.cuda.empty_cache()
        L *= 2


def run(attention: str, part: str, limit: float) -> list[dict[str, Any]]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_training_step", "--worker", attention, part]
    began = time.time()
    try:
        done = subprocess.run(
            [*command, "--limit", str(limit)], cwd=ROOT, capture_output=True, text=True, timeout=limit
        )
        out, problem = done.stdout, "" if done.returncode == 0 else done.stderr[-800:]
    except subprocess.TimeoutExpired as error:
        out = error.stdout or b""
        out, problem = out if isinstance(out, str) else out.decode(), f"stopped after {limit:.0f} s"
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    if problem:
        rows.append({"attention": attention, "part": part, "failed": problem})
    print(f"# {attention} {part}: {time.time() - began:.0f} s", flush=True)
    return rows


def show(row: dict[str, Any]) -> None:
    name = f"{row['attention']}{' recomputed' if row.get('recompute') else ''}"
    if "failed" in row:
        print(f"{row.get('L', '-'):>9} {name:<28} {row['failed']}", flush=True)
        return
    print(
        f"{row['L']:>9} {name:<28} {row['batch']:>3} {row['tokens_per_second']:>12.0f} {row['seconds'] * 1e3:>10.1f} "
        f"{row['peak_gib']:>8.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="write the results to this JSON file")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each process")
    parser.add_argument("--parts", nargs="*", default=["speed", "longest"], choices=["speed", "longest", "recompute"])
    parser.add_argument("--commit", default="", help="commit to record")
    parser.add_argument("--worker", nargs=2, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker[0], args.worker[1], args.limit)
        return
    print(f"{'L':>9} {'attention':<28} {'B':>3} {'tokens/s':>12} {'ms/step':>10} {'GiB':>8}")
    rows = []
    for part in args.parts:
        for attention in ATTENTIONS:
            found = run(attention, part, args.limit)
            rows += found
            for row in found:
                show(row)
    report = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": args.commit, "rows": rows}
    print(f"{report['gpu']}, torch {report['torch']}")
    if args.out:
        args.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
