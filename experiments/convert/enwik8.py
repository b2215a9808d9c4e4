"""Convert a dense byte model from 1,024 to 8,192 tokens with `weft.convert`.

    python -m experiments.convert.enwik8 --data enwik8.xz --out runs/convert

A Llama of transformers with 12 layers of width 512 is trained on bytes of enwik8 with full attention at 1,024 tokens.
Then each mechanism gets the same minutes: swap, attention transfer at 1,024 tokens, fine-tuning at 8,192. The row
`full` is only fine-tuned: what the longer sequences give without another mechanism. The conversions run at the same
time on one GPU, each in its own process; their speed is measured afterwards, in turns. Validation: 32 windows of 8,192
bytes from the megabyte after the training bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import lzma
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import weft
from weft.lab.bench.timing import How, take_turns
from weft.lab.conversion.convert import language_model_loss
from weft.lab.run import commit

transformers.utils.logging.disable_progress_bar()
SHORT, LONG = 1024, 8192
TRAINING, HELD_OUT = 59_000_000, 1_000_000  # bytes
MECHANISMS: dict[str, dict[str, Any]] = {
    "combiner-fixed": {"block_size": 256},
    "longformer": {"window": 512},
    "linear": {},
    "full": {},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="enwik8, also compressed as .xz; a prefix will do")
    parser.add_argument("--out", type=Path, required=True, help="folder of the weights and of enwik8.json")
    parser.add_argument("--dense-seconds", type=float, default=240)
    parser.add_argument("--seconds", type=float, default=100, help="of each conversion")
    parser.add_argument("--only", nargs="+", choices=MECHANISMS, default=list(MECHANISMS))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rows", type=int, default=32, help="sequences of 1,024 in a batch of dense training")
    parser.add_argument("--long-rows", type=int, default=2, help="sequences of 8,192 in a batch of fine-tuning")
    parser.add_argument("--learning-rate", type=float, default=6e-4, help="of fine-tuning")
    parser.add_argument("--one", choices=MECHANISMS, help=argparse.SUPPRESS)  # a process of its own
    args = parser.parse_args()
    if args.one:
        (args.out / f"{args.one}.json").write_text(json.dumps(convert(args.one, args)))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    if not (args.out / "dense.json").exists():
        (args.out / "dense.json").write_text(json.dumps(train_dense(args)))
    command = [sys.executable, "-m", "experiments.convert.enwik8", *sys.argv[1:]]
    jobs = [subprocess.Popen([*command, "--one", name]) for name in args.only]
    failed = [name for name, job in zip(args.only, jobs, strict=True) if job.wait()]
    result = {
        "commit": commit(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "settings": {key: value for key, value in vars(args).items() if key not in ("data", "out", "one")},
        "dense": json.loads((args.out / "dense.json").read_text()),
        "conversions": {n: json.loads((args.out / f"{n}.json").read_text()) for n in args.only if n not in failed},
        "training": speeds(args),
    }
    (args.out / "enwik8.json").write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


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
    model = build(args).to(device).train()
    data = data.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=device == "cuda")
    peak, steps, done, begin = 1.5e-3, 0, 0.0, time.perf_counter()
    generator = torch.Generator(device).manual_seed(0)
    while done < 1:  # the schedule follows the clock, because other processes may share the GPU
        at = torch.randint(len(data) - SHORT, (args.rows, 1), device=device, generator=generator)
        ids = data[at + torch.arange(SHORT, device=device)].long()
        for group in optimizer.param_groups:
            group["lr"] = peak * min(1.0, (steps + 1) / 100) * (0.05 + 0.475 * (1 + math.cos(math.pi * done)))
        with autocast(device):
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps % 10 == 0:
            value = float(loss.detach()) / math.log(2)
            done = min(1.0, (time.perf_counter() - begin) / args.dense_seconds)
            if steps % 100 == 0 or done == 1:
                print(f"dense step {steps} {value:.3f} bits {time.perf_counter() - begin:.0f} s", flush=True)
    seconds = time.perf_counter() - begin
    model.save_pretrained(args.out / "dense")
    found = bits(model, windows)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": steps,
        "bytes_read": steps * args.rows * SHORT,
        "minutes": seconds / 60,
        "bits_at_1024": float(bits(model, windows.view(-1, SHORT)).mean()),
        "bits_at_8192": float(found.mean()),
        "bits_at_8192_by_eighth": by_part(found),
    }


def convert(name: str, args: argparse.Namespace) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data, windows = read(args.data)
    data = data.to(device)
    options = MECHANISMS[name]
    tune, transfer = steps_that_fit(name, args, data)
    model = transformers.LlamaForCausalLM.from_pretrained(args.out / "dense", attn_implementation="sdpa")
    begin = time.perf_counter()
    report = weft.convert(
        model.to(device),
        name,
        data,
        steps=tune,
        transfer_steps=transfer,
        length=LONG,
        transfer_length=SHORT,
        batch_size=args.long_rows,
        learning_rate=args.learning_rate,
        validation=windows,
        validation_batches=-(-len(windows) // args.long_rows),
        **options,
    )
    minutes = (time.perf_counter() - begin) / 60
    print(report, flush=True)
    found = bits(model, windows)
    return {
        "options": options,
        "bits": {stage: loss / math.log(2) for stage, loss in report.losses.items()},
        "bits_by_eighth": by_part(found),
        "minutes": minutes,
        "report": report.as_dict(),
    }


def steps_that_fit(name: str, args: argparse.Namespace, data: Tensor) -> tuple[int, int]:
    """Steps of fine-tuning and of transfer in four fifths and one fifth of the time, from the time of a few steps.

    A step of transfer takes about as long as one of fine-tuning: it has a second attention, but no other gradients.
    """
    model = transformers.LlamaForCausalLM.from_pretrained(args.out / "dense", attn_implementation="sdpa")
    weft.swap(model.to(data.device), name, **MECHANISMS[name])
    ids = data[: args.long_rows * LONG].view(-1, LONG).long()
    seconds = []
    for _ in range(10):
        begin = time.perf_counter()
        with autocast(data.device.type):
            loss = language_model_loss(model, {"input_ids": ids})
        loss.backward()
        model.zero_grad()
        if data.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    steps = int(args.seconds / statistics.fmean(seconds[2:]))
    return (max(2, steps), 0) if name == "full" else (max(2, steps * 4 // 5), max(2, steps // 5))


def speeds(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens/s and peak memory of forward and backward at 8,192 tokens; the models take turns."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ids = torch.randint(256, (args.long_rows, LONG), device=device)
    calls = {}
    for name in ["dense", *args.only]:
        model = transformers.LlamaForCausalLM.from_pretrained(args.out / "dense", attn_implementation="sdpa").to(device)
        if name != "dense":
            weft.swap(model, name, **MECHANISMS[name])

        def call(model: Any = model) -> None:
            with autocast(device):
                loss = language_model_loss(model, {"input_ids": ids})
            loss.backward()
            model.zero_grad()

        calls[name] = call
    found = take_turns(calls, How(device, repeats=10, budget=10.0))
    return {
        name: {"tokens_per_second": ids.numel() / timing.median, "peak_gib": (timing.memory or 0) / 2**30}
        for name, timing in found.items()
    }


def table(result: dict[str, Any]) -> str:
    dense = result["dense"]
    lines = [
        f"dense: {dense['bits_at_1024']:.3f} bits per byte at 1,024 tokens, {dense['bits_at_8192']:.3f} at 8,192, "
        f"{dense['minutes']:.1f} minutes, {dense['steps']:,} steps",
        "| | after swap | after transfer | after fine-tuning | last 1,024 bytes | minutes | tokens/s in training "
        "| peak GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    speed = {n: f"{t['tokens_per_second']:,.0f} | {t['peak_gib']:.1f}" for n, t in result["training"].items()}
    before = f"{dense['bits_at_8192']:.3f} | {dense['bits_at_8192_by_eighth'][-1]:.3f}"
    lines.append(f"| dense, as it was | – | – | {before} | – | {speed['dense']} |")
    for name, found in result["conversions"].items():
        b = found["bits"]
        cells = [f"{b[stage]:.3f}" if stage in b else "–" for stage in ("after swap", "after transfer")]
        cells += [f"{b['after fine-tuning']:.3f}", f"{found['bits_by_eighth'][-1]:.3f}", f"{found['minutes']:.1f}"]
        lines.append(f"| {name} | {' | '.join(cells)} | {speed[name]} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
