"""Table 5: PVT-V2-B1 with two attention layers per stage or one with twice the heads, on CIFAR-10.

    weft data get cifar10
    weft sweep experiments/wide/table5.py

Wide Attention Is The Way Forward For Transformers?, https://arxiv.org/abs/2210.00640. The models are timm's. The paper
gives no recipe, image size or channels of Wide-V2 (12.6 M parameters): here 224 pixels from scratch, AdamW 1e-3, decay
0.05, 100 epochs, crops and flips, and channels (80, 160, 400, 640), which have 12.0 M parameters.
"""

import json

from weft.lab.sweep import Cell
from weft.tasks import make_config

TITLE = "Table 5: PVT on CIFAR-10, deep and wide"
METRIC = "accuracy"
SEEDS = (0, 1, 2)

MODELS: dict[str, tuple[dict[str, list[int]], float]] = {
    "baseline": ({}, 95.59),
    "wide": (dict(depths=[1, 1, 1, 1], num_heads=[2, 4, 10, 16]), 94.54),
    "wide-v2": (dict(depths=[1, 1, 1, 1], embed_dims=[80, 160, 400, 640], num_heads=[4, 8, 20, 32]), 94.94),
}


def cells() -> list[Cell]:
    return [
        Cell(
            row,
            "PVT-V2-B1",
            make_config(
                "cifar10",
                model="timm:pvt_v2_b1",
                model_options=json.dumps(options),
                image_size=224,
                steps=100 * 45_000 // 128,
                batch_size=128,
                learning_rate=1e-3,
                weight_decay=0.05,
                warmup=1950,
                label_smoothing=0.0,
                clip=0.0,
                eval_every=1000,
                checkpoint_every=1000,
                precision="bf16-mixed",
                compile=True,
            ),
            figure,
        )
        for row, (options, figure) in MODELS.items()
    ]
