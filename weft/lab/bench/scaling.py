"""Time and memory of mechanisms over length, compared with `full`: Figure 3 of the Combiner paper.

Combiner: Full Attention Transformer with Sparse Computation Cost, https://arxiv.org/abs/2107.05768

Attention only, without projections. At every length, all mechanisms alternate on the same q, k, v. The exponent is the
slope of a linear fit of log(cost) over log(length). The figure prints no numbers; CLAIMS has the claims of its text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...attention import make_attention
from .report import Line, Report, Table, cell, log_plot
from .timing import Call, How, Timing, forget, reason, take_turns

FIGURE_3 = (
    "full",
    "performer",
    "bigbird",
    "sparse",
    "axial",
    "combiner-fixed",
    "combiner-axial",
    "combiner-mixture",
)
OPTIONS: dict[str, dict[str, Any]] = {"sparse": {"columns": 1}}  # the paper's, with as many pairs as combiner-fixed
CLAIMS = (  # a, b, and the paper's claim about cost(a) / cost(b)
    ("combiner-fixed", "sparse", "about 1"),
    ("combiner-axial", "axial", "about 1"),
    ("combiner-fixed", "performer", "about 1"),
    ("combiner-axial", "performer", "about 1"),
    ("combiner-mixture", "combiner-fixed", "above 1"),
    ("bigbird", "combiner-fixed", "above 1"),
)


def attend(name: str, qkv: Sequence[torch.Tensor], causal: bool, backward: bool, how: How, **options: Any) -> Call:
    """One call of the mechanism; if `backward`, in training, with the gradients of q, k and v."""
    _, H, L, D = qkv[0].shape
    with torch.device(how.device):
        attn = make_attention(name, heads=H, head_dim=D, causal=causal, max_length=L, **options)
        attn = how.place(attn.train(backward))

    gradient = torch.randn_like(qkv[0])  # a sum would give strides of 0, which some kernels do not support

    def call() -> None:
        if backward:
            torch.autograd.grad(attn(*qkv), qkv, gradient, allow_unused=True)  # reformer does not read k
        else:
            with torch.no_grad():
                attn(*qkv)

    return call


def measure(
    names: Sequence[str],
    lengths: Sequence[int],
    how: How,
    report: Report,
    *,
    batch: int,
    heads: int,
    head_dim: int,
    causal: bool = False,
    backward: bool = False,
    limit: float = 20.0,
) -> None:
    """Add one record per length and mechanism; skip longer lengths once a call takes over `limit` seconds."""
    ended: dict[str, str] = {}
    with Line(len(lengths)) as line:
        for L in lengths:
            line.next(f"{L:,} tokens, {len(names) - len(ended)} mechanisms")
            torch.manual_seed(0)
            found: dict[str, Timing] = {}
            calls: dict[str, Call] = {}
            like = torch.empty(0, device=how.device, dtype=how.dtype)
            try:
                qkv = [like.new_empty(batch, heads, L, head_dim).normal_().requires_grad_(backward) for _ in range(3)]
            except RuntimeError as error:
                ended |= {name: reason(error) for name in names if name not in ended}
            for name in names:
                if name in ended:
                    found[name] = Timing(error=ended[name])
                    continue
                try:
                    calls[name] = attend(name, qkv, causal, backward, how, **OPTIONS.get(name, {}))
                except Exception as error:  # show failures in the table
                    found[name] = Timing(error=reason(error))
            found |= take_turns(calls, how)
            for name in names:
                record = {"attention": name, "length": L, **found[name].record()}
                if not found[name].error and "full" in found and found["full"].seconds:
                    record["of_full"] = found[name].median / found["full"].median
                report.add(record)
                if found[name].error:
                    ended.setdefault(name, found[name].error)
                elif found[name].median > limit:
                    ended[name] = f"over {limit:g} s per call"
            calls.clear()
            forget(how)


def exponent(lengths: Sequence[int], costs: Sequence[float | None]) -> float | None:
    """The slope of log(cost) over log(length)."""
    points = [(math.log(x), math.log(y)) for x, y in zip(lengths, costs, strict=True) if y is not None and y > 0]
    if len(points) < 2:
        return None
    mx, my = sum(p[0] for p in points) / len(points), sum(p[1] for p in points) / len(points)
    return sum((x - mx) * (y - my) for x, y in points) / sum((x - mx) ** 2 for x, _ in points)


def costs(records: Sequence[dict[str, Any]], what: str) -> dict[str, dict[int, float | None]]:
    """mechanism -> length -> value."""
    found: dict[str, dict[int, float | None]] = {}
    for record in records:
        found.setdefault(record["attention"], {})[record["length"]] = record.get(what)
    return found


def tables(records: Sequence[dict[str, Any]]) -> list[Table]:
    """Time, time relative to `full`, memory, and the paper's claims at the longest length."""
    lengths = sorted({record["length"] for record in records})
    heads = ["", *(f"{L:,}" for L in lengths)]
    trouble = {(r["attention"], r["length"]): r["error"] for r in records if "error" in r}

    def table(title: str, what: str, digits: int, more: Sequence[str] = ()) -> Table:
        found = Table(title, [*heads, *more])
        for name, row in costs(records, what).items():
            cells = [trouble.get((name, L)) or cell(row[L], digits) for L in lengths]
            slope = [cell(exponent(lengths, [row[L] for L in lengths]), 2)] if more else []
            found.rows.append([name, *cells, *slope])
        return found

    made = [table("milliseconds", "ms", 2, ["exponent"])]
    if any("of_full" in record for record in records):
        shares = table("time, of full's", "of_full", 3)
        shares.headings = [*heads, "faster from"]
        shares.rows = [[*row, crossover(records, row[0])] for row in shares.rows if row[0] != "full"]
        made.append(shares)
    if any("peak_mib" in record for record in records):
        made.append(table("peak memory beyond the inputs, MiB", "peak_mib", 1, ["exponent"]))
    made += claims(records)
    return made


def crossover(records: Sequence[dict[str, Any]], name: str) -> str:
    """The length from which the mechanism is faster than `full`."""
    shares = {L: share for L, share in costs(records, "of_full")[name].items() if share is not None}
    slower = [L for L, share in shares.items() if share >= 1]
    later = [L for L in shares if L > max(slower, default=0)]
    return f"{min(later):,}" if later else "never"


def claims(records: Sequence[dict[str, Any]]) -> list[Table]:
    """The paper's claims about its figure, and our ratios at the longest common length."""
    time, memory = costs(records, "ms"), costs(records, "peak_mib")
    found = Table("claims about Figure 3 (the paper prints no numbers)", ["", "length", "time", "memory", "paper"])
    for a, b, says in CLAIMS:
        both = [L for L in time.get(a, {}) if time[a][L] and time.get(b, {}).get(L)]
        if both:
            L = max(both)
            shares = [_share(rows[a].get(L), rows[b].get(L)) for rows in (time, memory)]
            found.rows.append([f"{a} / {b}", f"{L:,}", *shares, says])
    return [found] if found.rows else []


def _share(a: float | None, b: float | None) -> str:
    return cell(a / b, 2) if a and b else "-"


def plot(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Plot time and memory over length."""
    panels = {"milliseconds": costs(records, "ms"), "MiB beyond the inputs": costs(records, "peak_mib")}

    def label(name: str, points: dict[int, float]) -> str:
        slope = exponent(list(points), list(points.values()))
        return name if slope is None else f"{name} (L^{slope:.2f})"

    log_plot(path, panels, "length L", "full", label)
