"""Cost of subsampled and dense training: attention alone, and whole training steps.

The Information Pathways Hypothesis, https://arxiv.org/abs/2306.01705, Table 7 and the cost columns of its results

    share   sampled legal pairs / dense legal pairs: the relative cost of attention if only pairs counted
    counted multiply-adds of the whole model with its schedule / of the dense one (S0); each pair counts once

Dense and sampled calls alternate. Without a bias, dense attention never stores its L² logits (PyTorch's fused kernel),
so there is little memory to save; with a bias (ALiBi, as in the paper's language models) it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...adapt.subsample import parse_schedule, subsample
from ...attention import make_attention
from ...layers import ALiBi
from ...models.language import LanguageModel
from .report import Line, Report, Table, cell
from .timing import Call, How, forget, ratio, reason, take_turns

# (causal, ALiBi)
KINDS = {
    "bidirectional": (False, False),
    "bidirectional, ALiBi": (False, True),
    "causal": (True, False),
    "causal, ALiBi": (True, True),
}
SHARES = 3  # number of draws to count pairs for
# Table 7, the dense baseline (S0): GB per GPU and milliseconds per step.
TABLE_7 = {"WikiText-103": (21.3, 492), "Enwik8": (30.5, 628), "CIFAR-10": (29.1, 1059), "ImageNet-1k": (4.0, 146)}


@dataclass(frozen=True)
class Shape:
    """A byte-level decoder with ALiBi."""

    layers: int
    dim: int
    heads: int
    mlp_dim: int
    length: int
    batch: int
    sigma: tuple[float, float] = (0.1, 0.225)

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


ENWIK8 = Shape(layers=16, dim=1024, heads=8, mlp_dim=4096, length=4096, batch=2)  # the paper's, two rows per GPU
SMALL = Shape(layers=4, dim=128, heads=4, mlp_dim=512, length=1024, batch=1)


def schedules_for(layers: int) -> list[str]:
    """S0 and the paper's schedules for this depth: all layers, or the last three quarters."""
    return ["S0", *(f"S{layers}-L{windows}" for windows in (2, 4, 6)), f"S{max(1, layers * 3 // 4)}-L8"]


def counted(shape: Shape, schedule: str) -> float:
    """Multiply-adds of the model with this schedule, relative to the dense one; causal L²/2 counts as L²."""
    dense = shape.layers * (4 * shape.dim**2 + 2 * shape.dim * shape.mlp_dim)
    attention = 2 * shape.length * shape.dim
    if schedule == "S0":
        return 1.0
    plan = parse_schedule(schedule)
    sampled = shape.layers if plan.layers is None else plan.layers
    if sampled > shape.layers:
        raise ValueError(f"{schedule} needs {sampled} layers, but the model has {shape.layers}")
    ours = attention * (shape.layers - sampled + sampled / plan.windows)
    return (dense + ours) / (dense + attention * shape.layers)


def pair_share(sources: Tensor, length: int, causal: bool) -> float:
    """The fraction of legal pairs that were sampled; sources (windows, sources per window)."""
    if not causal:
        return sources.shape[1] / length
    targets = torch.arange(length, device=sources.device).view(sources.shape[0], -1)
    pairs = torch.searchsorted(sources.sort(-1).values, targets, right=True).sum().item()
    return pairs / (length * (length + 1) / 2)


def forward_backward(attn: Any, how: How, qkv: Sequence[Tensor], grad: Tensor, bias: ALiBi | None) -> Call:
    """One forward and backward pass."""
    model = how.place(attn)

    def call() -> None:
        out = model(*qkv, bias=bias)
        torch.autograd.grad(out, qkv, grad.to(out.dtype))

    return call


def measure_attention(
    how: How, report: Report, line: Line, *, length: int, windows: int, heads: int = 8, head_dim: int = 64
) -> None:
    """Forward and backward of attention alone, dense and sampled; one record per kind."""
    if length % windows:
        raise ValueError(f"length={length} must be divisible by windows={windows} to count the share of pairs")
    for kind, (causal, alibi) in KINDS.items():
        line.next(f"attention alone, {kind}, {length:,} tokens, {windows} windows")
        torch.manual_seed(0)
        place: dict[str, Any] = {"device": how.device, "dtype": how.dtype}
        qkv = [torch.randn(1, heads, length, head_dim, requires_grad=True, **place) for _ in range(3)]
        grad, bias = torch.randn_like(qkv[0]), ALiBi(heads).to(how.device) if alibi else None
        common: dict[str, Any] = {"heads": heads, "head_dim": head_dim, "causal": causal}
        dense = make_attention("full", **common)
        sampled: Any = make_attention("subsampled", windows=windows, **common).train()
        pair = {"dense": dense, "sampled": sampled}
        calls = {key: forward_backward(attn, how, qkv, grad, bias) for key, attn in pair.items()}
        found = take_turns(calls, how)
        record: dict[str, Any] = {"part": "attention", "kind": kind, "length": length, "windows": windows}
        record |= {key: timing.record() for key, timing in found.items()}
        record["ratio"] = ratio(record["sampled"].get("ms"), record["dense"].get("ms"))
        record["memory_ratio"] = ratio(record["sampled"].get("peak_mib"), record["dense"].get("peak_mib"))
        # Own draws: a compiled call does not tell which sources it has drawn.
        record["share"] = sum(pair_share(sampled.draw(length), length, causal) for _ in range(SHARES)) / SHARES
        report.add(record)
        del qkv, grad, calls
        forget(how)


def training_step(shape: Shape, schedule: str, how: How) -> Call:
    """One update of a language model with this schedule."""
    torch.manual_seed(0)
    with torch.device(how.device):
        net = LanguageModel(
            256, max_length=shape.length, dim=shape.dim, heads=shape.heads, head_dim=shape.head_dim,
            layers=shape.layers, mlp_dim=shape.mlp_dim, dropout=0.0,
        )  # fmt: skip
        if schedule != "S0":
            subsample(net, schedule, shape.sigma)
        model = how.place(net.train())
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-4, fused=how.device == "cuda")
        ids = torch.randint(0, 256, (shape.batch, shape.length + 1))

    def call() -> None:
        logits = model(ids[:, :-1])
        F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    # The weights and Adam's two moments, which have the same dtype.
    call.held = 3 * sum(p.numel() * p.element_size() for p in net.parameters())  # type: ignore[attr-defined]
    return call


def measure_steps(how: How, report: Report, line: Line, *, shape: Shape, schedules: Sequence[str]) -> None:
    """One record per schedule; all schedules alternate."""
    line.next(f"training steps of {', '.join(schedules)}, {shape.length:,} tokens x {shape.batch}")
    calls: dict[str, Call] = {}
    trouble: dict[str, str] = {}
    for schedule in schedules:
        try:
            calls[schedule] = training_step(shape, schedule, how)
        except torch.OutOfMemoryError as error:
            trouble[schedule] = reason(error)
    held = {name: call.held / 2**20 for name, call in calls.items()}  # type: ignore[attr-defined]
    found = take_turns(calls, how)
    calls.clear()
    forget(how)
    records: list[dict[str, Any]] = []
    for schedule in schedules:
        record: dict[str, Any] = {"part": "step", "schedule": schedule, "counted": counted(shape, schedule)}
        record |= {"error": trouble[schedule]} if schedule in trouble else found[schedule].record()
        if "peak_mib" in record:
            record["peak_mib"] += held[schedule]  # the paper reports the total memory
        records.append(record)
    dense = next((r for r in records if r["schedule"] == "S0"), {})
    for record in records:
        record["ratio"] = ratio(record.get("ms"), dense.get("ms"))
        record["memory_ratio"] = ratio(record.get("peak_mib"), dense.get("peak_mib"))
        report.add(record)


def tables(records: Sequence[dict[str, Any]]) -> list[Table]:
    made = []
    alone = [r for r in records if r["part"] == "attention"]
    if alone:
        title = f"attention alone, forward and backward, L = {alone[0]['length']:,}, W = {alone[0]['windows']}"
        headings = ["", "dense ms", "sampled ms", "ratio", "share of pairs", "over share", "memory"]
        table = Table(title, headings)
        for r in alone:
            trouble = r["dense"].get("error") or r["sampled"].get("error")
            over = ratio(r["ratio"], r["share"])
            cells = [cell(r["ratio"], 3), cell(r["share"], 3), cell(over, 2), cell(r["memory_ratio"], 2)]
            pair = [trouble, ""] if trouble else [cell(r["dense"]["ms"]), cell(r["sampled"]["ms"])]
            table.rows.append([r["kind"], *pair, *cells])
        made.append(table)
    steps = [r for r in records if r["part"] == "step"]
    if steps:
        headings = ["schedule", "step, ms", "time, of S0's", "all memory, MiB", "of S0's", "multiply-adds, counted"]
        table = Table("training steps of a byte-level decoder with ALiBi", headings)
        for r in steps:
            if "error" in r:
                table.rows.append([r["schedule"], r["error"], *[""] * 3, cell(r["counted"], 3)])
                continue
            cells = [cell(r["ms"]), cell(r["ratio"], 3), cell(r.get("peak_mib"), 0), cell(r["memory_ratio"], 3)]
            table.rows.append([r["schedule"], *cells, cell(r["counted"], 3)])
        made.append(table)
    return made
