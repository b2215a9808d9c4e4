"""Table 6: ListOps with and without a gated recurrent cache around every attention layer.

    weft data make listops
    weft sweep experiments/cached/listops.py

Cached Transformers, https://arxiv.org/abs/2312.12742: width 512, MLP 1,024, 8 heads, 6 layers; ratio 0.5, as many
slots as tokens; 5,000 steps of 32, base rate 0.05 with 1,000 steps of warm-up, weight decay 0.1 (decoupled, as in the
code of the Long Range Arena, whose settings the inner attentions use). Ours: bfloat16, and an evaluation every 250
steps. Plain `full` is packed, which gives the same losses; a cached model is padded, because its number of slots is the
length of a batch.
"""

from weft.lab.sweep import Cell
from weft.tasks import make_config

TITLE = "ListOps, plain and cached"
METRIC = "accuracy"
SCALE, UNIT = 100, "%"
SEEDS = (0, 1, 2)  # the paper does not give its number of runs

PAPER = {"full": (36.23, 37.40), "bigbird": (36.06, 37.45), "reformer": (37.27, 37.85)}
OPTIONS = {"reformer": '{"chunk": 10, "buckets": 10, "hashes": 1}'}
RATIOS = {"plain": 0.0, "cached": 0.5}


def cells() -> list[Cell]:
    return [
        Cell(
            row=attention,
            column=column,
            config=make_config(
                "listops",
                preset="code",
                attention=attention,
                attention_options=OPTIONS.get(attention, ""),
                cache=ratio,
                layers=6,
                heads=8,
                mlp_dim=1024,
                steps=5000,
                eval_every=250,
                checkpoint_every=250,
                precision="bf16-mixed",
                compile=True,
                packed=attention == "full" and not ratio,
            ),
            paper=figure,
        )
        for attention, figures in PAPER.items()
        for (column, ratio), figure in zip(RATIOS.items(), figures, strict=True)
    ]
