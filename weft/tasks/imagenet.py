"""ImageNet and other folders of pictures that are too large for memory.

DATA/<name>/{train,val}/CLASS/* (the layout of ImageNet) is decoded once, shorter side to the image size and the middle
cut out, into memory-mapped files beside the folder: 193 GB for ImageNet at 224 pixels. The papers test on ImageNet's
validation pictures, so these are the test part here, and a twentieth of the training pictures, at most 10,000,
validates. Training pictures are padded by an eighth, cropped at random and mirrored.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from .base import Columns, TaskData
from .config import TrainConfig
from .files import DamagedData, find
from .images import PICTURES, ImageClassification
from .registry import add_task

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


class StoredImages(ImageClassification):
    size = 224

    def __init__(self, name: str, where: str, folder: str = ""):
        self.name, self.about = name, f"pictures of {where}"  # type: ignore[misc]
        self.where, self.folder = where, folder or name

    def load(self, config: TrainConfig) -> TaskData:
        size = config.image_size or self.size
        how = f"get the pictures from {self.where} and put them there as train/CLASS/… and val/CLASS/…"
        folder = find(config.data, (self.folder,), how)
        classes = sorted(p.name for p in (folder / "train").glob("*") if p.is_dir())
        if len(classes) < 2:
            raise DamagedData(folder, "train/ needs a sub-folder for each of at least two classes")
        train, test = (stored(folder, part, classes, size) for part in ("train", "val"))
        cut = len(train["label"]) - max(1, min(10_000, len(train["label"]) // 20))
        kept, val = ({key: column[part] for key, column in train.items()} for part in (slice(cut), slice(cut, None)))
        facts = {"classes": len(classes), "size": size, "mean": MEAN, "std": STD}
        return TaskData(kept, val, test, length=(size // config.patch) ** 2, facts=facts)


def stored(folder: Path, part: str, classes: list[str], size: int) -> Columns:
    """All pictures of a part in a shuffled order, decoded once into a file beside the folder, mapped into memory."""
    target = folder.with_name(f"{folder.name}-{part}-{size}.npy")
    labels = target.with_suffix(".labels.json")
    if not labels.exists():
        decode(folder / part, classes, size, target, labels)
    images = np.load(target, mmap_mode="c")
    return {"image": torch.from_numpy(images), "label": torch.tensor(json.loads(labels.read_text()))}


def decode(folder: Path, classes: list[str], size: int, target: Path, labels: Path) -> None:
    from PIL import Image, ImageOps

    files = [(p, i) for i, name in enumerate(classes) for p in sorted((folder / name).rglob("*"))]
    files = [(p, i) for p, i in files if p.suffix.lower() in PICTURES]
    if not files:
        raise DamagedData(folder, "there are no pictures in it")
    files = [files[i] for i in np.random.Generator(np.random.PCG64(0)).permutation(len(files))]
    temporary = target.with_suffix(".tmp")
    images = np.lib.format.open_memmap(temporary, "w+", np.uint8, (len(files), 3, size, size))

    def one(number: int) -> None:
        with Image.open(files[number][0]) as image:
            square = ImageOps.fit(image.convert("RGB"), (size, size), Image.Resampling.BICUBIC)
        images[number] = np.asarray(square).transpose(2, 0, 1)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(one, range(len(files))))
    images.flush()
    os.replace(temporary, target)
    labels.write_text(json.dumps([i for _, i in files]))


add_task(StoredImages("imagenet", "ImageNet-1k (image-net.org, after registration)"))
add_task(StoredImages("imagenet22k", "ImageNet-22k (image-net.org, after registration)"))
add_task(StoredImages("flowers102", "Flowers-102 (robots.ox.ac.uk/~vgg/data/flowers/102)"))
add_task(StoredImages("pets", "Oxford-IIIT Pets (robots.ox.ac.uk/~vgg/data/pets)"))
