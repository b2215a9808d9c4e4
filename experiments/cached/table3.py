"""Tables 3 and 7: COCO detection with a PVT backbone, plain and cached, in Mask R-CNN and RetinaNet.

    weft sweep experiments/cached/table1.py --only "PVT-Tiny/*"              the backbones that the cells start from
    weft sweep experiments/cached/table3.py --only "* tiny/*"

Cached Transformers, https://arxiv.org/abs/2312.12742: a backbone pre-trained on ImageNet, its caches emptied, 12 epochs
of 16 images, AdamW 1e-4, decay 0.05, shorter side 800, longer at most 1,333; learning rate / 10 after 8 and 11 epochs.
Data and detectors: weft/tasks/detection.py.
"""

from __future__ import annotations

import json
from functools import partial

from hosts import caches

from weft.lab.sweep import Cell
from weft.tasks import make_config

TITLE = "Tables 3 and 7: COCO, plain and cached PVT"
METRIC = "box_ap"
UNIT, SCALE = "%", 100

PAPER = {  # AP of boxes, plain and cached; for Mask R-CNN also of masks. Table 3, Table 7
    "mask-rcnn": {
        "tiny": (36.7, 41.0, 35.1, 38.3),
        "small": (40.4, 44.5, 36.3, 41.0),
        "medium": (42.0, 46.6, 39.0, 42.3),
    },
    "retinanet": {"tiny": (36.7, 40.2), "small": (40.4, 44.0), "medium": (41.9, 45.7)},
}


def cells() -> list[Cell]:
    found = []
    make = partial(make_config, precision="bf16-mixed")
    for kind, sizes in PAPER.items():
        for size, figures in sizes.items():
            for i, (column, ratio) in enumerate((("plain", 0.0), ("cached", 0.5))):
                options = json.dumps(caches("PVT-")) if ratio else ""
                config = make(f"coco-{kind}", model=f"pvt-{size}", cache=ratio, cache_options=options)
                note = f"mask AP in the paper: {figures[2 + i]}" if kind == "mask-rcnn" else ""
                start = f"table1/pvt-{size}-{column}"
                found.append(Cell(f"{kind} {size}", column, config, figures[i], note, start=start))
    return found
