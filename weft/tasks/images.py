"""Image classification: patches of a picture as tokens. Any folder of pictures, one sub-folder per class.

Read from train/CLASS/picture and val/CLASS/picture, the layout of torchvision's ImageFolder; test/ too where there is
one, else the test part is val and a twentieth of train, always the same, is validation data. Training pictures are
padded by an eighth, cropped at random and flipped. The pictures are decoded once, to bytes in memory.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Classification, Columns, TaskData, block_options, crate_options
from .config import TrainConfig
from .files import DamagedData, find, split_off
from .registry import add_task

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm")


class ImageClassification(Classification):
    size: int
    defaults = dict(
        layers=6, heads=8, dim=256, head_dim=32, mlp_dim=512, dropout=0.0, steps=20_000, batch_size=128,
        optimizer="adamw", learning_rate=1e-3, weight_decay=0.05, beta2=0.999, eps=1e-8, schedule="cosine",
        warmup=1000, label_smoothing=0.1, clip=1.0, eval_every=500,
    )  # fmt: skip
    presets = {
        # CRATE's pre-training recipe, in steps of this task's batch
        "lion": dict(optimizer="lion", learning_rate=2.4e-4, weight_decay=0.5, beta1=0.9, beta2=0.99),
    }

    def data(self, config: TrainConfig, train: Columns, val: Columns, test: Columns, classes: int) -> TaskData:
        size = config.image_size or self.size
        if size % config.patch:
            raise ValueError(f"image_size {size} does not divide into patches of {config.patch}: change --patch")
        channel = train["image"][:10_000].float().div(255)
        facts = {
            "classes": classes,
            "size": size,
            "mean": channel.mean((0, 2, 3)).tolist(),
            "std": channel.std((0, 2, 3)).clamp(min=1e-3).tolist(),
        }
        return TaskData(train, val, test, length=(size // config.patch) ** 2, facts=facts)

    def batch(self, rows: Columns, config: TrainConfig, generator: torch.Generator, training: bool) -> Columns:
        image = rows["image"]
        if config.image_size and image.shape[-1] != config.image_size:
            size = (config.image_size, config.image_size)
            image = F.interpolate(image.float(), size=size, mode="bilinear", antialias=True).round().to(torch.uint8)
        if training and config.augment:
            image = crop_and_flip(image, generator)
        return {**rows, "image": image}

    def inputs(self, batch: Columns) -> tuple[Tensor, ...]:
        return (batch["image"],)

    def model(self, config: TrainConfig, data: TaskData) -> nn.Module:
        from ..models.crate import CRATE
        from ..models.image import ImageClassifier, Normalised

        if config.model == "crate":
            crate = CRATE(
                classes=data.facts["classes"],
                image_size=data.facts["size"],
                patch=config.patch,
                pooling=config.pooling or "cls",
                **crate_options(config),
            )
            return Normalised(crate, data.facts["mean"], data.facts["std"])
        return ImageClassifier(
            data.facts["size"],
            data.facts["classes"],
            patch=config.patch,
            mean=data.facts["mean"],
            std=data.facts["std"],
            pooling=config.pooling or "mean",  # type: ignore[arg-type]  # the model checks it
            positions=config.positions or "learned",  # type: ignore[arg-type]
            **block_options(config),
        )


def crop_and_flip(image: Tensor, generator: torch.Generator) -> Tensor:
    """Pad by an eighth, cut out the old size anywhere, mirror every second one; all images at once, by indexing."""
    B, _, side, _ = image.shape
    pad, device = side // 8, image.device
    shift = torch.randint(0, 2 * pad + 1, (2, B), generator=generator, device=device)
    flip = torch.rand(B, generator=generator, device=device) < 0.5
    along = torch.arange(side, device=device)
    y = shift[0][:, None] + along
    x = shift[1][:, None] + torch.where(flip[:, None], side - 1 - along, along)
    padded = F.pad(image, (pad, pad, pad, pad))
    rows = torch.arange(B, device=device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[rows, y[:, :, None], x[:, None, :]].permute(0, 3, 1, 2)


class ImageFolder(ImageClassification):
    name = "imagefolder"
    about = "any pictures: train/CLASS/*.jpg and val/CLASS/*.jpg"
    size = 64

    def load(self, config: TrainConfig) -> TaskData:
        folder = Path(config.data)
        if not (folder / "train").is_dir():
            folder = find(config.data, ("imagefolder",), "give a folder with train/CLASS/… and val/CLASS/… by --data")
        classes = sorted(p.name for p in (folder / "train").glob("*") if p.is_dir())
        if len(classes) < 2:
            raise DamagedData(folder, "train/ needs a sub-folder for each of at least two classes")
        size = config.image_size or self.size
        train, val = (read_folder(folder / part, classes, size) for part in ("train", "val"))
        if (folder / "test").is_dir():
            return self.data(config, train, val, read_folder(folder / "test", classes, size), len(classes))
        stay, held_out = split_off(len(train["label"]), max(1, len(train["label"]) // 20))
        kept, val_part = ({k: c[torch.from_numpy(i)] for k, c in train.items()} for i in (stay, held_out))
        return self.data(config, kept, val_part, val, len(classes))


def read_folder(folder: Path, classes: list[str], size: int) -> Columns:
    """All pictures of a folder, the shorter side brought to `size` and the middle cut out."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    files = [(p, i) for i, name in enumerate(classes) for p in sorted((folder / name).rglob("*"))]
    files = [(p, i) for p, i in files if p.suffix.lower() in PICTURES]
    if not files:
        raise DamagedData(folder, "there are no pictures in it")

    def picture(entry: tuple[Path, int]) -> np.ndarray:
        try:
            with Image.open(entry[0]) as image:
                return np.asarray(ImageOps.fit(image.convert("RGB"), (size, size), Image.Resampling.BICUBIC))
        except (OSError, UnidentifiedImageError) as error:
            raise DamagedData(entry[0], f"it is not a picture that can be read ({error})") from error

    with ThreadPoolExecutor() as pool:
        images = np.stack(list(pool.map(picture, files)))
    labels = torch.tensor([i for _, i in files], dtype=torch.int16)
    return {"image": torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2))), "label": labels}


add_task(ImageFolder())
