"""Table 5: PVT-V2-B1 with two attention layers per stage or one with twice the heads, on CIFAR-10.

    weft data get cifar10
    python -m experiments.wide.table5 --data data

Wide Attention Is The Way Forward For Transformers?, https://arxiv.org/abs/2210.00640. The models are timm's. The paper
gives no recipe and no image size, and not the channels of Wide-V2 (12.6 M parameters): here 224 pixels from scratch,
AdamW 1e-3, decay 0.05, 100 epochs, crops and mirrorings; and channels (80, 160, 400, 640), which have 12.0 M.
"""

from experiments.images import Images, timm_model
from experiments.table import Row, run

RECIPE = dict(
    epochs=100, batch_size=128, optimizer="adamw", learning_rate=1e-3, weight_decay=0.05, schedule="cosine",
    warmup=1950, precision="bf16-mixed", compile=True, eval_every=1000, checkpoint_every=1000,
)  # fmt: skip
MODELS = {
    "baseline": (dict(), 95.59),
    "wide": (dict(depths=(1, 1, 1, 1), num_heads=(2, 4, 10, 16)), 94.54),
    "wide-v2": (dict(depths=(1, 1, 1, 1), embed_dims=(80, 160, 400, 640), num_heads=(4, 8, 20, 32)), 94.94),
}


def rows(size: int = 224) -> list[Row]:
    return [
        Row(
            name,
            lambda name=name, o=options: Images(
                f"wide5-{name}", timm_model("pvt_v2_b1", **o), source="cifar10", size=size
            ),
            paper={"accuracy": figure},
        )
        for name, (options, figure) in MODELS.items()
    ]


if __name__ == "__main__":
    run(
        "Wide, Table 5",
        rows(),
        about=__doc__ or "",
        metrics={"accuracy": 100},
        seeds=(0, 1, 2),
        recipe=RECIPE,
    )
