"""Draw docs/speed.svg from benchmarks/results/gpu_attention.json: forward and backward time against length.

python -m benchmarks.plot_speed
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from benchmarks.tables import results, rows

ROOT = Path(__file__).resolve().parents[1]
SHOWN = {
    "cudnn": ("full attention (cuDNN)", "#222222"),
    "combiner-fixed": ("combiner-fixed", "#0072B2"),
    "linear": ("linear", "#009E73"),
    "local": ("local", "#D55E00"),
}


def main() -> None:
    figure, axes = plt.subplots(figsize=(7, 4))
    lengths = sorted({L for name, L, causal in rows() if name == "cudnn" and causal})
    for name, (label, colour) in SHOWN.items():
        for key, style in (("eager_both_ms", "o-"), ("both_ms", "x")):
            times = {L: rows()[name, L, True] for L in lengths if key in rows().get((name, L, True), {})}
            points = [at[key][0] for at in times.values()]
            axes.plot(list(times), points, style, color=colour, label=label if key == "eager_both_ms" else None)
    axes.plot([], [], "kx", label="the kernels alone (CUDA graphs)")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{L:,}" for L in lengths], rotation=30)
    axes.set_xlabel("tokens per sequence (16,384 per batch, or one sequence)")
    axes.set_ylabel("eager forward + backward, ms")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    newest = results("gpu_attention")["runs"][0]
    where = f"{newest['gpu']}, torch {newest['torch'].split('+')[0]}"
    axes.set_title(f"16 heads of 64, bfloat16, causal, {where}", fontsize=10)
    figure.tight_layout()
    matplotlib.rcParams["svg.hashsalt"] = "weft"  # the same file for the same numbers
    matplotlib.rcParams["svg.fonttype"] = "none"  # text as text: a smaller file
    figure.savefig(ROOT / "docs/speed.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
