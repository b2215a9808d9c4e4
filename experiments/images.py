"""Image classification for the tables: any model on CIFAR or on a folder of pictures too large for memory.

A folder in the layout of ImageNet (train/CLASS/*.JPEG, val/CLASS/*.JPEG) is decoded once, shorter side to the image
size and the middle cut out, into memory-mapped files in the data folder: 193 GB for ImageNet at 224 pixels. Training
pictures are padded by an eighth, cropped at random and mirrored, and nothing more: where a paper augments more richly,
the table says so.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weft.lab.checkpoint import Checkpoints
from weft.lab.run import Run
from weft.layers import CachedAttention
from weft.models.image import Normalised
from weft.tasks import DataMissing, TaskData, get_task
from weft.tasks.base import Columns
from weft.tasks.config import TrainConfig
from weft.tasks.images import PICTURES, ImageClassification

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
Make = Callable[[int, int], nn.Module]  # image size, classes -> the model, fed with normalised images


class Images(ImageClassification):
    """`make(size, classes)` on `source`: cifar10, cifar100, or the name of a folder under the data folder."""

    about = "a row of a table"

    def __init__(self, name: str, make: Make, *, source: str, size: int):
        self.name, self.make, self.source, self.size = name, make, source, size  # type: ignore[misc]

    def load(self, config: TrainConfig) -> TaskData:
        return load(config.data, self.source, config.image_size or self.size, config.patch)

    def model(self, config: TrainConfig, data: TaskData) -> nn.Module:
        model = self.make(data.facts["size"], data.facts["classes"])
        return Normalised(model, data.facts["mean"], data.facts["std"])

    def batch(self, rows: Columns, config: TrainConfig, generator: torch.Generator, training: bool) -> Columns:
        if rows["image"].shape[-1] != self.size and not config.image_size:
            rows = {**rows, "image": resize(rows["image"], self.size)}
        return super().batch(rows, config, generator, training)

    def score(self, model: nn.Module, batch: Columns) -> dict[str, Tensor]:
        logits, label = model(*self.inputs(batch)).float(), batch["label"].long()
        ranked = logits.topk(min(5, logits.shape[-1])).indices == label[:, None]
        loss = nn.functional.cross_entropy(logits, label, reduction="none")
        return {"loss": loss, "correct": ranked[:, 0], "among5": ranked.any(1), "count": torch.ones_like(label)}

    def summary(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {**super().summary(sums), "top5": sums["among5"] / sums["count"]}


def resize(images: Tensor, size: int) -> Tensor:
    found = nn.functional.interpolate(images.float(), size=(size, size), mode="bilinear", antialias=True)
    return found.round().clamp(0, 255).to(torch.uint8)


@cache
def load(data: str, source: str, size: int, patch: int) -> TaskData:
    """Small pictures stay as they are in memory and are brought to their size batch by batch."""
    if source in ("cifar10", "cifar100"):
        from weft.tasks.config import make_config

        found = get_task(source).load(make_config(source, data=data, patch=1))
        return TaskData(found.train, found.val, found.test, found.length, {**found.facts, "size": size})
    folder = Path(data) / source
    if not (folder / "train").is_dir():
        raise DataMissing(f"there is no {folder}/train: put the pictures there as train/CLASS/… and val/CLASS/…")
    classes = sorted(p.name for p in (folder / "train").iterdir() if p.is_dir())
    train, test = (stored(folder, part, classes, size) for part in ("train", "val"))
    # The papers test on ImageNet's validation pictures; what validates here is held out from the training ones.
    cut = len(train["label"]) - max(1, min(10_000, len(train["label"]) // 20))
    val = {key: column[cut:] for key, column in train.items()}
    facts = {"classes": len(classes), "size": size, "mean": MEAN, "std": STD}
    length = (size // patch) ** 2
    return TaskData({key: column[:cut] for key, column in train.items()}, val, test, length, facts)


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
        raise DataMissing(f"there are no pictures in {folder}")
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


def timm_model(name: str, **options: Any) -> Make:
    """timm's `name`, from scratch."""

    def make(size: int, classes: int) -> nn.Module:
        import timm

        sized: dict[str, Any] = {"img_size": size} if name.startswith(("vit", "swin")) else {}
        return timm.create_model(name, pretrained=False, num_classes=classes, **sized, **options)

    return make


def weights_of(run_folder: Path) -> dict[str, Tensor]:
    """The newest weights of a row's run."""
    newest = Checkpoints(Run(run_folder).checkpoints).newest()
    if newest is None:
        raise SystemExit(f"{run_folder} has no checkpoint: run the pre-training first")
    prefix = "model/model."
    return {k.removeprefix(prefix): v for k, v in newest[0].items() if k.startswith(prefix)}


def continued(make: Make, run_folder: Path) -> Make:
    """The model with the weights of an earlier run, but for its head and its caches, which are empty again."""

    def load(size: int, classes: int) -> nn.Module:
        model = make(size, classes)
        kept = {k: v for k, v in weights_of(run_folder).items() if not k.startswith("head.")}
        missing, unexpected = model.load_state_dict(kept, strict=False)
        if unexpected or [name for name in missing if not name.startswith("head.")]:
            raise ValueError(f"{run_folder} holds another model: {[*missing, *unexpected][:5]}")
        for layer in model.modules():
            if isinstance(layer, CachedAttention):
                layer.reset()
        return model

    return load
