"""Table 1: CRATE and ViT trained on ImageNet-1k, then fine-tuned on smaller sets.

    weft sweep experiments/crate/table1.py --only "CRATE-T/ImageNet" --set batch_size=256 --set accumulate=8
    weft sweep experiments/crate/table1.py --only "CRATE-T/*"                 and the runs that start from it

White-Box Transformers via Sparse Rate Reduction, https://arxiv.org/abs/2306.01129: Lion 2.4e-4, decay 0.5, batch
2,048, 150 epochs, 5 of warm-up, smoothing 0.1, crops and flips, 224 pixels; fine-tuned with AdamW 5e-5, decay 0.01,
batch 512, RandAugment (here 50 epochs). Images as {train,val}/CLASS in data/imagenet (image-net.org, after
registration), data/flowers102 (robots.ox.ac.uk/~vgg/data/flowers/102), data/pets (robots.ox.ac.uk/~vgg/data/pets);
CIFAR from `weft data get`. The column ImageNet ReaL (74.0, 76.0, 76.5, 77.4 for CRATE, 78.3, 78.4 for ViT) is the
figure `real` of the ImageNet runs (weft/tasks/imagenet.py). From scratch on CIFAR-10 in a minute: `cifar10.py`.
"""

from recipe import FINETUNE, PICTURES, pretraining

from weft.lab.sweep import Cell
from weft.tasks import make_config

TITLE = "Table 1: CRATE and ViT on ImageNet-1k, and transferred"
METRIC = "accuracy"

COLUMNS = {
    "ImageNet": "imagenet",
    "CIFAR-10": "cifar10",
    "CIFAR-100": "cifar100",
    "Flowers": "flowers102",
    "Pets": "pets",
}
PAPER = {
    "CRATE-T": ("crate-tiny", 66.7, 95.5, 78.9, 84.6, 81.4),
    "CRATE-S": ("crate-small", 69.2, 96.0, 81.0, 87.1, 84.9),
    "CRATE-B": ("crate-base", 70.8, 96.8, 82.7, 88.7, 85.3),
    "CRATE-L": ("crate-large", 71.3, 97.2, 83.6, 88.3, 87.4),
    "ViT-T": ("timm:vit_tiny_patch16_224", 71.5, 96.6, 81.8, 85.1, 88.5),
    "ViT-S": ("timm:vit_small_patch16_224", 72.4, 97.2, 83.2, 88.5, 88.6),
}


def cells() -> list[Cell]:
    found = []
    for row, (model, *figures) in PAPER.items():
        for (column, task), figure in zip(COLUMNS.items(), figures, strict=True):
            if task == "imagenet":
                found.append(Cell(row, column, pretraining(model), figure))
                continue
            steps = 50 * PICTURES[task] // 512
            config = make_config(task, model=model, steps=steps, **FINETUNE)
            found.append(Cell(row, column, config, figure, start=f"{row.lower()}-imagenet"))
    return found
