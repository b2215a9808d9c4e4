"""Bits per dimension of CIFAR-10 after ten minutes: full attention, the fixed pattern and three Combiners.

    weft data get cifar10
    weft sweep experiments/combiner/cifar10_density.py

Combiner, https://arxiv.org/abs/2107.05768: the 6-layer model and recipe of Table 1 (`table1.py`), with as many steps as
fit into ten minutes instead of 400,000, and 5 % of them as warm-up. A block is one row of the image; `sparse` reads the
last ten bytes of every row, the paper's only one. The paper has no full attention here.
"""

from weft.lab.sweep import Cell
from weft.tasks import make_config

TITLE = "CIFAR-10 density in ten minutes"
METRIC = "bits_per_dimension"

PAPER = {"full": None, "sparse": 3.408, "combiner-fixed": 3.321, "combiner-axial": 3.050, "combiner-mixture": 3.040}


def cells() -> list[Cell]:
    return [
        Cell(
            attention,
            "10 min",
            make_config(
                "cifar10-density",
                time_budget=10,
                steps=400,  # only for the fractions of warm-up, evaluations and checkpoints
                warmup=20,
                eval_every=20,
                eval_batches=10,
                checkpoint_every=20,
                attention=attention,
                attention_options="" if attention == "full" else '{"block_size": 96}',
                layers=6,
                heads=8,
                head_dim=64,
                dim=512,
                mlp_dim=2048,
                positions="learned",
                dropout=0.0,
                batch_size=32,
                learning_rate=1e-3,
                precision="bf16-mixed",
                compile=True,
            ),
            figure,
            "the paper's is after 400,000 steps" if figure else "",
        )
        for attention, figure in PAPER.items()
    ]
