"""Table 1: bits per dimension of CIFAR-10 and ImageNet-64, each sparse attention next to its Combiner.

    weft data get cifar10
    weft sweep experiments/combiner/table1.py --only "*/CIFAR-10"

Combiner, https://arxiv.org/abs/2107.05768: 6 or 12 layers, 8 heads, width 512, batch 32, 3,072 or 12,288 bytes per
image, learned positions, learning rate 1e-3 with cosine decay, no dropout. 400,000 steps (from its appendix; the main
text says 500,000). A block is one row of the image. Put the .npz files of ImageNet-64 (image-net.org, "Imagenet64")
into data/imagenet64.
"""

import json

from weft.lab.sweep import Cell
from weft.tasks import make_config

TITLE = "Table 1: bits per dimension"
METRIC = "bits_per_dimension"
SEEDS = (0,)

# row -> attention, layers, CIFAR-10, ImageNet-64
PAPER: dict[str, tuple[str, int, float | None, float | None]] = {
    "Reformer": ("reformer", 6, None, 3.740),
    "Performer": ("performer", 6, 3.335, 3.719),
    "Logsparse": ("logsparse", 6, 4.253, 4.351),
    "Combiner-Logsparse": ("combiner-logsparse", 6, 3.366, 3.795),
    "Fixed": ("sparse", 6, 3.408, 3.696),
    "Combiner-Fixed": ("combiner-fixed", 6, 3.321, 3.654),
    "Axial": ("axial", 6, 3.666, 4.032),
    "Combiner-Axial": ("combiner-axial", 6, 3.050, 3.585),
    "Combiner-Mixture": ("combiner-mixture", 6, 3.040, 3.585),
    "Reformer, 12 layers": ("reformer", 12, None, 3.710),
    "Performer, 12 layers": ("performer", 12, 3.310, 3.636),
    "Routing Transformer, 12 layers": ("routing", 12, 2.950, None),
    "Combiner-Mixture, 12 layers": ("combiner-mixture", 12, 2.885, 3.504),
}
PICTURES = {"CIFAR-10": ("cifar10-density", 32), "ImageNet-64": ("imagenet64-density", 64)}
BLOCKS = ("sparse", "axial", "combiner-fixed", "combiner-axial", "combiner-mixture")
FIXED = {"sparse": {"columns": 1}}  # weft's default is 10


def cells() -> list[Cell]:
    found = []
    for row, (attention, layers, *figures) in PAPER.items():
        for (column, (task, side)), figure in zip(PICTURES.items(), figures, strict=True):
            options = {"block_size": 3 * side, **FIXED.get(attention, {})}
            config = make_config(
                task,
                attention=attention,
                attention_options=json.dumps(options) if attention in BLOCKS else "",
                layers=layers,
                heads=8,
                head_dim=64,
                dim=512,
                mlp_dim=2048,
                positions="learned",
                dropout=0.0,
                steps=400_000,
                warmup=10_000,
                batch_size=32,
                learning_rate=1e-3,
                eval_every=5000,
                checkpoint_every=5000,
                precision="bf16-mixed",
                compile=True,
            )
            found.append(Cell(row, column, config, figure, "" if figure else "not in the paper's table"))
    return found
