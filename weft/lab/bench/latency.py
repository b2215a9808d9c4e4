"""Latency of the wide-attention study's deep and wide models, compared with its Tables 9 (CPU) and 10 (GPU).

Wide Attention Is The Way Forward For Transformers?, https://arxiv.org/abs/2210.00640

One forward pass over random full-length documents: one document on the CPU, 32 on a GPU, as in the paper. The two
shapes of an attention alternate; deep / wide is the speedup of the wide one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ...models.presets import TASKS, lra
from .report import Line, Report, Table, cell
from .timing import Call, How, forget, ratio, reason, take_turns

# Milliseconds: deepest and widest shape of imdb-token, imdb-byte, listops and matching.
TABLE_9 = {
    "bigbird": ((116, 46), (106, 24), (103, 30), (125, 33)),
    "linear": ((54, 33), (33, 11), (33, 11), (26, 10)),
    "linformer": ((60, 34), (39, 12), (39, 12), (34, 12)),
    "local": ((59, 34), (34, 11), (33, 12), (27, 11)),
    "longformer": ((70, 37), (62, 17), (149, 37), (939, 263)),
    "performer": ((53, 33), (32, 11), (55, 35), (28, 9)),
    "sinkhorn": ((83, 39), (59, 16), (59, 17), (58, 21)),
    "sparse": ((56, 40), (38, 14), (47, 27), (88, 66)),
    "synthesizer": ((257, 237), (866, 11), (130, 20), (45, 23)),
    "full": ((60, 34), (40, 13), (41, 16), (56, 36)),
}
TABLE_10 = {
    "bigbird": ((154, 63), (154, 59), (210, 128), (232, 115)),
    "linear": ((52, 21), (63, 37), (76, 32), (52, 22)),
    "linformer": ((58, 21), (73, 38), (81, 32), (58, 23)),
    "local": ((58, 26), (68, 41), (86, 40), (63, 34)),
    "longformer": ((115, 57), (83, 48), (340, 189), (1202, 540)),
    "performer": ((47, 17), (60, 35), (95, 51), (49, 19)),
    "sinkhorn": ((92, 33), (112, 50), (121, 49), (106, 52)),
    "sparse": ((92, 55), (76, 46), (229, 175), (351, 346)),
    "synthesizer": ((25164, 34), (5927, 6001), (325, 199), (338, 293)),
    "full": ((88, 50), (75, 47), (208, 170), (289, 289)),
}
PAPER = {"cpu": TABLE_9, "cuda": TABLE_10}
PAPER_BATCH = {"cpu": 1, "cuda": 32}
NOT_IN_THE_MEAN = {"cpu": (), "cuda": ("synthesizer",)}  # as in the paper: two of its cells take seconds


def printed(task: str, attention: str, device: str, batch: int, length: int) -> tuple[float, float] | None:
    """The paper's milliseconds, deep and wide, if it measured the same setting."""
    if length or batch != PAPER_BATCH[device] or attention not in PAPER[device]:
        return None
    return PAPER[device][attention][list(TASKS).index(task)]


def forward(task: str, attention: str, shape: tuple[int, int], how: How, batch: int, length: int) -> Call:
    """One forward pass of the study's model of this shape."""
    found = TASKS[task]
    tokens = length or found.length
    with_cls = not found.pairs and attention != "sinkhorn"
    torch.manual_seed(0)
    with torch.device(how.device):
        model = how.place(lra(task, attention, *shape, max_length=tokens + with_cls).eval())
        ids = torch.randint(1, found.vocab, (batch, tokens))
    inputs = (ids, ids.flip(0)) if found.pairs else (ids,)

    def call() -> None:
        with torch.inference_mode():
            model(*inputs)

    return call


def measure(
    tasks: Iterable[str], names: Iterable[str], how: How, report: Report, *, batch: int = 0, length: int = 0
) -> None:
    """Add one record for every task and attention to the report."""
    tasks, names, batch = list(tasks), list(names), batch or PAPER_BATCH[how.device]
    with Line(len(tasks) * len(names)) as line:
        for task in tasks:
            found = TASKS[task]
            shapes = {"deep": found.deepest, "wide": found.widest}
            for name in names:
                line.next(f"{task}, {name}, " + " and ".join(f"{a}x{b}" for a, b in shapes.values()))
                record: dict[str, Any] = {"task": task, "attention": name}
                record |= {key: {"layers": a, "heads": b} for key, (a, b) in shapes.items()}
                try:
                    calls = {key: forward(task, name, shape, how, batch, length) for key, shape in shapes.items()}
                    for key, timing in take_turns(calls, how).items():
                        record[key] |= timing.record()
                    del calls
                except Exception as error:  # e.g. mixed attention with an indivisible number of heads
                    record["error"] = reason(error)
                record["ratio"] = ratio(record["deep"].get("ms"), record["wide"].get("ms"))
                theirs = printed(task, name, how.device, batch, length)
                if theirs is not None:
                    record["paper"] = {"deep_ms": theirs[0], "wide_ms": theirs[1], "ratio": theirs[0] / theirs[1]}
                report.add(record)
                forget(how)


def tables(records: Sequence[dict[str, Any]], device: str) -> list[Table]:
    """One table per task, with the ratio of the sums in the last row."""
    found = []
    for task in dict.fromkeys(record["task"] for record in records):
        rows = [record for record in records if record["task"] == task]
        deep, wide = (f"{kind} {rows[0][kind]['layers']}x{rows[0][kind]['heads']}" for kind in ("deep", "wide"))
        headings = ["attention", f"{deep}, ms", f"{wide}, ms", "deep / wide", "paper"]
        with_memory = any("peak_mib" in record["deep"] for record in rows)
        headings += ["deep, MiB", "wide, MiB"] if with_memory else []
        table = Table(f"{task}: one forward pass", headings)
        for record in rows:
            table.rows.append(_row(record, with_memory))
        both = [r for r in rows if r["ratio"] and "paper" in r and r["attention"] not in NOT_IN_THE_MEAN[device]]
        if len(both) > 1:
            ours = [sum(r[kind]["ms"] for r in both) / len(both) for kind in ("deep", "wide")]
            theirs = ratio(*(sum(r["paper"][f"{kind}_ms"] for r in both) for kind in ("deep", "wide")))
            mean = [cell(ours[0]), cell(ours[1]), cell(ratio(*ours), 2), cell(theirs, 2)]
            table.rows.append([f"mean of {len(both)}", *mean, *(["", ""] if with_memory else [])])
        found.append(table)
    return found


def _row(record: dict[str, Any], with_memory: bool) -> list[str]:
    deep, wide = record["deep"], record["wide"]
    trouble = record.get("error") or deep.get("error") or wide.get("error")
    if trouble:
        return [record["attention"], trouble, *[""] * (5 if with_memory else 3)]
    theirs = record.get("paper", {}).get("ratio")
    cells = [cell(deep["ms"]), cell(wide["ms"]), cell(record["ratio"], 2), cell(theirs, 2)]
    return [record["attention"], *cells, *([cell(r["peak_mib"], 0) for r in (deep, wide)] if with_memory else [])]
