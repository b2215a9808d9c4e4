"""Tables 2 and 3: language modelling of Wiki-40B in English, sparse attentions next to their Combiners, and poolings.

    weft sweep experiments/combiner/table2.py --only "Combiner-Fixed/2k" --set batch_size=8 --set accumulate=16

Combiner, https://arxiv.org/abs/2107.05768: width 768, 12 heads, 12 layers, 2,048 or 8,192 tokens, 125,000 steps of 128,
10,000 steps of warm-up to 3e-4, cosine decay, clipping at 1. The text (tensorflow.org/datasets/catalog/wiki40b, config
en) is read from data/wiki40b/{train,valid,test}.txt. The paper's 32 K SentencePiece vocabulary is not published; we
train a BPE of that size, so perplexities can be compared between rows but not with the paper. Table 3 is Combiner-Fixed
with different summaries of a span, at 8k.
"""

from recipe import language

from weft.lab.sweep import Cell

TITLE = "Tables 2 and 3: Wiki-40B"
METRIC = "perplexity"

PAPER = {  # row -> attention, its options, perplexity at 2,048 and at 8,192 tokens
    "Transformer": ("full", "", 17.26, None),
    "Performer": ("performer", "", 19.66, None),
    "Routing": ("routing", "", 20.85, None),
    "Fixed": ("sparse", '{"columns": 1}', 18.04, None),  # weft's default is 10
    "Combiner-Fixed": ("combiner-fixed", "", 17.70, 16.60),
    "Axial": ("axial", "", 20.82, None),
    "Combiner-Axial": ("combiner-axial", "", 17.56, 16.49),
    "Combiner-DeepSets-Max": ("combiner-fixed", '{"summary": "deepsets-max"}', None, 16.29),
    "Combiner-DeepSets-Mean": ("combiner-fixed", '{"summary": "deepsets-mean"}', None, 16.48),
    "Combiner-Mean": ("combiner-fixed", '{"summary": "mean"}', None, 16.54),
}


def cells() -> list[Cell]:
    return [
        Cell(row, column, language("wiki40b", attention, length, attention_options=options), figure)
        for row, (attention, options, *figures) in PAPER.items()
        for (column, length), figure in zip((("2k", 2048), ("8k", 8192)), figures, strict=True)
        if figure
    ]
