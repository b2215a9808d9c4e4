"""Tokens per second of the training loop, beside the same model written plainly and compiled.

    python benchmarks/train_throughput.py --steps 60 --out throughput.json

The wide-attention study's deep model on ListOps: 6 layers x 8 heads, length 2,000, batch 32, bf16. The twin below is
one short file of PyTorch with `scaled_dot_product_attention`, a boolean key mask, the same dropout, Adam fused, the
batch already on the device. Ours goes through everything `weft train` does: the loop, the data, the log, the
mechanism with its checks. `--attentions all` also times every other mechanism that takes this task.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.attention import attention_info, attentions
from weft.lab import make_config
from weft.lab.loop import Training
from weft.models.presets import STUDY_ATTENTIONS
from weft.tasks import listops


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


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def time_twin(config, rows: dict[str, Tensor], args) -> tuple[float, float]:
    """Tokens per second of the twin and GiB at the peak."""
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

    return measure(step, args)


def time_weft(config, args) -> tuple[float, float]:
    training = Training(config)
    training._clock = (time.perf_counter(), 0)
    training.model.train()

    def step() -> None:
        training._update(training.step + 1)
        training.step += 1
        if training.step % config.log_every == 0:
            training._look()

    return measure(step, args)


def measure(step, args) -> tuple[float, float]:
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(args.warmup):
        step()
    wait(args.device)
    begin = time.perf_counter()
    for _ in range(args.steps):
        step()
    wait(args.device)
    seconds = time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated() / 2**30 if args.device == "cuda" else 0.0
    return args.steps * args.batch * args.length / seconds, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=2000)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--attentions", default="full", help="names joined by commas, or all")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--rounds", type=int, default=2, help="twin and ours in turn, the best of each counts")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    names = args.attentions.split(",")
    if args.attentions == "all":
        names = [n for n in attentions() if attention_info(n).bidirectional]

    with tempfile.TemporaryDirectory() as folder:
        listops.make(Path(folder), sizes={"train": max(256, 4 * args.batch), "val": 32, "test": 32})

        def config(name: str, number: int):
            # Mechanisms that a compiled graph breaks on still train; those the study has take its options.
            return make_config(
                "listops", data=folder, out=f"{folder}/run-{name}-{number}", attention=name, layers=args.layers,
                heads=args.heads, dim=args.dim, max_length=args.length, batch_size=args.batch, compile=args.compile,
                precision=args.precision, accelerator=args.device, steps=10**6, log_every=20,
            )  # fmt: skip

        rows = listops.ListOps().load(config("full", 0)).train
        results = []
        twin = (0.0, 0.0)
        for number in range(args.rounds):
            torch.compiler.reset()
            twin = max(twin, time_twin(config("full", 0), rows, args))
            for name in names if number == 0 else names[:1]:
                torch.compiler.reset()
                torch.cuda.empty_cache()
                try:
                    speed, peak = time_weft(config(name, number), args)
                    entry = {"attention": name, "tokens_per_s": speed, "peak_gib": peak}
                except Exception as error:  # one mechanism that cannot is a line in the table, not the end of it
                    entry = {"attention": name, "error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
                old = next((r for r in results if r["attention"] == name), None)
                if old is None:
                    results.append(entry)
                elif entry.get("tokens_per_s", 0) > old.get("tokens_per_s", 0):
                    old.update(entry)
    machine = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    shape = f"{args.layers}x{args.heads}, length {args.length}, batch {args.batch}, {args.precision}"
    print(f"{machine}, torch {torch.__version__}, {shape}, compile {args.compile}, {args.steps} steps")
    print(f"{'':24}{'tokens/s':>14}{'of the twin':>14}{'peak GiB':>10}")
    print(f"{'plain SDPA twin':24}{twin[0]:14,.0f}{'100.0 %':>14}{twin[1]:10.2f}")
    for entry in results:
        study = "" if entry["attention"] in STUDY_ATTENTIONS else " *"
        if "error" in entry:
            print(f"{entry['attention'] + study:24}  {entry['error']}")
        else:
            share = f"{100 * entry['tokens_per_s'] / twin[0]:.1f} %"
            print(f"{entry['attention'] + study:24}{entry['tokens_per_s']:14,.0f}{share:>14}{entry['peak_gib']:10.2f}")
    print("* not of the study: its own defaults")
    if args.out:
        report = {"machine": machine, "torch": torch.__version__, "settings": vars(args)}
        report |= {"twin": {"tokens_per_s": twin[0], "peak_gib": twin[1]}, "weft": results}
        Path(args.out).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
