"""Tables 1 and 8, enwik8: sampled training with and without local bias and a dense finish, in bits per byte.

    weft data get enwik8
    weft sweep experiments/subsampled/enwik8.py --set batch_size=8 --set accumulate=8

The Information Pathways Hypothesis, https://arxiv.org/abs/2306.01705: 16 layers, width 1,024, ALiBi, 4,096 bytes,
10,000 steps of 64, learning rate 1e-3 to 5e-4 after 4,000 steps of warm-up, σ from 0.1 to 0.225 with depth. The dense
finish takes the last 28 % of the steps (from 7,200 on, as in the authors' code; the paper does not say). The paper's
values are from the test column of Table 8; we could not access Table 1, which has the dense model. For runs of minutes,
see `combiner/enwik8.py`. The weights start as weft's usually do, not as the authors': for
these, add `--set initial=authors` (see README.md).
"""

from weft.lab.sweep import Cell
from weft.tasks import make_config

TITLE = "Table 8: enwik8, sampled with and without local bias"
METRIC = "bits_per_byte"
SEEDS = (0,)

PAPER = {  # share of sources sampled, schedule -> biased, unbiased
    ("50 %", "Sall-L2", 0.0): (1.028, 1.087),
    ("50 % + dense finish", "Sall-L2", 0.72): (1.026, 1.042),
    ("25 %", "Sall-L4", 0.0): (1.058, 1.287),
    ("25 % + dense finish", "Sall-L4", 0.72): (1.029, 1.075),
}
HOW = dict(precision="bf16-mixed", compile=True, checkpoint_every=250)


def cells() -> list[Cell]:
    found = [Cell("dense", "biased", make_config("enwik8", preset="pathways", **HOW), note="S0")]
    for (row, schedule, finish), figures in PAPER.items():
        for column, suffix, figure in zip(("biased", "unbiased"), ("", "U"), figures, strict=True):
            config = make_config(
                "enwik8",
                preset="pathways",
                subsample=schedule + suffix,
                sigma=0.1,
                sigma_last=0.225,
                finetune_dense_at=finish,
                **HOW,
            )
            found.append(Cell(row, column, config, figure))
    return found
