"""Table 6: masked language modelling of C4.

    weft sweep experiments/combiner/table6.py --only "Combiner-Fixed/2k" --set batch_size=8 --set accumulate=16

Combiner, https://arxiv.org/abs/2107.05768: 15 % of the tokens hidden, the model and recipe of Table 2. The text
(huggingface.co/datasets/allenai/c4, en; 300 GB, a part is enough) is read from data/c4/{train,valid,test}.txt, with an
empty line between documents. A sequence has at most two segments, as in the paper. The vocabulary is our own BPE of
32 K pieces, so perplexities can be compared between rows but not with the paper.
"""

from recipe import language

from weft.lab.sweep import Cell

TITLE = "Table 6: masked C4"
METRIC = "perplexity"

PAPER = {  # row -> attention, perplexity at 2,048 and at 8,192 tokens
    "Transformer": ("full", 4.552, None),
    "BigBird": ("bigbird", 4.696, 4.542),
    "Performer": ("performer", 10.940, None),
    "Fixed": ("sparse", 5.279, None),
    "Combiner-Fixed": ("combiner-fixed", 5.170, 4.139),
    "Axial": ("axial", 5.370, None),
    "Combiner-Axial": ("combiner-axial", 4.809, 4.190),
    "Routing": ("routing", 6.703, None),
    "Combiner-Routing": ("combiner-routing", 6.539, None),
}
FIXED = {"sparse": '{"columns": 1}'}  # weft's default is 10


def cells() -> list[Cell]:
    return [
        Cell(row, column, language("c4-masked", attention, length, attention_options=FIXED.get(attention, "")), figure)
        for row, (attention, *figures) in PAPER.items()
        for (column, length), figure in zip((("2k", 2048), ("8k", 8192)), figures, strict=True)
        if figure
    ]
