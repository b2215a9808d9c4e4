"""The tables of costs in docs/scale.md: bytes between ranks, and a model of the time of one attention layer.

Bytes are those that `weft.parallel` sends (16 heads of 64, bfloat16, causal, batch 1), counted by running its code on
tensors without data. Times extrapolate the kernels' times at 65,536 tokens (benchmarks/results/gpu_attention.json) with
the mechanism's exponent, divide them by the ranks, and add the bytes of the busiest rank, three times for forward and
backward, over the speed of the link. Nothing overlaps. `benchmarks.tables` writes them.
"""

from __future__ import annotations

from collections.abc import Mapping

import weft
from weft.parallel import traffic

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


def attention(name: str) -> weft.Attention:
    return weft.make_attention(name, heads=HEADS, head_dim=HEAD_DIM, causal=True)


def sent() -> list[list[str]]:
    found = {name: sum(traffic(attention(name), 1 << 20, 8)) for name in NAMES}
    rows = [[f"`{name}`", f"{count / 1e6:,.1f}", f"{count / found['full']:.3%}"] for name, count in found.items()]
    return [["mechanism", "MB sent by all ranks", "share of `full`"], *rows]


def times(measured: Mapping[tuple[str, int, bool], Mapping[str, tuple[float, float]]]) -> list[list[str]]:
    """From `benchmarks.tables.rows`."""
    cases = ((1 << 20, 8), (1 << 22, 16), (1 << 24, 64))
    lines = [["ms per layer"]]
    lines[0] += [f"{length >> 20}M tokens, {ranks} GPUs, {link}" for length, ranks in cases for link in LINKS]
    for name in ("full", "combiner-fixed", "local", "linear"):
        ms, _ = measured["cudnn" if name == "full" else name, MEASURED, True]["both_ms"]
        row = [f"`{name}`"]
        for length, ranks in cases:
            compute = ms * (length / MEASURED) ** NAMES[name] / ranks
            busiest = max(traffic(attention(name), length, ranks, only=(0, ranks - 1)))
            row += [f"{compute + 3 * busiest / speed * 1e3:,.1f}" for speed in LINKS.values()]
        lines.append(row)
    return lines
