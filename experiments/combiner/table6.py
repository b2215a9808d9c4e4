"""Table 6: masked language modelling of C4.

    python -m experiments.combiner.table6 --data data --rows Combiner-Fixed-2k

Combiner, https://arxiv.org/abs/2107.05768: 15 % of the tokens hidden, the model and recipe of Table 2. The text
(huggingface.co/datasets/allenai/c4, en; 300 GB, a part will do) is expected as data/c4/{train,valid,test}.txt; windows
run over document borders, where the paper has at most two segments each. The vocabulary is a BPE of 32 K trained here:
perplexities compare between rows and not with the paper's.
"""

from experiments.combiner.table2 import RECIPE
from experiments.table import Row, run
from experiments.tokens import MaskedTokens

PAPER = {
    "Transformer-2k": ("full", 2048, 4.552),
    "BigBird-2k": ("bigbird", 2048, 4.696),
    "Performer-2k": ("performer", 2048, 10.940),
    "Fixed-2k": ("sparse", 2048, 5.279),
    "Combiner-Fixed-2k": ("combiner-fixed", 2048, 5.170),
    "Axial-2k": ("axial", 2048, 5.370),
    "Combiner-Axial-2k": ("combiner-axial", 2048, 4.809),
    "Routing-2k": ("routing", 2048, 6.703),
    "Combiner-Routing-2k": ("combiner-routing", 2048, 6.539),
    "BigBird-8k": ("bigbird", 8192, 4.542),
    "Combiner-Axial-8k": ("combiner-axial", 8192, 4.190),
    "Combiner-Fixed-8k": ("combiner-fixed", 8192, 4.139),
}


def rows(corpus: str = "c4", pieces: int = 32_000) -> list[Row]:
    return [
        Row(
            name,
            lambda name=name, length=length: MaskedTokens(f"c4-{name.lower()}", corpus, length=length, pieces=pieces),
            paper={"perplexity": figure},
            config={"attention": attention},
        )
        for name, (attention, length, figure) in PAPER.items()
    ]


if __name__ == "__main__":
    run("Combiner, Table 6", rows(), about=__doc__ or "", metrics={"perplexity": 1}, recipe=RECIPE)
