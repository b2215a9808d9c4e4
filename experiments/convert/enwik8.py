"""Convert a dense byte model from 1,024 to 8,192 tokens with `weft.convert`.

    python -m experiments.convert.enwik8 --data enwik8.xz --out runs/convert

A Llama of transformers with 12 layers of width 512 is trained on bytes of enwik8 with full attention at 1,024 tokens.
Then each mechanism gets the same minutes: swap, attention transfer at 1,024 tokens, fine-tuning at 8,192. The row
`full` is only fine-tuned: what the longer sequences give without another mechanism. The conversions run at the same
time on one GPU, each in its own process; their speed is measured afterwards, in turns. Validation: 32 windows of 8,192
bytes from the megabyte after the training bytes.

The same command continues a run that was stopped. `enwik8.json` is written after every stage.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import lzma
import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import weft
from experiments.convert.table import table
from weft.lab.bench.timing import How, take_turns
from weft.lab.conversion.batches import Batch, Tokens
from weft.lab.conversion.convert import language_model_loss
from weft.lab.conversion.parts import Parts
from weft.lab.run import commit
from weft.tasks.files import atomic

transformers.utils.logging.disable_progress_bar()
SHORT, LONG = 1024, 8192
TRAINING, HELD_OUT = 59_000_000, 1_000_000  # bytes


@dataclass(frozen=True)
class Recipe:
    options: dict[str, Any]
    transfer: float  # its share of the steps
    transfer_learning_rate: float
    learning_rate: float


# `longformer` is nearly exact after the swap: larger rates make it worse. `linear` learns almost anew.
MECHANISMS = {
    "combiner-fixed": Recipe({"block_size": 256}, transfer=0.3, transfer_learning_rate=3e-4, learning_rate=3e-4),
    "longformer": Recipe({"window": 512}, transfer=0.1, transfer_learning_rate=1e-4, learning_rate=3e-4),
    "linear": Recipe({}, transfer=0.2, transfer_learning_rate=3e-3, learning_rate=2e-3),
    "full": Recipe({}, transfer=0.0, transfer_learning_rate=0.0, learning_rate=3e-4),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="enwik8, also compressed as .xz; a prefix will do")
    parser.add_argument("--out", type=Path, required=True, help="folder of the weights and of enwik8.json")
    parser.add_argument("--dense-seconds", type=float, default=150)
    parser.add_argument("--seconds", type=float, default=100, help="of each conversion")
    parser.add_argument("--only", nargs="+", choices=MECHANISMS, default=list(MECHANISMS))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rows", type=int, default=32, help="sequences of 1,024 in a batch of dense training")
    parser.add_argument("--long-rows", type=int, default=2, help="sequences of 8,192 in a batch of fine-tuning")
    parser.add_argument("--one", choices=MECHANISMS, help=argparse.SUPPRESS)  # a process of its own
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.one:
        write(args.out / f"{args.one}.json", convert(args.one, args))
        return
    if not (args.out / "dense.json").exists():
        write(args.out / "dense.json", train_dense(args))
    collected(args)
    for file in args.out.glob("*.ready"):  # of a run that was stopped
        file.unlink()
    command = [sys.executable, "-m", "experiments.convert.enwik8", *sys.argv[1:]]
    todo = [name for name in args.only if not (args.out / f"{name}.json").exists()]
    jobs = {name: subprocess.Popen([*command, "--one", name]) for name in todo}
    running = set(todo)
    while running:
        time.sleep(2)
        collected(args)
        running = {name for name in running if jobs[name].poll() is None}
    write(args.out / "speeds.json", speeds(args))
    print(table(collected(args)))
    failed = [name for name in todo if jobs[name].returncode]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; the same command continues")


def write(path: Path, found: dict[str, Any]) -> None:
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(found, indent=1) + "\n")


def collected(args: argparse.Namespace) -> dict[str, Any]:
    """Write enwik8.json: what has been measured so far."""
    done = {}
    for name in ("dense", "speeds", *args.only):
        files = [args.out / f"{name}.json", args.out / name / "report.json"]  # the second while a conversion runs
        if found := [file for file in files if file.exists()]:
            done[name] = json.loads(found[0].read_text())
    result = {
        "commit": commit(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "settings": {key: value for key, value in vars(args).items() if key not in ("data", "out", "one")},
        "dense": done.pop("dense"),
        "training": done.pop("speeds", {}),
        "conversions": {name: found for name, found in done.items() if "bits" in found},
        "unfinished": {name: found["losses"] for name, found in done.items() if "bits" not in found},
    }
    write(args.out / "enwik8.json", result)
    return result


def read(path: Path) -> tuple[Tensor, Tensor]:
    """Training bytes, and validation windows (32, 8192)."""
    opened = lzma.open(path) if path.suffix == ".xz" else open(path, "rb")
    with opened as file:
        data = torch.frombuffer(bytearray(file.read(TRAINING + HELD_OUT)), dtype=torch.uint8)
    if len(data) < TRAINING + HELD_OUT:
        raise SystemExit(f"{path} has {len(data):,} bytes, expected at least {TRAINING + HELD_OUT:,}")
    at = torch.linspace(0, HELD_OUT - LONG, 32).long()[:, None] + torch.arange(LONG)
    return data[:TRAINING], data[TRAINING:][at]


def build(args: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=args.width,
        intermediate_size=args.width * 11 // 4,
        num_hidden_layers=args.layers,
        num_attention_heads=max(1, args.width // 64),
        max_position_embeddings=LONG,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    return transformers.LlamaForCausalLM(config)


def autocast(device: str) -> Any:
    return torch.autocast(device, torch.bfloat16) if device == "cuda" else contextlib.nullcontext()


def backward(model: Any) -> Callable[[Batch, float], Tensor]:
    def once(batch: Batch, share: float) -> Tensor:
        with autocast(batch["input_ids"].device.type):
            loss = language_model_loss(model, batch) * share
        loss.backward()
        return loss.detach()

    return once


def bits(model: Any, windows: Tensor) -> Tensor:
    """Bits per byte at every position, (L - 1,)."""
    model.eval()
    device = next(model.parameters()).device
    total = torch.zeros(windows.shape[1] - 1, device=device)
    with torch.no_grad(), autocast(device.type):
        for part in windows.split(max(1, 2 * LONG // windows.shape[1])):
            ids = part.to(device).long()
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
            total += F.cross_entropy(logits.transpose(1, 2).float(), ids[:, 1:], reduction="none").sum(0)
    return (total / len(windows) / math.log(2)).cpu()


def by_part(found: Tensor) -> list[float]:
    """Means over each eighth of the window."""
    return [round(float(part.mean()), 4) for part in found.tensor_split(8)]


def train_dense(args: argparse.Namespace) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data, windows = read(args.data)
    source = Tokens(data.to(device), args.rows, SHORT, seed=0)
    model = build(args).to(device).train()
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    optimizers = {  # in few steps, Muon gets further than AdamW alone
        4e-3: torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        3e-3: torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0, fused=device == "cuda"),
    }
    steps, before, saved = 0, 0.0, args.out / "dense.pt"
    if saved.exists():
        found = torch.load(saved, map_location=device)
        for each, state in zip([model, *optimizers.values()], found["states"], strict=True):
            each.load_state_dict(state)
        steps, before = found["steps"], found["seconds"]
        print(f"dense: continuing after step {steps}", flush=True)
    parts, begin, seconds, last = Parts(), time.perf_counter() - before, before, before
    while seconds < args.dense_seconds:  # the schedule follows the clock, because other processes may share the GPU
        done = seconds / args.dense_seconds
        factor = min(1.0, (steps + 1) / 50) * (0.05 + 0.475 * (1 + math.cos(math.pi * done)))
        steps += 1
        loss = parts.sum(model, source.batch(steps), backward(model))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for peak, optimizer in optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
            optimizer.step()
        if steps % 10 == 0:
            value = float(loss) / math.log(2)  # waits for the GPU, so that the clock is right
            seconds = time.perf_counter() - begin
            if steps % 100 == 0:
                print(f"dense step {steps} {value:.3f} bits {seconds:.0f} s", flush=True)
            if seconds - last > 60:
                states = [each.state_dict() for each in (model, *optimizers.values())]
                with atomic(saved) as temporary:
                    torch.save({"states": states, "steps": steps, "seconds": seconds}, temporary)
                last = seconds
    model.save_pretrained(args.out / "dense")
    long = bits(model, windows)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": steps,
        "bytes_read": steps * args.rows * SHORT,
        "minutes": seconds / 60,
        "bits_at_1024": float(bits(model, windows.view(-1, SHORT)).mean()),
        "bits_at_8192": float(long.mean()),
        "bits_at_8192_by_eighth": by_part(long),
    }


def convert(name: str, args: argparse.Namespace) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data, windows = read(args.data)
    data = data.to(device)
    recipe = MECHANISMS[name]
    plan = args.out / f"{name}.plan.json"
    if plan.exists():
        (args.out / f"{name}.ready").touch()  # the others need not wait
    else:
        write(plan, plan_that_fits(name, args, data))
    model = transformers.LlamaForCausalLM.from_pretrained(args.out / "dense", attn_implementation="sdpa")
    report = weft.convert(
        model.to(device),
        name,
        data,
        length=LONG,
        transfer_length=SHORT,
        batch_size=args.long_rows,
        learning_rate=recipe.learning_rate,
        transfer_learning_rate=recipe.transfer_learning_rate,
        validation=windows,
        validation_batches=-(-len(windows) // args.long_rows),
        folder=args.out / name,
        save_every=250,
        **json.loads(plan.read_text()),
        **recipe.options,
    )
    print(report, flush=True)
    return {
        "options": recipe.options,
        "bits": {stage: loss / math.log(2) for stage, loss in report.losses.items()},
        "bits_by_eighth": by_part(bits(model, windows)),
        "minutes": sum(report.seconds.values()) / 60,
        "report": report.as_dict(),
    }


def plan_that_fits(name: str, args: argparse.Namespace, data: Tensor) -> dict[str, int]:
    """Steps of fine-tuning and of transfer in the given time, from the time of a few steps.

    A step of transfer takes about as long as one of fine-tuning: it has a second attention, but no other gradients.
    The processes wait for each other before they measure, because they share the GPU.
    """
    model = transformers.LlamaForCausalLM.from_pretrained(args.out / "dense", attn_implementation="sdpa")
    weft.swap(model.to(data.device), name, **MECHANISMS[name].options)
    batch, parts = {"input_ids": data[: args.long_rows * LONG].view(-1, LONG).long()}, Parts()

    def steps(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            parts.sum(model, batch, backward(model))
        if data.is_cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) / count

    steps(3)
    (args.out / f"{name}.ready").touch()
    begin, others = time.perf_counter(), [other for other in args.only if not (args.out / f"{other}.json").exists()]
    while not all((args.out / f"{other}.ready").exists() for other in others) and time.perf_counter() - begin < 60:
        steps(1)
    count = max(8, int(args.seconds / steps(12)))
    transfer = int(count * MECHANISMS[name].transfer)
    return {"steps": count - transfer, "transfer_steps": transfer}


def speeds(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens/s and peak memory of forward and backward at 8,192 tokens; the models take turns."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ids = torch.randint(256, (args.long_rows, LONG), device=device)
    calls = {}
    for name in ["dense", *args.only]:
        model = transformers.LlamaForCausalLM.from_pretrained(args.out / "dense", attn_implementation="sdpa").to(device)
        if name != "dense":
            weft.swap(model, name, **MECHANISMS[name].options)

        calls[name] = partial(Parts().sum, model, {"input_ids": ids}, backward(model))
    found = take_turns(calls, How(device, repeats=10, budget=10.0))
    return {
        name: {"tokens_per_second": ids.numel() / timing.median, "peak_gib": (timing.memory or 0) / 2**30}
        for name, timing in found.items()
    }


if __name__ == "__main__":
    main()
