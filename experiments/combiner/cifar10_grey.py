"""CIFAR-10 as 1,024 grey pixels in a row: the Image column of Table 5.

    weft data get cifar10
    weft sweep experiments/combiner/cifar10_grey.py

Combiner, https://arxiv.org/abs/2107.05768, with the Long Range Arena's model and recipe (3 layers, width 64, 4 heads,
35,000 steps of 256). The paper's values are the better of two poolings; those of the baselines are the arena's. With
mean pooling the 1,024 tokens form the 32 x 32 grid of the image; a CLS token shifts it by one. Ours: bfloat16.
"""

from weft.lab.sweep import Cell
from weft.tasks import make_config

TITLE = "CIFAR-10, grey pixels"
METRIC = "accuracy"
SCALE, UNIT = 100, "%"
SEEDS = (0, 1, 2)

PAPER = {"full": 42.44, "combiner-axial": 41.33, "combiner-fixed": 41.67}
OPTIONS = {"combiner-axial": '{"block_size": 32}', "combiner-fixed": '{"block_size": 32}'}


def cells() -> list[Cell]:
    return [
        Cell(
            row=attention,
            column=f"{pooling} pooling",
            config=make_config(
                "cifar10-pixels",
                attention=attention,
                attention_options=OPTIONS.get(attention, ""),
                pooling=pooling,
                precision="bf16-mixed",
                compile=True,
            ),
            paper=figure,
            note="the paper has the better of the two poolings",
        )
        for attention, figure in PAPER.items()
        for pooling in ("mean", "cls")
    ]
