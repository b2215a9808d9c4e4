"""Image classification with patches as tokens, for any folder of images with one sub-folder per class.

Models: transformer and crate, with sizes from the config; crate-SIZE and pvt-SIZE, as in the papers; timm:NAME;
hf:NAME.

`images` reads CLASS/image, and holds out a tenth of the images for validation and another for testing; or the parts
train/CLASS/image, val/CLASS/image and test/CLASS/image, and holds out what is missing. `imagefolder` reads train/ and
val/, the layout of torchvision's ImageFolder, and test/ if it exists; without it, val is the test part and a fixed
twentieth of train is validation data. Training images are padded by an eighth, randomly cropped and flipped, or go
through timm's transforms (`--augmentation`). Images are decoded once, to bytes in memory.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers import CachedAttention
from .augment import augmenting, mixed
from .base import (
    SIZES,
    BuiltFromData,
    Classification,
    Columns,
    DataMissing,
    Known,
    TaskData,
    block_options,
    crate_options,
)
from .config import TrainConfig
from .files import DamagedData, decoded, files_of, find, split_off
from .hosts import check_hosted, host_facts, hosted_model, swap_in
from .registry import add_task
from .tables import by_split

MODELS = r"transformer|crate(-tiny|-small|-base|-large)?|pvt-(tiny|small|medium|large)|timm:[\w.]+"
AUGMENTATIONS = r"color|rand(-\w[\w.]*)+|augmix(-\w[\w.]*)*|(original|v0)r?(-mstd[\d.]+)?|3a"
PICTURES = (".png", ".jpg", ".jpeg", ".jfif", ".bmp", ".webp", ".ppm", ".gif", ".tif", ".tiff")
# images that are not read
OTHERS = (".avif", ".dcm", ".heic", ".heif", ".jp2", ".jxl", ".npy", ".npz", ".pgm", ".psd", ".svg", ".tga")


class ImageClassification(Classification):
    size: int
    hosts = "ImageClassification"
    reads = frozenset({"pooling", "image_size", "patch", "augment", "augmentation", "mixup", "cutmix", "drop_path"})
    defaults = dict(
        layers=6, heads=8, dim=256, head_dim=32, mlp_dim=512, dropout=0.0, steps=20_000, batch_size=128,
        optimizer="adamw", learning_rate=1e-3, weight_decay=0.05, beta2=0.999, eps=1e-8, schedule="cosine",
        warmup=1000, label_smoothing=0.1, clip=1.0, eval_every=500,
    )  # fmt: skip
    presets = {
        # CRATE's pre-training recipe, in steps of this task's batch
        "lion": dict(optimizer="lion", learning_rate=2.4e-4, weight_decay=0.5, beta1=0.9, beta2=0.99),
        # CRATE's transfer to CIFAR, Flowers and Pets, with --init-from; RandAugment's 14 of 30 is 5 of timm's 10
        "finetune": dict(
            image_size=224, batch_size=512, steps=4400, warmup=0, learning_rate=5e-5, weight_decay=0.01,
            augmentation="rand-m5-n2-p1",
        ),
        # DeiT's recipe (https://arxiv.org/abs/2012.12877), which PVT and Swin follow
        "deit": dict(
            batch_size=1024, learning_rate=1e-3, weight_decay=0.05, augmentation="rand-m9-mstd0.5-inc1", mixup=0.8,
            cutmix=1.0, drop_path=0.1,
        ),
    }  # fmt: skip

    def data(
        self,
        config: TrainConfig,
        train: Columns,
        val: Columns,
        test: Columns,
        classes: int,
        names: list[str] | None = None,
        known: Known | None = None,
    ) -> TaskData:
        size = config.image_size or self.size
        if size % config.patch:
            raise ValueError(f"image_size={size} must be divisible by patch={config.patch}: change --patch")
        facts: dict[str, Any] = {"classes": classes, "size": size}
        if known is None:
            every = -(-len(train["image"]) // 10_000)  # spread over all rows, which may be sorted by class
            channel = train["image"][::every].float().div(255)
            facts["mean"] = channel.mean((0, 2, 3)).tolist()
            facts["std"] = channel.std((0, 2, 3)).clamp(min=1e-3).tolist()
        else:
            facts |= {name: known.facts[name] for name in ("mean", "std")}
        facts |= host_facts(config, known, classes=names or classes, size=size)
        return TaskData(train, val, test, length=(size // config.patch) ** 2, facts=facts, classes=names)

    def on_host(self, config: TrainConfig) -> bool:
        return bool(config.augmentation)

    def ahead(self, rows: Columns, config: TrainConfig, generator: torch.Generator) -> Callable[[], Columns]:
        images = augmenting(resized(rows["image"], config.image_size), config.augmentation, generator)
        return lambda: {**rows, "image": images()}

    def batch(self, rows: Columns, config: TrainConfig, generator: torch.Generator, training: bool) -> Columns:
        image = resized(rows["image"], config.image_size)
        if training and config.augment and not config.augmentation:
            image = crop_and_flip(image, generator)
        batch = {**rows, "image": image}
        if training and (config.mixup or config.cutmix):
            batch = mixed(batch, config.mixup, config.cutmix, generator)
        return batch

    def loss(self, model: nn.Module, batch: Columns, config: TrainConfig) -> Tensor:
        if "share" not in batch:
            return super().loss(model, batch, config)
        logits, smoothing = model(*self.inputs(batch)).float(), config.label_smoothing
        own, other = (
            F.cross_entropy(logits, batch[name].long(), label_smoothing=smoothing, reduction="none")
            for name in ("label", "other")
        )
        return (batch["share"] * own + (1 - batch["share"]) * other).mean()

    def inputs(self, batch: Columns) -> tuple[Tensor, ...]:
        return (batch["image"],)

    def encode(self, examples: Sequence[Any], known: Known) -> Columns:
        """The files of images, as `imagefolder` reads them."""
        if missing := next((path for path in examples if not os.path.isfile(path)), None):
            raise DataMissing(f"{self.name} reads files of images, and {str(missing)!r:.60} is no file")
        return {"image": read_pictures([Path(p) for p in examples], known.facts["size"])}

    def check(self, config: TrainConfig) -> None:
        if config.hosted:
            check_hosted(config)
        elif not re.fullmatch(MODELS, config.model):
            raise ValueError(
                f"{self.name} supports --model transformer, crate, crate-tiny (-small, -base, -large), pvt-tiny ("
                f"-small, -medium, -large), timm:NAME or hf:NAME; got {config.model!r}"
            )
        if (config.mixup or config.cutmix) and config.batch_size % 2:
            raise ValueError(f"mixup needs an even batch_size, got {config.batch_size}")
        if config.pooling == "first":
            raise ValueError("pooling must be mean or cls for images, got 'first'")
        if config.positions not in ("", "learned", "sinusoid"):
            raise ValueError(f"positions must be learned or sinusoid for images, got {config.positions!r}")
        if config.drop_path and config.model.startswith("crate"):
            raise ValueError("CRATE's layers have no branch to drop: remove --drop-path")
        if not config.augment and config.augmentation:
            raise ValueError("augmentation and no-augment are mutually exclusive: remove one of them")
        if config.augmentation and not re.fullmatch(AUGMENTATIONS, config.augmentation):
            raise ValueError(
                "augmentation must be color or a name of timm's, such as rand-m9-mstd0.5-inc1, augmix-m5-w4-d2 or v0; "
                f"got {config.augmentation!r}"
            )

    def unread(self, config: TrainConfig) -> tuple[str, ...]:
        if config.model in ("transformer", "crate") or config.hosted:
            return super().unread(config)
        return SIZES if config.model.startswith("timm:") else (*SIZES, "patch")

    def model(self, config: TrainConfig, data: TaskData) -> nn.Module:
        from ..models.image import ImageClassifier, Normalised

        size, classes = data.facts["size"], data.facts["classes"]
        if "hf" in data.facts:
            inner = hosted_model(config, data.facts, self.hosts, size**2 // 16 + 8)
            return Normalised(inner, data.facts["mean"], data.facts["std"])
        if config.model != "transformer":
            return Normalised(self.host(config, size, classes), data.facts["mean"], data.facts["std"])
        model = ImageClassifier(
            size,
            classes,
            patch=config.patch,
            mean=data.facts["mean"],
            std=data.facts["std"],
            pooling=config.pooling or "mean",  # type: ignore[arg-type]  # the model checks it
            positions=config.positions or "learned",  # type: ignore[arg-type]
            **block_options(config),
        )
        if config.drop_path:
            from timm.layers import DropPath, calculate_drop_path_rates

            rates = calculate_drop_path_rates(config.drop_path, len(model.blocks))
            for block, rate in zip(model.blocks, rates, strict=True):
                block.dropout = nn.Sequential(block.dropout, DropPath(rate))  # type: ignore[arg-type]
        return model

    def host(self, config: TrainConfig, size: int, classes: int) -> nn.Module:
        """The model by its name, with normalisation of the images."""
        from ..models.crate import CRATE, crate
        from ..models.pvt import pvt

        kind, _, name = config.model.replace(":", "-", 1).partition("-")
        options: dict[str, Any] = config.options("model_options")
        if kind == "timm":
            if config.drop_path:
                options = {"drop_path_rate": config.drop_path, **options}
            model = timm_model(name, size, num_classes=classes, **options)
            swap_in(model, config, size**2 // 16 + 8)  # at most patches of 4 pixels, and class tokens
            return model
        options |= {"image_size": size, "classes": classes}
        if kind == "pvt":
            cache = config.options("cache_options") if config.cache else None
            options["drop_path"] = config.drop_path
            model = pvt(name, cached=bool(config.cache), ratio=config.cache or 0.5, cache=cache, **options)
            swap_in(model, config, size**2 // 16 + 8)
            return model
        if name:
            return crate(name, **{"attention": config.mechanisms(), **config.options(), **options})
        return CRATE(**{"patch": config.patch, "pooling": config.pooling or "cls", **crate_options(config), **options})

    def begin(self, model: nn.Module, weights: Columns) -> bool:
        """From a run with other classes: load everything except the head, with empty caches."""
        own = model.state_dict()
        if set(weights) != set(own):
            return False
        head = [name for name in own if "head." in name and weights[name].shape != own[name].shape]
        if not head:
            return False
        try:
            model.load_state_dict({**weights, **{name: own[name] for name in head}})
        except RuntimeError as error:
            first = str(error).split("\n\t")[1]
            what = "init_from: the run's model has other sizes: use its --image-size, --patch and --model-options"
            raise ValueError(f"{what} ({first})") from None
        for layer in model.modules():
            if isinstance(layer, CachedAttention):
                layer.reset()
        return True

    def score(self, model: nn.Module, batch: Columns) -> dict[str, Tensor]:
        logits, label = model(*self.inputs(batch)).float(), batch["label"].long()
        ranked = logits.topk(min(5, logits.shape[-1])).indices == label[:, None]
        loss = F.cross_entropy(logits, label, reduction="none")
        return {"loss": loss, "correct": ranked[:, 0], "among5": ranked.any(1), "count": torch.ones_like(label)}

    def summary(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {**super().summary(sums), "top5": sums["among5"] / sums["count"]}


def timm_model(name: str, size: int, **options: Any) -> nn.Module:
    """timm's model, from scratch."""
    try:
        import timm
    except ImportError as error:
        raise ImportError("timm:NAME needs timm: pip install 'weft[timm]'") from error
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=2)
        raise ValueError(f"timm has no model {name!r}{'; did you mean ' + ' or '.join(near) + '?' if near else ''}")
    return timm.create_model(name, pretrained=False, **timm_options(name, size, options))


def timm_options(name: str, size: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with the size of the images, for the models that are built for one."""
    given = options.get("img_size", size)
    if given not in (size, [size, size]):
        raise ValueError(f"img_size is {given}, but the task's images have {size} x {size} pixels: leave img_size out")
    return {**({"img_size": size} if _takes_size(name) else {}), **options}


@functools.cache
def _takes_size(name: str) -> bool:
    if name.startswith(("vit", "swin")):
        return True
    import timm

    with torch.device("meta"):
        try:
            timm.create_model(name, img_size=224)
        except TypeError:
            return False
    return True


def resized(image: Tensor, size: int) -> Tensor:
    if not size or image.shape[-1] == size:
        return image
    return F.interpolate(image.float(), size=(size, size), mode="bilinear", antialias=True).round().to(torch.uint8)


def crop_and_flip(image: Tensor, generator: torch.Generator) -> Tensor:
    """Pad by an eighth, crop randomly, and flip with probability ½; vectorised over the batch."""
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


class ImageFolder(BuiltFromData, ImageClassification):
    name = "imagefolder"
    about = "any images: train/CLASS/*.jpg and val/CLASS/*.jpg"
    size = 64

    def read(self, config: TrainConfig, known: Known | None) -> TaskData:
        folder = Path(config.data)
        if not (folder / "train").is_dir():
            folder = find(config.data, ("imagefolder",), "pass a folder with train/CLASS/… and val/CLASS/… with --data")
        if not (folder / "train").is_dir():
            raise DamagedData(folder, "it is not a folder with train/ and val/")
        classes = (known and known.classes) or class_folders(folder / "train")
        if len(classes) < 2:
            raise DamagedData(folder, "train/ needs a sub-folder for each of at least two classes")
        size = config.image_size or self.size
        train, val = (read_folder(folder / part, classes, size) for part in ("train", "val"))
        if (folder / "test").is_dir():
            test = read_folder(folder / "test", classes, size)
            return self.data(config, train, val, test, len(classes), classes, known)
        stay, held_out = split_off(len(train["label"]), max(1, len(train["label"]) // 20))
        kept, val_part = ({k: c[torch.from_numpy(i)] for k, c in train.items()} for i in (stay, held_out))
        return self.data(config, kept, val_part, val, len(classes), classes, known)


def class_folders(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.glob("*") if p.is_dir() and not p.name.startswith("."))


def refuse_strange(folder: Path, names: list[str], classes: list[str]) -> None:
    strange = [name for name in names if name not in classes]
    if strange:
        what = f"it has classes that are not in train/: {', '.join(strange[:5])}"
        raise DamagedData(folder, what, "Add them to train/, or remove them.")


def read_folder(folder: Path, classes: list[str], size: int) -> Columns:
    """All images of a folder, resized (shorter side) and centre-cropped to `size`."""
    refuse_strange(folder, class_folders(folder), classes)
    files = [(p, i) for i, name in enumerate(classes) for p in pictures_of(folder / name)]
    if not files:
        raise DamagedData(folder, "it has no images")

    labels = torch.tensor([i for _, i in files], dtype=torch.int16)
    return {"image": read_pictures([p for p, _ in files], size), "label": labels}


def pictures_of(folder: Path) -> list[Path]:
    """The images of a folder. Those of other kinds are refused rather than left out."""
    files = files_of(folder)
    if strange := next((p for p in files if p.suffix.lower() in OTHERS), None):
        raise DamagedData(strange, "images of this kind are not read", f"Convert it to one of {' '.join(PICTURES)}.")
    return [p for p in files if p.suffix.lower() in PICTURES]


def read_pictures(files: Sequence[Path], size: int) -> Tensor:
    """(n, 3, size, size), bytes."""
    from PIL import Image, ImageOps

    def picture(path: Path) -> np.ndarray:
        return np.asarray(ImageOps.fit(decoded(path, path, "RGB", flat=True), (size, size), Image.Resampling.BICUBIC))

    with ThreadPoolExecutor() as pool:
        images = np.stack(list(pool.map(picture, files)))
    return torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))


def pictures_in(path: Path, cells: Sequence[Any], rows: Sequence[int], side: int) -> np.ndarray:
    """(n, 3, side, side): the encoded images in these rows of a Parquet file's column."""

    def picture(row: int) -> np.ndarray:
        content = cells[row]["bytes"] if isinstance(cells[row], dict) else cells[row]
        if not isinstance(content, bytes):
            raise DamagedData(path, f"the image of row {row} is {content!r}, not an encoded image")
        image = np.asarray(decoded(io.BytesIO(content), path, "RGB", f"row {row}"))
        if image.shape != (side, side, 3):
            what = f"the image of row {row} has {image.shape[1]} x {image.shape[0]} pixels, not {side} x {side}"
            raise DamagedData(path, what)
        return image.transpose(2, 0, 1)

    with ThreadPoolExecutor() as pool:
        return np.stack(list(pool.map(picture, rows)))


class Images(ImageFolder):
    name = "images"
    about = "classes of your own images: --data FOLDER with a sub-folder per class, or train/, val/ and test/ with them"
    defaults = {**ImageClassification.defaults, "layers": 4, "steps": 2000, "batch_size": 64, "warmup": 200,
                "eval_every": 200}  # fmt: skip
    presets = {}

    def read(self, config: TrainConfig, known: Known | None) -> TaskData:
        folder, size = Path(config.data), config.image_size or self.size
        if not folder.is_dir():
            raise DataMissing(f"{folder} is not a folder: pass one with a sub-folder of images per class with --data")
        inside = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
        places = by_split((p.name, p) for p in inside)
        trains = list(places) == ["train"] and not class_folders(places["train"])  # a class, not a part
        divided, whole = "train" in places and not trains, known is not None and known.whole
        classes = (known and known.classes) or class_folders(places["train"] if divided else folder)
        if whole:
            divided = bool(places) and not {p.name for p in inside} <= set(classes)
            parts = places if divided else {"test": folder}
            found = {part: read_folder(place, classes, size) for part, place in parts.items()}
            none = {name: column[:0] for name, column in next(iter(found.values())).items()}
            train, val, test = (found.get(part, none) for part in ("train", "val", "test"))
            data = self.data(config, train, val, test, len(classes), classes, known)
            return dataclasses.replace(data, whole=not divided)
        parts = places if divided else {"train": folder}
        if len(classes) < 2:
            what = f"it has {len(classes)} sub-folder{'' if len(classes) == 1 else 's'}"
            raise DamagedData(parts["train"], what, "Put the images into one sub-folder per class, at least two.")
        found = {part: read_folder(place, classes, size) for part, place in parts.items()}
        empty = [name for i, name in enumerate(classes) if not (found["train"]["label"] == i).any()]
        if empty:
            raise DamagedData(parts["train"] / empty[0], "it has no images", f"Supported: {' '.join(PICTURES)}.")
        for number, part in enumerate(("test", "val"), 1):
            if part in found:
                continue
            count = len(found["train"]["label"])
            if count < 10:
                raise DataMissing(f"{count} images are too few to hold out a tenth for {part}: add images to {folder}")
            stay, out = (torch.from_numpy(np.sort(i)) for i in split_off(count, max(1, count // 10), seed=number))
            found[part] = {name: column[out] for name, column in found["train"].items()}
            found["train"] = {name: column[stay] for name, column in found["train"].items()}
        return self.data(config, found["train"], found["val"], found["test"], len(classes), classes, known)

    def next_command(self, run: str) -> str:
        return f"weft predict {run} FOLDER"


add_task(ImageFolder())
add_task(Images())
