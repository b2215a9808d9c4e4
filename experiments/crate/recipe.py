"""CRATE's recipes for ImageNet and for fine-tuning."""

from typing import Any

from weft.tasks import TrainConfig, make_config

# training images, without those held out for validation
PICTURES = {"imagenet": 1_271_167, "cifar10": 45_000, "cifar100": 45_000, "flowers102": 1938, "pets": 3496}
HOW: dict[str, Any] = dict(
    precision="bf16-mixed", compile=True, eval_every=1250, checkpoint_every=1250, schedule="cosine", clip=0.0,
    label_smoothing=0.1,
)  # fmt: skip
FINETUNE: dict[str, Any] = dict(preset="finetune", **HOW)


def pretraining(model: str, epochs: int = 150, **given: Any) -> TrainConfig:
    recipe: dict[str, Any] = dict(
        steps=epochs * PICTURES["imagenet"] // 2048, batch_size=2048, preset="lion", warmup=3125, **HOW
    )
    return make_config("imagenet", model=model, **{**recipe, **given})
