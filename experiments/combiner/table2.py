"""Tables 2 and 3: language modelling of Wiki-40B in English, sparse attentions beside their Combiners, and poolings.

    python -m experiments.combiner.table2 --data data --rows Combiner-Fixed-2k

Combiner, https://arxiv.org/abs/2107.05768: width 768, 12 heads, 12 layers, 2,048 or 8,192 tokens, 125,000 steps of
128, 10,000 of warm-up to 3e-4, cosine, clipping at 1. The text (tensorflow.org/datasets/catalog/wiki40b, config en) is
expected as data/wiki40b/{train,valid,test}.txt. The paper's 32 K SentencePiece vocabulary is not published; a BPE of
that size is trained here, so perplexities compare between rows and not with the paper's. On one device a step of 128
is made of micro-steps: --set batch_size=8 accumulate=16.
"""

from experiments.table import Row, run
from experiments.tokens import Tokens

# row -> attention, its options, length, the paper's perplexity
TABLE_2 = {
    "Transformer-2k": ("full", "", 2048, 17.26),
    "Performer-2k": ("performer", "", 2048, 19.66),
    "Routing-2k": ("routing", "", 2048, 20.85),
    "Fixed-2k": ("sparse", "", 2048, 18.04),
    "Combiner-Fixed-2k": ("combiner-fixed", "", 2048, 17.70),
    "Axial-2k": ("axial", "", 2048, 20.82),
    "Combiner-Axial-2k": ("combiner-axial", "", 2048, 17.56),
    "Combiner-Fixed-8k": ("combiner-fixed", "", 8192, 16.60),
    "Combiner-Axial-8k": ("combiner-axial", "", 8192, 16.49),
}
TABLE_3 = {  # Combiner-Fixed by the summary of a span; Combiner-Max-8k is Combiner-Fixed-8k
    "Combiner-DeepSets-Max-8k": ("combiner-fixed", '{"summary": "deepsets-max"}', 8192, 16.29),
    "Combiner-DeepSets-Mean-8k": ("combiner-fixed", '{"summary": "deepsets-mean"}', 8192, 16.48),
    "Combiner-Mean-8k": ("combiner-fixed", '{"summary": "mean"}', 8192, 16.54),
}
RECIPE = dict(
    layers=12, heads=12, head_dim=64, dim=768, mlp_dim=3072, dropout=0.0, positions="learned", steps=125_000,
    batch_size=128, warmup=10_000, learning_rate=3e-4, schedule="cosine", optimizer="adam", beta2=0.999, clip=1.0,
    precision="bf16-mixed", compile=True, eval_every=2500, eval_batches=50, checkpoint_every=2500,
)  # fmt: skip


def rows(corpus: str = "wiki40b", pieces: int = 32_000) -> list[Row]:
    return [
        Row(
            name,
            lambda name=name, length=length: Tokens(f"wiki40b-{name.lower()}", corpus, length=length, pieces=pieces),
            paper={"perplexity": figure},
            config={"attention": attention, "attention_options": options},
        )
        for name, (attention, options, length, figure) in {**TABLE_2, **TABLE_3}.items()
    ]


if __name__ == "__main__":
    run("Combiner, Tables 2 and 3", rows(), about=__doc__ or "", metrics={"perplexity": 1}, recipe=RECIPE)
