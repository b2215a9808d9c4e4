"""Tiny-ImageNet-50: 64 x 64 images of the first 50 classes of Tiny-ImageNet, from one Parquet file.

Columns image (encoded), label and split (train or val); the schema's metadata may have the names of the classes, as
JSON. The makers' val is the test part, and a fixed twentieth of train is validation data.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from .base import Columns, TaskData
from .config import TrainConfig
from .files import DamagedData, as_labels, find, read_parquet, split_off
from .images import ImageClassification, pictures_in
from .registry import add_task

CLASSES = 50


class TinyImageNet(ImageClassification):
    name, about = "tiny-imagenet-50", "64 x 64 images of 50 classes: tiny-imagenet-50.parquet"
    size = 64

    def load(self, config: TrainConfig) -> TaskData:
        path = find(config.data, ("tiny-imagenet-50.parquet",), "put the Parquet file there")
        table = read_parquet([path], ["image", "label", "split"])
        rows = {part: [i for i, split in enumerate(table["split"]) if split == part] for part in ("train", "val")}
        for part, found in rows.items():
            if not found:
                raise DamagedData(path, f"it has no rows of split {part}")
        stay, held_out = split_off(len(rows["train"]), max(1, len(rows["train"]) // 20))
        parts = ([rows["train"][i] for i in stay], [rows["train"][i] for i in held_out], rows["val"])
        train, val, test = (images(path, table, part) for part in parts)
        return self.data(config, train, val, test, CLASSES, names(path))


def images(path: Path, table: dict, rows: list[int]) -> Columns:
    pixels = pictures_in(path, table["image"], rows, 64)
    labels = as_labels((table["label"][row] for row in rows), CLASSES, path)
    return {"image": torch.from_numpy(pixels), "label": torch.from_numpy(labels).short()}


def names(path: Path) -> list[str] | None:
    import pyarrow.parquet as parquet

    known = (parquet.read_schema(path).metadata or {}).get(b"classes")
    return json.loads(known) if known else None


add_task(TinyImageNet())
