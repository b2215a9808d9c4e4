"""IMDb byte by byte, one wide layer against six of the same heads: the outer columns of Table 3 for four attentions.

    weft data get imdb
    weft sweep experiments/wide/imdb_byte.py

Wide Attention Is The Way Forward For Transformers?, https://arxiv.org/abs/2210.00640: the first 1,000 bytes, 30,000
steps of 32, Adam, base rate 0.05 with 8,000 steps of warm-up, the best checkpoint on validation data tested. The
published code validates on the test reviews; here a tenth of the training reviews is held out. `combiner-fixed` is not
in the paper; it goes without dropout of its probabilities, which its kernel does not have. Ours: bfloat16, and an
evaluation every 1,000 steps.
"""

from weft.lab.config import make_config
from weft.lab.sweep import Cell

TITLE = "IMDb bytes, deep 6x8 and wide 1x48"
METRIC = "accuracy"
SCALE, UNIT = 100, "%"
SEEDS = (0, 1, 2)  # the paper has three runs

SHAPES = {"deep 6x8": (6, 8), "wide 1x48": (1, 48)}
PAPER: dict[str, tuple[float | None, float | None]] = {
    "full": (62.6, 62.4),
    "linear": (64.5, 64.7),
    "local": (55.5, 57.0),
    "combiner-fixed": (None, None),
}


def cells() -> list[Cell]:
    return [
        Cell(
            row=attention,
            column=column,
            config=make_config(
                "imdb-byte",
                attention=attention,
                layers=layers,
                heads=heads,
                attention_dropout=0.0 if attention == "combiner-fixed" else None,
                eval_every=1000,
                checkpoint_every=1000,
                precision="bf16-mixed",
                compile=True,
            ),
            paper=figure,
        )
        for attention, figures in PAPER.items()
        for (column, (layers, heads)), figure in zip(SHAPES.items(), figures, strict=True)
    ]
