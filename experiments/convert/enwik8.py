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
    parser.add_argument("--rows", type=int, default=64, help="sequences of 1,024 in a batch; of 8,192 an eighth of it")
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
    peak, step, steps, begin, start = 1.5e-3, 0, 10**9, time.perf_counter(), 0.0
    generator = torch.Generator(device).manual_seed(0)
    while step < steps:
        at = torch.randint(len(data) - SHORT, (args.rows, 1), device=device, generator=generator)
        ids = data[at + torch.arange(SHORT, device=device)].long()
        done = step / steps if steps < 10**9 else 0.0
        for group in optimizer.param_groups:
            group["lr"] = peak * min(1.0, (step + 1) / 100) * (0.05 + 0.475 * (1 + math.cos(math.pi * done)))
        with autocast(device):
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 100 == 0 or step in (5, 25):
            value, now = float(loss.detach()) / math.log(2), time.perf_counter()
            if step == 5:
                start = now  # after the warm-up of the libraries
            if step == 25:  # the steps that fit into the time, for the schedule
                steps = step + int((args.dense_seconds - (now - begin)) / ((now - start) / 20))
            if step >= 25:
                print(f"dense {step}/{steps} {value:.3f} bits {now - begin:.0f} s", flush=True)
    float(loss.detach())
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
    rows, options = max(1, args.rows * SHORT // LONG), MECHANISMS[name]
    tune, transfer = steps_that_fit(name, args, data, rows)
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
        batch_size=rows,
        learning_rate=args.learning_rate,
        validation=windows,
        validation_batches=-(-len(windows) // rows),
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


def steps_that_fit(name: str, args: argparse.Namespace, data: Tensor, rows: int) -> tuple[int, int]:
    """Steps of fine-tuning and of transfer: four fifths and one fifth of the time."""
    model = transformers.LlamaForCausalLM.from_pretrained(args.out / "dense", attn_implementation="sdpa")
    begin = time.perf_counter()
    report = weft.convert(
        model.to(data.device),
        name,
        data,
        steps=8,
        transfer_steps=8 if name != "full" else 0,
        length=LONG,
        transfer_length=SHORT,
        batch_size=rows,
        validation_batches=1,
        progress=False,
        **MECHANISMS[name],
    )
    seconds = max(1.0, args.seconds - (time.perf_counter() - begin))
    tune = int((0.8 if name != "full" else 1.0) * seconds / (report.seconds["fine-tuning"] / 8))
    transfer = int(0.2 * seconds / (report.seconds["transfer"] / 8)) if name != "full" else 0
    return max(2, tune), max(2, transfer) if name != "full" else 0


def speeds(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens/s and peak memory of forward and backward at 8,192 tokens; the models take turns."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = max(1, args.rows * SHORT // LONG)
    ids = torch.randint(256, (rows, LONG), device=device)
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
