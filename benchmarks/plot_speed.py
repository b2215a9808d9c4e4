"""Draw docs/speed.svg from benchmarks/results/gpu_attention.json: forward and backward time against length.

python benchmarks/plot_speed.py
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
SHOWN = {
    "cudnn": ("full attention (cuDNN)", "#222222"),
    "combiner-fixed": ("combiner-fixed", "#0072B2"),
    "linear": ("linear", "#009E73"),
    "local": ("local", "#D55E00"),
}


def main() -> None:
    report = json.loads((ROOT / "benchmarks/results/gpu_attention.json").read_text())
    figure, axes = plt.subplots(figsize=(7, 4))
    for name, (label, colour) in SHOWN.items():
        rows = [r for r in report["rows"] if r["causal"] and r["name"] == name]
        if name == "combiner-fixed":
            rows = [r for r in report["rows"] if r["causal"] and r["name"].startswith(name) and "default" in r["name"]]
        lengths = [r["L"] for r in rows]
        axes.plot(lengths, [r["both_ms"] for r in rows], "o-", color=colour, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{L:,}" for L in lengths], rotation=30)
    axes.set_xlabel("tokens per sequence (16,384 per batch, or one sequence)")
    axes.set_ylabel("forward + backward, ms (CUDA graph replay)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    where = f"{report['gpu']}, torch {report['torch'].split('+')[0]}"
    axes.set_title(f"16 heads of 64, bfloat16, causal, {where}", fontsize=10)
    figure.tight_layout()
    matplotlib.rcParams["svg.hashsalt"] = "weft"  # the same file for the same numbers
    matplotlib.rcParams["svg.fonttype"] = "none"  # text as text: a smaller file
    figure.savefig(ROOT / "docs/speed.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
