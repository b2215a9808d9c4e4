"""The paper's language model and recipe, for Tables 2, 3 and 6."""

from typing import Any

from weft.tasks import TrainConfig, make_config


def language(task: str, attention: str, length: int, **given: Any) -> TrainConfig:
    return make_config(
        task, attention=attention, max_length=length, layers=12, heads=12, head_dim=64, dim=768, mlp_dim=3072,
        dropout=0.0, positions="learned", steps=125_000, batch_size=128, warmup=10_000, learning_rate=3e-4,
        schedule="cosine", optimizer="adam", beta2=0.999, clip=1.0, precision="bf16-mixed", compile=True,
        eval_every=2500, eval_batches=50, checkpoint_every=2500, **given,
    )  # fmt: skip
