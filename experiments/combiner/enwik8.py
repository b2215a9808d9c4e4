"""A byte-level decoder on enwik8 at 4k context, each attention for the same minutes of one device.

    weft data get enwik8
    python experiments/combiner/enwik8.py --data data --minutes 5 --out runs/enwik8

    dense            causal full attention
    subsampled       Sall-L4, σ from 0.1 to 0.225 with depth, dense for the last 18 % of the steps; also as an ensemble
    combiner-fixed   or any other causal mechanism by its name
    cached           full attention and a gated recurrent cache beside it: what each row of the batch read before

Not a table of a paper: those train for days (see the README). One model for all: rotary positions, 12 layers of width
512, no dropout, AdamW, warm-up and cosine, bfloat16. Rows of the batch are streams: each step reads on where the last
one stopped. The clock stands still while a model compiles and is evaluated. Bits per byte are of segments that do not
overlap, in which the first bytes have no context but a cache's.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from weft.attention.subsampled import Subsampling
from weft.layers import CachedAttention
from weft.models.language import LanguageModel
from weft.tasks import get_task
from weft.tasks.config import make_config

CALIBRATION = 20  # steps timed to find out how many fit into the minutes


class Streams:
    """A text as `rows` streams side by side; `segment(t)` is the t-th piece of each, with the byte after it."""

    def __init__(self, content: bytes, rows: int, length: int, device: torch.device):
        whole = torch.from_numpy(np.frombuffer(content, np.uint8).copy()).to(device)
        self.count = (len(whole) - 1) // (rows * length)  # segments per stream
        if not self.count:
            raise SystemExit(f"{len(whole)} bytes are not enough for {rows} streams of {length}")
        size = self.count * length
        self.inputs = whole[: rows * size].view(rows, self.count, length)
        self.targets = whole[1 : rows * size + 1].view(rows, self.count, length)

    def segment(self, number: int) -> tuple[Tensor, Tensor]:
        number %= self.count
        return self.inputs[:, number].long(), self.targets[:, number].long()


def make_model(name: str, o: argparse.Namespace, device: torch.device) -> nn.Module:
    torch.manual_seed(o.seed)
    model = LanguageModel(
        256,
        max_length=o.length,
        dim=o.dim,
        heads=o.heads,
        head_dim=o.dim // o.heads,
        layers=o.layers,
        mlp_dim=4 * o.dim,
        attention="full" if name in ("dense", "subsampled", "cached") else name,
        positions="rope",
        dropout=0.0,
        device=device,
    )
    if name == "subsampled":
        weft.subsample(model, o.schedule, sigma=(o.sigma, o.sigma_deep))
    if name == "cached":
        weft.cache(model, 0.5, length=o.slots, delayed=True, scope="stream", eval_update=True)
    if o.compile:
        for block in model.blocks:
            block.compile(dynamic=False)
    return model


def caches(model: nn.Module) -> list[CachedAttention]:
    return [m for m in model.modules() if isinstance(m, CachedAttention)]


@torch.no_grad()
def bits_per_byte(model: nn.Module, text: Streams, segments: int, samples: int = 0) -> float:
    """Of the first `segments` of every stream; with `samples` from the mean probability of that many sub-models."""
    held = [copy.deepcopy(layer.cache.state_dict()) for layer in caches(model)]  # training goes on where it was
    for layer in caches(model):
        layer.reset()
    was_training = model.training
    model.eval()
    predict = weft.ensemble(model, samples, progress=False, seed=0) if samples else None
    total = torch.zeros((), dtype=torch.float64, device=text.inputs.device)
    segments = min(segments or text.count, text.count)
    for number in range(segments):
        x, y = text.segment(number)
        with autocast(x.device):
            scores = predict(x).log_probabilities if predict else model(x).float().log_softmax(-1)
        total -= scores.gather(-1, y[..., None]).double().sum()
    model.train(was_training)
    for layer, state in zip(caches(model), held, strict=True):
        layer.reset()
        layer.cache.load_state_dict(state)
    return total.item() / (segments * text.inputs[:, 0].numel() * math.log(2))


def train(name: str, texts: dict[str, Streams], o: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    model = make_model(name, o, device)
    optimizer = torch.optim.AdamW(
        model.parameters(), o.learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=device.type == "cuda"
    )
    sampled = any(isinstance(m, Subsampling) for m in model.modules())
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    def backward(number: int) -> Tensor:
        x, y = texts["train"].segment(number)
        with autocast(device):
            loss = F.cross_entropy(model(x).float().flatten(0, 1), y.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        return loss.detach()

    def step(number: int, rate: float) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = o.learning_rate * rate
        loss = backward(number)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    def compile_again() -> None:
        """A model that was switched between sampled and dense, or emptied, compiles again: not on the clock."""
        for number in range(3):
            backward(number)
        synchronise(device)

    def seconds_per_step() -> float:
        """With a rate of zero, which leaves the weights as they are; the first steps compile."""
        for number in range(4):
            step(number, 0.0)
        synchronise(device)
        began = time.perf_counter()
        for number in range(0 if o.steps else CALIBRATION):
            step(number, 0.0)
        synchronise(device)
        return (time.perf_counter() - began) / CALIBRATION

    per_step = seconds_per_step()
    if sampled:
        weft.make_dense(model)
        share = o.dense_at or 1.0
        per_step = share * per_step + (1 - share) * seconds_per_step()
        weft.subsampling(model, True)
        compile_again()
    steps = o.steps or max(1, int(o.minutes * 60 / per_step))
    looks = sorted({max(1, round(steps * (i + 1) / o.looks)) for i in range(o.looks)})
    dense_from = math.ceil(o.dense_at * steps) if sampled and o.dense_at else steps
    bits_per_byte(model, texts["val"], 2)  # compiles the evaluation
    optimizer.state.clear()
    for _ in range(2):  # a cache that was emptied compiles once more
        for layer in caches(model):
            layer.reset()
        compile_again()
    for layer in caches(model):
        layer.reset()
    torch.manual_seed(o.seed)
    losses: list[Tensor] = []
    found: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters()), "steps": steps}
    curve, seconds = [], 0.0
    synchronise(device)
    began = time.perf_counter()
    for number in range(steps):
        if number == dense_from:
            synchronise(device)
            seconds += time.perf_counter() - began
            found["before_dense_finish"] = {"step": number, **tested(model, texts, o, sampled)}
            weft.make_dense(model)
            compile_again()
            print(f"{name}: dense from step {number} on, {found['before_dense_finish']}", flush=True)
            synchronise(device)
            began = time.perf_counter()
        warm = (number + 1) / max(1.0, o.warmup * steps)
        losses.append(step(number, min(warm, 0.5 * (1 + math.cos(math.pi * number / steps)) + 0.01)))
        if number + 1 in looks:
            synchronise(device)
            seconds += time.perf_counter() - began
            value = bits_per_byte(model, texts["val"], o.look_segments)
            curve.append([number + 1, round(seconds, 1), round(value, 4)])
            print(f"{name}: step {number + 1} of {steps}, {seconds:.0f} s, {value:.4f} bits per byte", flush=True)
            if not math.isfinite(losses[-1].item()):
                found["stopped"] = f"the loss of step {number + 1} is not finite"
                break
            synchronise(device)
            began = time.perf_counter()
    done = len(losses)
    read = done * o.batch * o.length
    every = max(1, done // 100)
    kept = torch.stack(losses).float().cpu() / math.log(2)
    found |= {
        "seconds": round(seconds, 1),
        "bytes_read": read,
        "bytes_per_second": round(read / max(seconds, 1e-9)),
        "train_bits_every": every,
        "train_bits": [round(kept[i : i + every].mean().item(), 4) for i in range(0, done, every)],
        "val_step_seconds_bits": curve,
        "test": tested(model, texts, o, sampled),
    }
    if device.type == "cuda":
        found["peak_gib"] = round(torch.cuda.max_memory_allocated(device) / 2**30, 2)
    if caches(model):
        found["share_of_cache"] = [[round(v, 3) for v in layer.share.tolist()] for layer in caches(model)]
    return found


def tested(model: nn.Module, texts: dict[str, Streams], o: argparse.Namespace, sampled: bool) -> dict[str, float]:
    """Bits per byte of test text; the ensemble's beside the one dense pass on the same, shorter part."""
    found = {"bits_per_byte": bits_per_byte(model, texts["test"], o.test_segments)}
    if sampled and o.samples:
        found["part"] = bits_per_byte(model, texts["test"], o.ensemble_segments)
        found[f"part, ensemble of {o.samples}"] = bits_per_byte(model, texts["test"], o.ensemble_segments, o.samples)
    return {key: round(value, 4) for key, value in found.items()}


def autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(device.type, torch.bfloat16)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="data", help="the folder that holds enwik8, enwik8.zip or enwik8.xz")
    parser.add_argument("--text", type=Path, help="any other file in place of enwik8, cut 90/5/5")
    parser.add_argument("--out", type=Path, default=Path("runs/enwik8"))
    parser.add_argument("--models", nargs="+", default=["dense", "subsampled", "combiner-fixed", "cached"])
    parser.add_argument("--minutes", type=float, default=5.0, help="of training, for each model")
    parser.add_argument("--steps", type=int, help="in place of the minutes: the same seed then gives the same run")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=16, help="streams")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--warmup", type=float, default=0.05, help="share of the steps")
    parser.add_argument("--schedule", default="Sall-L4")
    parser.add_argument("--sigma", type=float, default=0.1)
    parser.add_argument("--sigma-deep", type=float, default=0.225)
    parser.add_argument("--dense-at", type=float, default=0.82, help="share of the steps; 0: never dense")
    parser.add_argument("--samples", type=int, default=10, help="members of the ensemble; 0: none")
    parser.add_argument("--slots", type=int, default=512, help="of the cache, per layer")
    parser.add_argument("--looks", type=int, default=10, help="evaluations on validation text")
    parser.add_argument("--look-segments", type=int, default=4, help="segments of each stream for these")
    parser.add_argument("--test-segments", type=int, default=0, help="the same at the end; 0: all the test text")
    parser.add_argument("--ensemble-segments", type=int, default=8, help="the same for the ensemble")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    o = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64  # every layer has a σ of its own
    task = get_task("text" if o.text else "enwik8")
    config = make_config(task.name, data=str(o.text or o.data))
    parts = task.parts(task.content(config))  # type: ignore[attr-defined]  # tasks of bytes have parts
    texts = {
        key: Streams(part, o.batch, o.length, device) for key, part in zip(("train", "val", "test"), parts, strict=True)
    }
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(o).items()}
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    results: dict[str, Any] = {}
    o.out.mkdir(parents=True, exist_ok=True)
    for name in o.models:
        torch._dynamo.reset()
        results[name] = train(name, texts, o, device)
        about = {"settings": settings, "device": machine, "torch": torch.__version__, "models": results}
        (o.out / "result.json").write_text(json.dumps(about, indent=1) + "\n")
        (o.out / "table.md").write_text(table(results))
    print(table(results))


def table(results: dict[str, Any]) -> str:
    lines = ["| | parameters | steps | MB read | seconds | MB/s | GiB | test bits per byte |", "|---|" + "---|" * 7]
    for name, r in results.items():
        bits = [f"{key}: {value:.4f}" if key != "bits_per_byte" else f"{value:.4f}" for key, value in r["test"].items()]
        lines.append(
            f"| {name} | {r['parameters']:,} | {r['steps']:,} | {r['bytes_read'] / 1e6:.0f} | {r['seconds']:.0f} "
            f"| {r['bytes_per_second'] / 1e6:.3f} | {r.get('peak_gib', '')} | {'; '.join(bits)} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
