"""Table 8: Swin-T pre-trained on ImageNet-22k, then fine-tuned on ImageNet-1k, plain and cached.

    weft sweep experiments/cached/table8.py          images in data/imagenet22k and data/imagenet

Cached Transformers, https://arxiv.org/abs/2312.12742, with Swin's settings: 90 epochs at 1e-3, then 30 at 2e-5 (batch
1,024). The paper does not say whether the cache is kept between the two; here it is emptied, as for detection.
ImageNet-22k (image-net.org, after registration) is 1.3 TB; the decoded images need as much
again.
"""

from hosts import host

from weft.lab.sweep import Cell

TITLE = "Table 8: Swin-T from ImageNet-22k to ImageNet-1k"
METRIC = "accuracy"

PAPER = {"plain": (0.0, 80.9, 96.0), "cached": (0.5, 81.7, 96.4)}
PICTURES_22K = 14_197_122


def cells() -> list[Cell]:
    found = []
    for column, (ratio, top1, top5) in PAPER.items():
        steps = 90 * PICTURES_22K // 1024
        found.append(Cell("pre-training", column, host("Swin-T", ratio, task="imagenet22k", steps=steps)))
        tuning = host("Swin-T", ratio, epochs=30, learning_rate=2e-5, warmup=0, weight_decay=1e-8)
        start = f"pre-training-{column}"
        found.append(Cell("fine-tuned", column, tuning, top1, note=f"top-5 in the paper: {top5}", start=start))
    return found
