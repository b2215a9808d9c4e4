"""Write the tables of docs/scale.md: bytes between ranks, and a model of the time of one attention layer.

    python -m benchmarks.scale_model

Bytes are those that `weft.parallel` sends (16 heads of 64, bfloat16, causal, batch 1), counted by running its code on
tensors without data. Times extrapolate the kernels' times at 65,536 tokens (benchmarks/results/gpu_attention.json) with
the mechanism's exponent, divide them by the ranks, and add the bytes of the busiest rank, three times for forward and
backward, over the speed of the link. Nothing overlaps.
"""

from __future__ import annotations

from pathlib import Path

import weft
from benchmarks.tables import rows
from weft.parallel import traffic

ROOT = Path(__file__).resolve().parents[1]
NAMES = {
    "full": 2.0,
    "combiner-fixed": 1.5,
    "combiner-axial": 1.5,
    "sparse": 1.5,
    "longformer": 1.0,
    "local": 1.0,
    "linear": 1.0,
}
LINKS = {"NVLink, 450 GB/s": 450e9, "InfiniBand, 50 GB/s": 50e9}
HEADS, HEAD_DIM, MEASURED = 16, 64, 65536
START, END = "<!-- tables: python -m benchmarks.scale_model -->", "<!-- end of tables -->"


def attention(name: str) -> weft.Attention:
    return weft.make_attention(name, heads=HEADS, head_dim=HEAD_DIM, causal=True)


def bytes_table() -> list[str]:
    lines = ["| mechanism | MB sent by all ranks | share of `full` |", "|---|---|---|"]
    sent = {name: sum(traffic(attention(name), 1 << 20, 8)) for name in NAMES}
    for name, count in sent.items():
        lines.append(f"| `{name}` | {count / 1e6:,.1f} | {count / sent['full']:.3%} |")
    return lines


def time_table(times: dict[str, float]) -> list[str]:
    cases = ((1 << 20, 8), (1 << 22, 16), (1 << 24, 64))
    head = [f"{length >> 20}M tokens, {ranks} GPUs, {link}" for length, ranks in cases for link in LINKS]
    lines = [f"| ms per layer | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
    for name in ("full", "combiner-fixed", "local", "linear"):
        row = []
        for length, ranks in cases:
            compute = times[name] * (length / MEASURED) ** NAMES[name] / ranks
            busiest = max(traffic(attention(name), length, ranks, only=(0, ranks - 1)))
            row += [f"{compute + 3 * busiest / speed * 1e3:,.1f}" for speed in LINKS.values()]
        lines.append(f"| `{name}` | {' | '.join(row)} |")
    return lines


def main() -> None:
    times = {name: rows()["cudnn" if name == "full" else name, MEASURED, True]["both_ms"][0] for name in NAMES}
    page = ROOT / "docs/scale.md"
    text = page.read_text()
    before, rest = text.split(START)
    tables = [*bytes_table(), "", *time_table(times)]
    page.write_text(f"{before}{START}\n\n{chr(10).join(tables)}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
