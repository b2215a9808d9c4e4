"""Packed documents against one full sequence of the same tokens on the GPU, in one run.

    python3 -m benchmarks.gpu_packing [--out benchmarks/results/gpu_packing.json] [--padding 0 2048 ...] [--only NAME]

bfloat16, 16 heads of 64, causal: 16,384 tokens from documents of 500 to 2,000, forward and backward, eager and as a
CUDA graph, which is the kernels' own time. "numbers" passes the segment tensor, which is read once and then known;
"lengths" passes `weft.Segments`. --padding: the padded tokens that a group may have (`weft/core/segments.py`).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import weft
from benchmarks.gpu_timing import TOKENS, D, H, about, median_ms, median_of, tensors
from weft.core import segments as packing


def lengths(seed: int = 0) -> list[int]:
    """Documents of 500 to 2,000 tokens, TOKENS in all."""
    draw = random.Random(seed)
    found: list[int] = []
    while TOKENS - sum(found) > 2500:
        found.append(draw.randint(500, 2000))
    rest = TOKENS - sum(found)
    return [*found, rest] if rest <= 2000 else [*found, rest // 2, rest - rest // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--padding", nargs="+", type=int, default=[packing.PADDING["cuda"]])
    parser.add_argument("--only", nargs="+", default=["linear", "local", "combiner-fixed", "longformer", "full"])
    parser.add_argument("--out", type=Path, default=None, help="write the results to this JSON file")
    args = parser.parse_args()
    report = about("gpu_packing")
    print("{gpu}, torch {torch}, commit {commit}".format(**report), f"documents: {lengths()}", sep="; ")
    report |= {"shape": "bfloat16, 16 heads of 64, causal, 16,384 tokens", "documents": lengths(), "rows": []}
    (q, k, v), grad = tensors(TOKENS)
    for name in args.only:
        attn = weft.make_attention(name, heads=H, head_dim=D, causal=True).cuda()

        def step(segments=None, attn=attn) -> None:
            torch.autograd.grad(attn(q, k, v, segments=segments), (q, k, v), grad)

        def times(segments=None, step=step) -> tuple[float, float]:
            return median_of(lambda: step(segments), 150.0), median_ms(lambda: step(segments))

        eager, graph = times()
        print(f"{name:14} one sequence       eager {eager:7.3f} ms        graph {graph:7.3f} ms")
        row = {"name": name, "eager_ms": round(eager, 4), "graph_ms": round(graph, 4)}
        for padding in args.padding:
            packing.PADDING["cuda"] = padding
            made = weft.Segments.from_lengths(lengths(), device="cuda")
            for label, segments in (("lengths", made), ("numbers", made.numbers.clone())):
                a, b = times(segments)
                how = [f"{len(plan.shapes)} groups" for plan in made.plans.values()] or ["in place"]
                packed = {f"{label}_eager_ms": round(a, 4), f"{label}_graph_ms": round(b, 4), "how": how[0]}
                row |= {**packed, "padding": padding}
                print(
                    f"{name:14} {label} {padding:6}     eager {a:7.3f} ms {a / eager:5.2f}x graph {b:7.3f} ms "
                    f"{b / graph:5.2f}x   {how[0]}"
                )
            report["rows"].append(dict(row))
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
