"""COCO-128: Mask R-CNN overfits 128 images, plain and cached.

    weft data convert coco coco128.tar                                        train2017, val2017, annotations
    (cd data/coco && rm -r val2017 && ln -s train2017 val2017 && cp annotations/instances_{train,val}2017.json)
    weft sweep experiments/cached/coco128.py
    weft report experiments/cached/coco128.py                                 a page with images and their boxes

Not in the paper (Cached Transformers, https://arxiv.org/abs/2312.12742): a test of data, detector and AP together.
The same 128 images (of 400 pixels) are train2017 and val2017, so the test figure is the AP on training images; one
image in a hundred is held out. No pre-trained backbone, no augmentation.
"""

from __future__ import annotations

import json

from hosts import caches

from weft.lab.sweep import Cell
from weft.tasks import make_config

TITLE = "Overfitting COCO-128"
METRIC = "box_ap50"
UNIT, SCALE = "%", 100

# A quarter of the usual proposals: with 512, half of the time goes into the mask head.
SIZE = json.dumps({"min_size": 400, "max_size": 667, "box_batch_size_per_image": 128})


def cells() -> list[Cell]:
    return [
        Cell(
            "Mask R-CNN",
            column,
            make_config(
                "coco-mask-rcnn", model="pvt-tiny", cache=ratio, cache_options=options,
                model_options=SIZE, steps=1500, learning_rate=2e-4, schedule="cosine", warmup=100, augment=False,
                eval_every=0, checkpoint_every=1500, keep=1, precision="bf16-mixed",
            ),
        )
        for column, ratio, options in (("plain", 0.0, ""), ("cached", 0.5, json.dumps(caches("PVT-"))))
    ]  # fmt: skip
