"""Tables of generation for `python -m benchmarks.tables`, and the plots in docs/.

python -m benchmarks.generation_tables    # the plots
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PLOTS = {"generation_cpu": "generation.svg", "generation_gpu": "generation_gpu.svg"}
LENGTHS = (1024, 8192, 65536, 262144)  # of the steps
PROMPT, STATE = 8192, 65536
CACHE = "PyTorch's fused attention with a cache"
ORDER = "full linear performer local longformer sparse axial logsparse combiner-fixed combiner-axial".split()


def results(name: str) -> Any:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def steps(name: str) -> list[list[str]]:
    """A file of `weft bench generation`."""
    records = {(r["attention"], r["length"]): r for r in results(name)["rows"]}
    lengths = [L for L in LENGTHS if any(L == length for _, length in records)]
    names = sorted({name for name, _ in records}, key=lambda n: (ORDER.index(n) if n in ORDER else len(ORDER), n))

    def row(label: str, value: Any, prefix: str = "") -> list[str]:
        prompt, state = value(PROMPT, f"{prefix}prefill_tokens_per_s"), value(STATE, f"{prefix or 'state_'}bytes")
        return [
            label,
            *(_number(value(L, f"{prefix}ms"), ",.3f" if lengths[-1] == STATE else ",.4f") for L in lengths),
            _number(None if prompt is None else round(prompt, -2), ",.0f"),
            _number(None if state is None else state / 2**20, ",.2f"),
        ]

    def middle(length: int, key: str) -> float | None:
        values = sorted(r[key] for (_, L), r in records.items() if length == L and r.get(key))
        return values[len(values) // 2] if values else None

    head = [f"step, ms, after {lengths[0]:,} tokens", *(f"{L:,}" for L in lengths[1:])]
    lines = [["", *head, f"prefill of {PROMPT:,}, tokens/s", f"state at {STATE:,}, MiB"], row(CACHE, middle, "cache_")]
    for name in names:
        lines.append(row(f"`{name}`", lambda L, key, name=name: records.get((name, L), {}).get(key)))
    return lines


def transformers(name: str) -> list[list[str]]:
    """A file of benchmarks/hf_generation.py."""
    records = {(r["attention"], r["length"]): r for r in results(name)["rows"]}
    lengths = sorted({L for _, L in records})
    lines = [["attention", *(word for L in lengths for word in (f"{L:,} tokens: ms per token", "cache, MiB"))]]
    for attention in dict.fromkeys(attention for attention, _ in records):
        cells = [f"`{attention}`"]
        for L in lengths:
            r = records.get((attention, L), {})
            cells += [_number(r.get("ms_per_token"), ".2f"), _number(r and r["cache_bytes"] / 2**20, ",.2f")]
        lines.append(cells)
    return lines


def _number(value: float | None, form: str) -> str:
    return format(value, form) if value else "–"


def main() -> None:
    import matplotlib

    from weft.lab.bench.generation import plot

    os.environ["SOURCE_DATE_EPOCH"] = "0"  # the same file for the same numbers
    matplotlib.rcParams |= {"svg.hashsalt": "weft", "svg.fonttype": "none"}
    for name, picture in PLOTS.items():
        plot(ROOT / "docs" / picture, results(name)["rows"])


if __name__ == "__main__":
    main()
