"""Tokens per second of the training loop, compared with the same model in plain compiled PyTorch.

    python benchmarks/train_throughput.py --steps 60 --out throughput.json

The wide-attention study's deep model on ListOps: 6 layers x 8 heads, length 2,000, batch 32, bf16. The baseline
is plain PyTorch with `scaled_dot_product_attention`, a boolean key mask, the same dropout, fused Adam, and the batch
already on the device. Ours runs everything `weft train` does: the loop, data, log, and the mechanism with its checks.
`--attentions all` also times every other mechanism that supports this task.

The baseline and the first mechanism alternate `--rounds` times, and the best of each counts; the others are timed once.
Failures, and mechanisms for which no time is left (`--seconds`), are lines in the table. The JSON file is written after
every measurement. A tiny run on the CPU:

    python benchmarks/train_throughput.py --attentions all --device cpu --precision 32-true --no-compile --rounds 1 \
        --steps 2 --warmup 1 --batch 2 --length 200 --layers 1 --heads 2 --head-dim 8 --dim 32 --mlp-dim 32
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.lab import make_config
from weft.lab.bench.report import Report, Table, cell
from weft.lab.bench.timing import How, forget, names_of, reason
from weft.lab.loop import Training
from weft.models.presets import STUDY_ATTENTIONS
from weft.tasks import listops

TWIN = "plain SDPA twin"
HEADINGS = ["", "tokens/s", "of the twin", "peak, GiB", "first step, s"]


class PlainBlock(nn.Module):
    def __init__(self, dim: int, heads: int, head_dim: int, mlp_dim: int, dropout: float):
        super().__init__()
        self.heads, self.head_dim, self.p = heads, head_dim, dropout
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.q, self.k, self.v = (nn.Linear(dim, heads * head_dim, bias=False) for _ in range(3))
        self.out = nn.Linear(heads * head_dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, mlp_dim), nn.Linear(mlp_dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2) for f in (self.q, self.k, self.v))
        p = self.p if self.training else 0.0
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :], dropout_p=p)
        x = x + self.dropout(self.out(h.transpose(1, 2).flatten(2)))
        h = self.down(self.dropout(F.gelu(self.up(self.norm2(x)), approximate="tanh")))
        return x + self.dropout(h)


class PlainClassifier(nn.Module):
    def __init__(self, vocab, classes, length, layers, dim, heads, head_dim, mlp_dim, dropout):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.cls = nn.Parameter(torch.zeros(dim))
        p = torch.arange(length + 1)[:, None] * 10000 ** (-torch.arange(0, dim, 2) / dim)
        self.register_buffer("table", torch.stack([p.sin(), p.cos()], -1).flatten(1))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(PlainBlock(dim, heads, head_dim, mlp_dim, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Sequential(nn.Linear(dim, mlp_dim), nn.ReLU(), nn.Linear(mlp_dim, classes))

    def forward(self, ids: Tensor) -> Tensor:
        mask = F.pad(ids > 0, (1, 0), value=True)
        x = torch.cat([self.cls.expand(len(ids), 1, -1), self.embed(ids)], 1)
        x = self.dropout(x + self.table[: x.shape[1]])
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x)[:, 0])


def time_twin(config, rows: dict[str, Tensor], args, how: How) -> dict[str, float]:
    torch.manual_seed(0)
    shape = (config.layers, config.dim, config.heads, config.head_dim, config.mlp_dim, config.dropout)
    model = PlainClassifier(17, 10, args.length, *shape).to(args.device)
    run = torch.compile(model) if args.compile else model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=args.device == "cuda")
    ids, label = rows["ids"][: args.batch].long().to(args.device), rows["label"][: args.batch].long().to(args.device)

    def step() -> None:
        with torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "bf16-mixed"):
            logits = run(ids)
        F.cross_entropy(logits.float(), label).backward()
        optimizer.step()
        optimizer.zero_grad()

    return measure(step, args, how)


def time_weft(config, args, how: How) -> dict[str, float]:
    training = Training(config)
    training._clock = (time.perf_counter(), 0)
    training.model.train()

    def step() -> None:
        training._update(training.step + 1)
        training.step += 1
        if training.step % config.log_every == 0:
            training._look()

    return measure(step, args, how)


def measure(step, args, how: How) -> dict[str, float]:
    """Tokens per second, peak GiB, and seconds of the first step, including compilation."""
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    step()
    how.wait()
    first = time.perf_counter() - begin
    for _ in range(args.warmup - 1):
        step()
    how.wait()
    begin = time.perf_counter()
    for _ in range(args.steps):
        step()
    how.wait()
    seconds = time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated() / 2**30 if args.device == "cuda" else 0.0
    return {
        "tokens_per_s": args.steps * args.batch * args.length / seconds,
        "peak_gib": peak,
        "first_step_s": first,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=2000)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--mlp-dim", type=int, default=2048)
    parser.add_argument("--precision", default="bf16-mixed", choices=("32-true", "bf16-mixed"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--attentions", default="full", help="comma-separated names, or all: full first")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of the baseline and the first mechanism")
    parser.add_argument("--seconds", type=float, default=0.0, help="start no further mechanism after this time; 0: all")
    parser.add_argument("--out", default="", help="also write the results to this JSON file")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    names = sorted(names_of(args.attentions, ["full"]), key=lambda name: name != "full")
    how = How(device=args.device, precision=args.precision, compile=args.compile)
    report = Report("train_throughput", how, vars(args), Path(args.out) if args.out else None)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        listops.make(Path(folder), sizes={"train": max(256, 4 * args.batch), "val": 32, "test": 32})

        def config(name: str, number: int) -> Any:
            return make_config(
                "listops", data=folder, out=f"{folder}/run-{name}-{number}", attention=name, layers=args.layers,
                heads=args.heads, head_dim=args.head_dim, dim=args.dim, mlp_dim=args.mlp_dim, max_length=args.length,
                batch_size=args.batch, compile=args.compile, precision=args.precision, accelerator=args.device,
                steps=10**6, log_every=20,
            )  # fmt: skip

        rows = listops.ListOps().load(config("full", 0)).train

        def timed(name: str, number: int = 0) -> dict[str, Any]:
            """The results of one measurement, or its error."""
            try:
                forget(how)
                if name == TWIN:
                    entry = {"attention": name, **time_twin(config("full", number), rows, args, how)}
                else:
                    entry = {"attention": name, **time_weft(config(name, number), args, how)}
            except Exception as error:  # show failures in the table
                entry = {"attention": name, "error": reason(error)}
            said = entry.get("error") or f"{entry['tokens_per_s']:,.0f} tokens/s"
            print(f"[{time.perf_counter() - begin:.0f} s] {name}: {said}", flush=True)
            return entry

        tries: dict[str, list[dict[str, Any]]] = {TWIN: [], names[0]: []}
        for number in range(args.rounds):
            tries[TWIN].append(timed(TWIN, number))
            tries[names[0]].append(timed(names[0], number))
        for found in tries.values():
            report.add(max(found, key=lambda entry: entry.get("tokens_per_s", 0.0)))
        for name in names[1:]:
            if args.seconds and time.perf_counter() - begin > args.seconds:
                report.add({"attention": name, "error": "not measured: the time was up"})
            else:
                report.add(timed(name))
    shape = f"{args.layers}x{args.heads}, length {args.length}, batch {args.batch}, {args.precision}"
    compiled = "compiled" if args.compile else "not compiled"
    table = Table(f"training, {shape}, {compiled}, {args.steps} steps", HEADINGS)
    twin = report.records[0].get("tokens_per_s")
    for entry in report.records:
        star = "" if entry["attention"] in (TWIN, "mixed", *STUDY_ATTENTIONS) else " *"
        if "error" in entry:
            table.rows.append([entry["attention"] + star, entry["error"], "", "", ""])
            continue
        share = "-" if not twin else f"{100 * entry['tokens_per_s'] / twin:.1f} %"
        figures = [cell(entry["tokens_per_s"], 0), share, cell(entry["peak_gib"], 2), cell(entry["first_step_s"])]
        table.rows.append([entry["attention"] + star, *figures])
    report.finish([table], ["* not in the study: the mechanism's defaults"], markdown=False)


if __name__ == "__main__":
    main()
