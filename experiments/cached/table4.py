"""Table 4: translation, a Transformer with and without caches in its encoder.

    weft sweep experiments/cached/table4.py --only "IWSLT14 De-En/*"
    weft sweep experiments/cached/table4.py --only "Multi30k*"
    echo "Ein Hund läuft." | weft translate experiments/cached/runs/table4/multi30k-de-en-cached-s0

Cached Transformers, https://arxiv.org/abs/2312.12742: pre-norm, 6 + 6 layers, learning rate 1.5e-3 with inverse
square-root decay, ratio 0.5, 64 slots, caches in the encoder only, valid tokens only, the last ten checkpoints
averaged. What the paper leaves open follows fairseq's IWSLT recipe: width 512, MLP 1,024, 4 heads, dropout 0.3,
smoothing 0.1, a joint BPE of 10,000 pieces, beam 5; 128 pairs per step instead of 4,096 tokens. IWSLT (wit3.fbk.eu) as
DATA/iwslt14.de-en/train.de, train.en, valid.de, … (`weft data convert iwslt`); Multi30k, which is not in the paper, as
DATA/multi30k.parquet with columns split, de, en.
"""

from __future__ import annotations

from weft.lab.sweep import Cell
from weft.tasks import make_config

TITLE = "Table 4: translation, plain and cached"
METRIC = "bleu"

PAPER = {  # BLEU, plain and cached
    "IWSLT14 De-En": (35.5, 36.0),
    "IWSLT14 Es-En": (41.4, 41.8),
    "IWSLT14 En-Fr": (41.5, 41.7),
    "IWSLT15 De-En": (36.1, 36.3),
    "IWSLT15 En-Vi": (29.8, 30.2),
    "IWSLT15 Cs-En": (28.8, 29.4),
    "Multi30k De-En": (None, None),
    "Multi30k En-De": (None, None),
}
ENCODER = '{"where": "encoder.*", "length": 64}'


def cells() -> list[Cell]:
    return [
        Cell(
            row,
            column,
            make_config(
                row.lower().replace(" ", "-"),
                preset="small" if row.startswith("Multi30k") else "",  # it has 29,000 captions
                cache=ratio,
                cache_options=options,
                precision="bf16-mixed",
            ),
            figure,
        )
        for row, figures in PAPER.items()
        for (column, ratio, options), figure in zip(
            (("plain", 0.0, ""), ("cached", 0.5, ENCODER)), figures, strict=True
        )
    ]
