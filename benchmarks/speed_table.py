"""Write the table of eager times in docs/kernels.md from benchmarks/results/gpu_eager.json.

    python3 -m benchmarks.gpu_attention --out benchmarks/results/gpu_eager.json
    python benchmarks/speed_table.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks/results/gpu_eager.json", ROOT / "docs/kernels.md"
START, END = "<!-- eager: made by benchmarks/speed_table.py -->\n", "<!-- end of eager -->\n"


def table(report: dict[str, Any]) -> str:
    """One row per mechanism and length: eager, host and graph times of a causal forward and backward."""
    where = f"{report['gpu']}, torch {report['torch'].split('+')[0]}, commit {report['commit']}: `{report['command']}`"
    lines = [
        f"{where}.",
        "Milliseconds, forward and backward, causal. *eager* is the median of plain calls, *host* the time the CPU",
        "needs to queue one, *graph* the replay of a CUDA graph.",
        "",
        "| L | | eager | cuDNN / eager | host | host / cuDNN's host | graph |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = [r for r in report["rows"] if r["causal"] and (" m=" not in r["name"] or "default" in r["name"])]
    full = {r["L"]: r for r in rows if r["name"] == "cudnn"}
    for r in rows:
        if r["name"] == "flash" or r["L"] not in full or "linear, pub" in r["name"] or "..." in r["name"]:
            continue
        base, name = full[r["L"]], "cuDNN, full" if r["name"] == "cudnn" else f"`{r['name'].split(' m=')[0]}`"
        speed, host = base["eager_both_ms"] / r["eager_both_ms"], r["host_ms"] / base["host_ms"]
        times = f"{r['eager_both_ms']:.3f} | {speed:.1f} | {r['host_ms']:.3f} | {host:.1f} | {r['both_ms']:.3f}"
        lines.append(f"| {r['L']:,} | {name} | {times} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    before, rest = PAGE.read_text().split(START)
    after = rest.split(END)[1]
    PAGE.write_text(before + START + table(json.loads(RESULTS.read_text())) + END + after)


if __name__ == "__main__":
    main()
