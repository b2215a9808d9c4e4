"""Train on random pathways, finish dense, predict with the ensemble: a small byte-level language model.

    python experiments/subsampled/demo.py --data enwik8                      CPU, some minutes
    python experiments/subsampled/demo.py --data enwik8 --device cuda --length 1024 --dim 512 --layers 8 --steps 4000

Three models see the same batches for the same number of steps: dense; Sall-L4 (4 windows in every layer); Sall-L4 with
a dense finish. The sampled ones are also evaluated as an ensemble. Bits per byte on the last part of the file.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import weft
from weft.models.language import LanguageModel


def make_model(arguments: argparse.Namespace) -> LanguageModel:
    return LanguageModel(
        256,
        max_length=arguments.length,
        dim=arguments.dim,
        heads=arguments.heads,
        head_dim=arguments.dim // arguments.heads,
        layers=arguments.layers,
        mlp_dim=4 * arguments.dim,
        positions="alibi",
        dropout=arguments.dropout,
        attention_dropout=0.0,
        device=arguments.device,
    )


def batch_at(data: torch.Tensor, starts: torch.Tensor, length: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.stack([data[s : s + length + 1] for s in starts.tolist()]).long().to(device)
    return rows[:, :-1], rows[:, 1:]


def train(arguments: argparse.Namespace, data: torch.Tensor, schedule: str, dense_at: float, seed: int):
    """A trained model, and the seconds of its sampled (or only) phase per step."""
    torch.manual_seed(seed)
    model = make_model(arguments)
    if schedule:
        weft.subsample(model, schedule, sigma=(arguments.sigma, arguments.sigma_deep))
    optimizer = torch.optim.AdamW(model.parameters(), arguments.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = max(1, arguments.steps // 20)
    order = torch.Generator().manual_seed(seed)  # the same batches for every variant
    dense_from = math.ceil(dense_at * arguments.steps) if dense_at else arguments.steps
    began, sampled_seconds = time.perf_counter(), 0.0
    for step in range(arguments.steps):
        if schedule and step == dense_from:
            sampled_seconds = (time.perf_counter() - began) / dense_from
            weft.make_dense(model)  # the optimizer knows nothing of it
        done = step / arguments.steps
        rate = min((step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * done)) + 0.02)
        for group in optimizer.param_groups:
            group["lr"] = arguments.learning_rate * rate
        starts = torch.randint(len(data) - arguments.length - 1, (arguments.batch,), generator=order)
        x, y = batch_at(data, starts, arguments.length, arguments.device)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    if arguments.device != "cpu":
        torch.cuda.synchronize()
    return model, sampled_seconds or (time.perf_counter() - began) / arguments.steps


@torch.no_grad()
def bits_per_byte(arguments: argparse.Namespace, model: torch.nn.Module, data: torch.Tensor, samples: int = 0) -> float:
    """On segments that do not overlap; with `samples` from the mean probability of that many sub-models."""
    model.eval()
    predict = weft.ensemble(model, samples, progress=False, seed=0) if samples else None
    starts = torch.arange(0, len(data) - arguments.length - 1, arguments.length)[: arguments.eval_segments]
    total = count = 0.0
    for part in starts.split(arguments.batch):
        x, y = batch_at(data, part, arguments.length, arguments.device)
        scores = predict(x).log_probabilities if predict else model(x).log_softmax(-1)
        total -= scores.gather(-1, y[..., None]).double().sum().item()
        count += y.numel()
    return total / count / math.log(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="any file; its first 90 %% are for training")
    parser.add_argument("--out", type=Path, default=Path("subsampled_demo"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--schedule", default="Sall-L4")
    parser.add_argument("--sigma", type=float, default=0.1)
    parser.add_argument("--sigma-deep", type=float, default=0.225)
    parser.add_argument("--dense-at", type=float, default=0.82)
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--eval-segments", type=int, default=128)
    arguments = parser.parse_args()

    data = torch.from_numpy(np.fromfile(arguments.data, dtype=np.uint8))
    cut = int(0.9 * len(data))
    fit, held = data[:cut], data[cut:]
    variants = {"dense": ("", 0.0), arguments.schedule: (arguments.schedule, 0.0)}
    variants[f"{arguments.schedule} + dense finish"] = (arguments.schedule, arguments.dense_at)
    runs = []
    for seed in range(arguments.seeds):
        for name, (schedule, dense_at) in variants.items():
            model, seconds = train(arguments, fit, schedule, dense_at, seed)
            found = {"": bits_per_byte(arguments, model, held)}
            if schedule:
                found[f", ensemble of {arguments.samples}"] = bits_per_byte(arguments, model, held, arguments.samples)
            for suffix, bits in found.items():
                runs.append({"seed": seed, "model": name + suffix, "bits_per_byte": bits, "seconds_per_step": seconds})
                print(
                    f"seed {seed}  {name + suffix:<45} {bits:.4f} bits per byte, {seconds:.3f} s per step", flush=True
                )
    table = ["| | bits per byte | per seed | s per step |", "|---|---|---|---|"]
    for name in dict.fromkeys(run["model"] for run in runs):
        bits = [run["bits_per_byte"] for run in runs if run["model"] == name]
        seconds = statistics.mean(run["seconds_per_step"] for run in runs if run["model"] == name)
        each = ", ".join(f"{b:.4f}" for b in bits)
        table.append(f"| {name} | {statistics.mean(bits):.4f} | {each} | {seconds:.3f} |")
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "runs.json").write_text(json.dumps({"settings": settings, "runs": runs}, indent=2) + "\n")
    (arguments.out / "table.md").write_text("\n".join(table) + "\n")
    print("\n".join(table))


if __name__ == "__main__":
    main()
