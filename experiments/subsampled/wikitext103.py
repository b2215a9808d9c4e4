"""Tables 1, 8 and 10, WikiText-103: sampled training, dense finish, and the ensemble of sub-models, in perplexity.

    weft sweep experiments/subsampled/wikitext103.py --only "S16-L4*/biased"
    weft eval experiments/subsampled/runs/wikitext103/s16-l6-biased-s0 --ensemble 50           Table 10

The Information Pathways Hypothesis, https://arxiv.org/abs/2306.01705: 16 layers, width 1,024, 8 heads, ALiBi, 3,072
words, adaptive input and softmax (cutoffs 20,000 and 60,000), 64,000 steps of 64, learning rate 1e-3 after 16,000
steps of warm-up, cosine decay; σ from 0.2 to 0.35 with depth; the dense finish from step 52,500 on. The text
(huggingface.co/datasets/Salesforce/wikitext, wikitext-103-v1) as data/wikitext-103/{train,valid,test}.txt. Input and
output embeddings are tied: 246.9 M parameters, as in the paper's source. We report the perplexity of windows that
overlap by 2,560 words; the paper does not say how it evaluates.
"""

from __future__ import annotations

from weft.lab.sweep import Cell
from weft.tasks import make_config

TITLE = "Tables 1, 8 and 10: WikiText-103"
METRIC = "perplexity"

FINISH = 52_500 / 64_000
# schedule, dense finish -> test perplexity with and without local bias, and that of an ensemble of 50 (Table 10)
PAPER: dict[str, tuple[str, float, float | None, float | None, str]] = {
    "dense": ("", 0.0, None, None, ""),
    "S16-L2": ("S16-L2", 0.0, 17.84, 18.18, ""),
    "S16-L2 +FT": ("S16-L2", FINISH, 17.68, 17.69, ""),
    "S16-L4": ("S16-L4", 0.0, 18.13, 20.15, ""),
    "S16-L4 +FT": ("S16-L4", FINISH, 17.60, 18.69, ""),
    "S16-L6": ("S16-L6", 0.0, 18.30, None, "ensemble of 50 in the paper: 17.80"),
    "S16-L6 +FT": ("S16-L6", FINISH, 17.86, None, "ensemble of 50 in the paper: 17.53"),
    "S12-L8": ("S12-L8", 0.0, 18.69, None, "ensemble of 50 in the paper: 18.10"),
    "S12-L8 +FT": ("S12-L8", FINISH, 17.92, None, "ensemble of 50 in the paper: 17.69"),
}


def cells() -> list[Cell]:
    found = []
    for row, (schedule, finish, biased, unbiased, note) in PAPER.items():
        for column, suffix, figure in (("biased", "", biased), ("unbiased", "U", unbiased)):
            if figure or (row, column) == ("dense", "biased"):
                sampled = dict(subsample=schedule and schedule + suffix, finetune_dense_at=finish)
                found.append(Cell(row, column, make_config("wikitext103", eval_stride=512, **sampled), figure, note))
    return found
