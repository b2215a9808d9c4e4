"""ImageNet and other folders of images that are too large for memory.

DATA/<name>/{train,val}/CLASS/* (the layout of ImageNet) is decoded once, resized (shorter side) and centre-cropped to
the image size, into memory-mapped files next to the folder: 193 GB for ImageNet at 224 pixels. The papers test on
ImageNet's validation images, so these are the test part here, and a twentieth of the training images, at most 10,000,
is the validation part. Training images are padded by an eighth, randomly cropped and flipped.

If DATA/imagenet/real.json is there (github.com/google-research/reassessed-imagenet), tests also give `real`: the share
of images whose predicted class is in their set of re-assessed labels (https://arxiv.org/abs/2006.07159). Images with an
empty set do not count.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from .base import BuiltFromData, Columns, Known, TaskData
from .config import TrainConfig
from .files import DamagedData, alone, atomic, decoded, find
from .images import PICTURES, ImageClassification, class_folders, refuse_strange
from .registry import add_task

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


class StoredImages(BuiltFromData, ImageClassification):
    size = 224

    def __init__(self, name: str, where: str, folder: str = ""):
        self.name, self.about = name, f"images of {where}"  # type: ignore[misc]
        self.where, self.folder = where, folder or name

    def read(self, config: TrainConfig, known: Known | None) -> TaskData:
        size = config.image_size or self.size
        how = f"download the images of {self.where} and put them there as train/CLASS/… and val/CLASS/…"
        folder = Path(config.data)
        if not (folder / "train").is_dir():
            folder = find(config.data, (self.folder,), how)
        classes = (known and known.classes) or class_folders(folder / "train")
        if len(classes) < 2:
            raise DamagedData(folder, "train/ needs a sub-folder for each of at least two classes")
        train, test = (stored(folder, part, classes, size) for part in ("train", "val"))
        cut = len(train["label"]) - max(1, min(10_000, len(train["label"]) // 20))
        kept, val = ({key: column[part] for key, column in train.items()} for part in (slice(cut), slice(cut, None)))
        if (folder / "real.json").exists():
            test["real"] = real_labels(folder / "real.json", folder / "val", len(classes))
        facts = {"classes": len(classes), "size": size, "mean": MEAN, "std": STD}
        return TaskData(kept, val, test, length=(size // config.patch) ** 2, facts=facts, classes=classes)

    def score(self, model: nn.Module, batch: Columns) -> dict[str, Tensor]:
        seen: list[Tensor] = []

        def answers(*inputs: Tensor) -> Tensor:
            seen.append(model(*inputs))
            return seen[-1]

        found = super().score(answers, batch)  # type: ignore[arg-type]
        if "real" in batch:
            found["real"] = (batch["real"] == seen[0].argmax(-1)[:, None]).any(1)
            found["real_count"] = (batch["real"] >= 0).any(1)
        return found

    def summary(self, sums: Mapping[str, float]) -> dict[str, float]:
        found = super().summary(sums)
        return {**found, "real": sums["real"] / max(1.0, sums["real_count"])} if "real" in sums else found


def real_labels(path: Path, images: Path, classes: int) -> Tensor:
    """(n, most labels of an image), −1 for none, in the order of `stored`. Set i belongs to ILSVRC2012_val_{i + 1}."""
    files = [file.stem for file, _ in listing(images, class_folders(images))]
    try:
        sets = [[int(label) for label in labels] for labels in json.loads(path.read_text())]
        numbers = [int(name.rpartition("_")[2]) - 1 for name in files]
    except (OSError, ValueError, TypeError) as error:
        raise DamagedData(path, f"it is not a list of label sets for the images in {images.name}/ ({error})") from error
    if len(sets) <= max(numbers):
        raise DamagedData(path, f"it has {len(sets)} label sets, but there is an image {max(numbers) + 1}")
    highest = max((label for labels in sets for label in labels), default=0)
    if highest >= classes:
        what = f"it has the label {highest}, but there are {classes} classes: its labels are for all of ImageNet's"
        raise DamagedData(path, what, "Move it away to test without it.")
    found = torch.full((len(files), max(1, *map(len, sets))), -1, dtype=torch.int16)
    for row, number in zip(found, numbers, strict=True):
        row[: len(sets[number])] = torch.tensor(sets[number])
    return found


def stored(folder: Path, part: str, classes: list[str], size: int) -> Columns:
    """All images of a part in shuffled order, decoded once into a memory-mapped file next to the folder.

    They are decoded again if class folders were added, removed or changed.
    """
    target = folder.with_name(f"{folder.name}-{part}-{size}.npy")
    about = target.with_suffix(".labels.json")
    names = class_folders(folder / part)
    refuse_strange(folder / part, names, classes)
    state = {name: (folder / part / name).stat().st_mtime_ns for name in names}
    found = _read(target, about, state)
    if found is None:
        with alone(target.with_suffix(".lock")):
            found = _read(target, about, state)
            if found is None:
                decode(folder / part, state, size, target, about)
                found = _read(target, about, state)
    if found is None:
        raise DamagedData(folder / part, f"{target} could not be written completely", "Is the disk full?")
    images, labels = found
    number = {i: classes.index(name) for i, name in enumerate(names)}
    return {"image": torch.from_numpy(images), "label": torch.tensor([number[i] for i in labels])}


def _read(target: Path, about: Path, state: dict[str, int]) -> tuple[np.ndarray, list[int]] | None:
    try:
        written = json.loads(about.read_text())
        if written["classes"] != state or written["size"] != target.stat().st_size:
            return None
        return np.load(target, mmap_mode="c"), written["labels"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def listing(folder: Path, names: Iterable[str]) -> list[tuple[Path, int]]:
    """The images of these classes and the number of their class, in the order in which they are stored."""
    files = [(p, i) for i, name in enumerate(names) for p in sorted((folder / name).rglob("*"))]
    files = [(p, i) for p, i in files if p.suffix.lower() in PICTURES]
    if not files:
        raise DamagedData(folder, "it has no images")
    return [files[i] for i in np.random.Generator(np.random.PCG64(0)).permutation(len(files))]


def decode(folder: Path, state: dict[str, int], size: int, target: Path, about: Path) -> None:
    from PIL import Image, ImageOps

    files = listing(folder, state)
    about.unlink(missing_ok=True)
    with atomic(target) as temporary:
        images = np.lib.format.open_memmap(temporary, "w+", np.uint8, (len(files), 3, size, size))

        def one(number: int) -> None:
            path = files[number][0]
            square = ImageOps.fit(decoded(path, path, "RGB"), (size, size), Image.Resampling.BICUBIC)
            images[number] = np.asarray(square).transpose(2, 0, 1)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(one, range(len(files))))
        images.flush()
    with atomic(about) as temporary:
        labels = [i for _, i in files]
        temporary.write_text(json.dumps({"classes": state, "size": target.stat().st_size, "labels": labels}))


add_task(StoredImages("imagenet", "ImageNet-1k (image-net.org, after registration)"))
add_task(StoredImages("imagenet22k", "ImageNet-22k (image-net.org, after registration)"))
add_task(StoredImages("flowers102", "Flowers-102 (robots.ox.ac.uk/~vgg/data/flowers/102)"))
add_task(StoredImages("pets", "Oxford-IIIT Pets (robots.ox.ac.uk/~vgg/data/pets)"))
