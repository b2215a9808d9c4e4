"""Table 1: CRATE and ViT trained on ImageNet-1k, then fine-tuned on smaller sets.

    python -m experiments.crate.table1 --data data --rows CRATE-T                        pre-training
    python -m experiments.crate.table1 --data data --rows CRATE-T --on cifar10           from the runs of the first

White-Box Transformers via Sparse Rate Reduction, https://arxiv.org/abs/2306.01129: Lion 2.4e-4, decay 0.5, batch
2,048, 150 epochs, 5 of warm-up, smoothing 0.1, crops and mirrorings, 224 pixels; fine-tuned by AdamW 5e-5, decay 0.01,
batch 512 (here 50 epochs, and without the paper's RandAugment). Pictures as {train,val}/CLASS in data/imagenet
(image-net.org, after registration), data/flowers102 (robots.ox.ac.uk/~vgg/data/flowers/102), data/pets
(robots.ox.ac.uk/~vgg/data/pets); CIFAR as `weft data get` has it. The ImageNet ReaL column (other labels for the same
pictures) is not here. On one device --set batch_size=256 accumulate=8. From scratch on CIFAR-10 in minutes:
`cifar10.py`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from experiments.images import Images, Make, continued, timm_model
from experiments.table import Row, run
from weft.models import crate

PAPER = {
    "CRATE-T": {"imagenet": 66.7, "cifar10": 95.5, "cifar100": 78.9, "flowers102": 84.6, "pets": 81.4},
    "CRATE-S": {"imagenet": 69.2, "cifar10": 96.0, "cifar100": 81.0, "flowers102": 87.1, "pets": 84.9},
    "CRATE-B": {"imagenet": 70.8, "cifar10": 96.8, "cifar100": 82.7, "flowers102": 88.7, "pets": 85.3},
    "CRATE-L": {"imagenet": 71.3, "cifar10": 97.2, "cifar100": 83.6, "flowers102": 88.3, "pets": 87.4},
    "ViT-T": {"imagenet": 71.5, "cifar10": 96.6, "cifar100": 81.8, "flowers102": 85.1, "pets": 88.5},
    "ViT-S": {"imagenet": 72.4, "cifar10": 97.2, "cifar100": 83.2, "flowers102": 88.5, "pets": 88.6},
}
SIZES = {"T": "tiny", "S": "small", "B": "base", "L": "large"}
HOW = dict(precision="bf16-mixed", compile=True, eval_every=1250, checkpoint_every=1250, schedule="cosine")
PRETRAIN = dict(
    epochs=150, batch_size=2048, optimizer="lion", learning_rate=2.4e-4, weight_decay=0.5, beta1=0.9, beta2=0.99,
    warmup=3125, label_smoothing=0.1, clip=0.0, **HOW,
)  # fmt: skip
FINETUNE = dict(
    epochs=50, batch_size=512, optimizer="adamw", learning_rate=5e-5, weight_decay=0.01, warmup=0, label_smoothing=0.1,
    **HOW,
)  # fmt: skip
FOLDER = Path("runs/crate-table-1")


def model(name: str) -> Make:
    kind, letter = name.split("-")
    if kind == "ViT":
        return timm_model(f"vit_{SIZES[letter]}_patch16_224")
    return lambda size, classes: crate(SIZES[letter], image_size=size, classes=classes)


def rows(on: str = "imagenet", size: int = 224, earlier: Path = FOLDER) -> list[Row]:
    found = []
    for name, figures in PAPER.items():
        make = model(name) if on == "imagenet" else continued(model(name), earlier / f"{name.lower()}-s0")
        found.append(
            Row(
                name,
                lambda n=name, m=make: Images(f"crate1-{on}-{n.lower()}", m, source=on, size=size),
                paper={"accuracy": figures[on]} if on in figures else {},
            )
        )
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--on", default="imagenet", help="imagenet, cifar10, cifar100, flowers102 or pets")
    given, rest = parser.parse_known_args()
    title = "CRATE, Table 1" if given.on == "imagenet" else f"CRATE, Table 1, {given.on}"
    recipe = PRETRAIN if given.on == "imagenet" else FINETUNE
    run(title, rows(given.on), about=__doc__ or "", metrics={"accuracy": 100}, recipe=recipe, arguments=rest)
