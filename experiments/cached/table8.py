"""Table 8: Swin-T pre-trained on ImageNet-22k, then fine-tuned on ImageNet-1k, plain and cached.

    python -m experiments.cached.table8 --data data --stage pretrain     pictures in data/imagenet22k
    python -m experiments.cached.table8 --data data --stage finetune     pictures in data/imagenet

Cached Transformers, https://arxiv.org/abs/2312.12742, by Swin's settings: 90 epochs at 1e-3, then 30 at 2e-5 (batch
1,024). The paper does not say whether the cache is kept between the two; here it is emptied, as for detection.
ImageNet-22k (image-net.org, after registration) is 1.3 TB; whoever has it needs as much again for the decoded
pictures.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from experiments.cached.models import cached, plain
from experiments.cached.table1 import METRICS, RECIPE
from experiments.images import Images, continued
from experiments.table import Row, run

PAPER = {"Swin-T": (80.9, 96.0), "Swin-T (Cached)": (81.7, 96.4)}
STAGES = {
    "pretrain": ("imagenet22k", {**RECIPE, "epochs": 90}),
    "finetune": ("imagenet", {**RECIPE, "epochs": 30, "learning_rate": 2e-5, "warmup": 0, "weight_decay": 1e-8}),
}


def rows(
    stage: str, source: str = "", size: int = 224, earlier: Path = Path("runs/cached-table-8-pretrain")
) -> list[Row]:
    found, where = [], source or STAGES[stage][0]
    for name, (top1, top5) in PAPER.items():
        make = cached("Swin-T") if "Cached" in name else plain("Swin-T")
        slug = name.lower().replace(" (cached)", "-cached")
        if stage == "finetune":
            make = continued(make, earlier / f"{slug}-s0")
        paper = {"accuracy": top1, "top5": top5} if stage == "finetune" else {}
        found.append(
            Row(name, lambda s=slug, m=make: Images(f"cached8-{stage}-{s}", m, source=where, size=size), paper=paper)
        )
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--stage", choices=list(STAGES), required=True)
    given, rest = parser.parse_known_args()
    run(
        f"Cached, Table 8, {given.stage}",
        rows(given.stage),
        about=__doc__ or "",
        metrics=METRICS,
        recipe=STAGES[given.stage][1],
        arguments=rest,
    )
