"""CIFAR-10 and CIFAR-100 image classification, and CIFAR-10 as the Long Range Arena's sequence of grey pixels.

Krizhevsky, Learning Multiple Layers of Features from Tiny Images (2009). Reads the original binary version
(cifar-10-batches-bin, cifar-100-binary), or cifar10.parquet / cifar100.parquet with columns image (encoded), label and
split, or sheets of 10,000 images (cifar10/train_0.webp …). The last 5,000 training images are validation data.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from .base import TaskData, TextClassification
from .config import TrainConfig
from .files import DamagedData, as_labels, find, read_parquet
from .images import ImageClassification, pictures_in
from .registry import add_task

HELD_OUT = 5000
Pictures = tuple[np.ndarray, np.ndarray]  # (n, 3, 32, 32) bytes, (n,) labels


def read(data: str, classes: int) -> tuple[Pictures, Pictures]:
    """Training and test images."""
    folder = "cifar-10-batches-bin" if classes == 10 else "cifar-100-binary"
    names = (folder, f"cifar{classes}.parquet", f"cifar{classes}")
    how = f"download it with: weft data get cifar{classes}, or unpack the binary version (cs.toronto.edu/~kriz)"
    path = find(data, names, how)
    if path.suffix == ".parquet":
        return _read_parquet(path, "train", classes), _read_parquet(path, "test", classes)
    if (path / "test.webp").exists():
        return _read_sheets(path, "train_*"), _read_sheets(path, "test")
    if classes == 10:
        batches = [_read_binary(path / f"data_batch_{i}.bin", 1) for i in range(1, 6)]
        train = np.concatenate([b[0] for b in batches]), np.concatenate([b[1] for b in batches])
        return train, _read_binary(path / "test_batch.bin", 1)
    return _read_binary(path / "train.bin", 2), _read_binary(path / "test.bin", 2)


def read_parts(data: str, classes: int) -> list[Pictures]:
    """Training, validation and test images."""
    (images, labels), test = read(data, classes)
    cut = len(labels) - HELD_OUT if len(labels) > HELD_OUT else len(labels) * 9 // 10
    return [(images[:cut], labels[:cut]), (images[cut:], labels[cut:]), test]


def _read_binary(path: Path, labels: int) -> Pictures:
    """Records of `labels` label bytes (the last is the fine one) and 3 x 32 x 32 bytes."""
    record = labels + 3072
    try:
        content = np.frombuffer(path.read_bytes(), np.uint8)
    except OSError as error:
        raise DamagedData(path.parent, f"{path.name} cannot be read ({error})") from error
    if not len(content) or len(content) % record:
        raise DamagedData(path, f"its size is not a multiple of {record} bytes")
    rows = content.reshape(-1, record)
    return rows[:, labels:].reshape(-1, 3, 32, 32), rows[:, labels - 1]


def _read_parquet(path: Path, split: str, classes: int) -> Pictures:
    table = read_parquet([path], ["image", "label", "split"])
    chosen = [i for i, s in enumerate(table["split"]) if s == split]
    if not chosen:
        raise DamagedData(path, f"it has no rows of split {split}")
    images = pictures_in(path, table["image"], chosen, 32)
    return images, as_labels((table["label"][i] for i in chosen), classes, path)


def _read_sheets(folder: Path, name: str) -> Pictures:
    """Lossless sheets of row-major images, and their labels: train_0.webp … train_4.webp, train_labels.npy."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None

    def sheet(path: Path) -> np.ndarray:
        pixels = np.asarray(Image.open(path).convert("RGB"))
        rows, columns = pixels.shape[0] // 32, pixels.shape[1] // 32
        return pixels.reshape(rows, 32, columns, 32, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32)

    images = np.concatenate([sheet(path) for path in sorted(folder.glob(f"{name}.webp"))])
    labels = np.load(folder / f"{name.partition('_')[0]}_labels.npy", allow_pickle=False)
    if len(images) != len(labels):
        raise DamagedData(folder, f"there are {len(images)} images but {len(labels)} labels")
    return images, labels


def grey(images: np.ndarray) -> np.ndarray:
    """0.2989 R + 0.587 G + 0.114 B, as bytes (n, 1024), rounded like TensorFlow in the Long Range Arena."""
    value = np.einsum("c,nchw->nhw", np.array([0.2989, 0.587, 0.114], np.float32), images.astype(np.float32))
    return np.floor(value * (255.5 / 255)).clip(0, 255).astype(np.uint8).reshape(len(images), -1)


CIFAR10_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


class CIFAR10Pixels(TextClassification):
    name = "cifar10-pixels"
    about = "CIFAR-10 as a sequence of 1,024 grey pixels (Long Range Arena)"
    class_names = CIFAR10_NAMES
    padded = False
    reads = frozenset({"max_length", "pooling", "norm", "qk_norm"})
    defaults = dict(
        layers=3, heads=4, dim=64, head_dim=16, mlp_dim=128, dropout=0.2, steps=35_000, batch_size=256, warmup=175,
        learning_rate=0.008, schedule="cosine", optimizer="adam", beta2=0.98, eps=1e-9, eval_every=500,
    )  # fmt: skip

    def load(self, config: TrainConfig) -> TaskData:
        if config.max_length not in (0, 1024):
            raise ValueError(f"max_length must be 1,024, the number of pixels, got {config.max_length}: remove it")
        train, val, test = (
            {"ids": torch.from_numpy(grey(x).astype(np.int16) + 1), "label": torch.from_numpy(y.copy())}
            for x, y in read_parts(config.data, 10)
        )
        return TaskData(train, val, test, length=1024, facts={"vocab": 257, "classes": 10})


class CIFAR(ImageClassification):
    classes: int
    size = 32

    def load(self, config: TrainConfig) -> TaskData:
        train, val, test = (
            {"image": torch.from_numpy(np.ascontiguousarray(x)), "label": torch.from_numpy(y.copy())}
            for x, y in read_parts(config.data, self.classes)
        )
        return self.data(config, train, val, test, self.classes)


class CIFAR10(CIFAR):
    name, about, classes = "cifar10", "CIFAR-10 images, 10 classes", 10
    class_names = CIFAR10_NAMES


class CIFAR100(CIFAR):
    name, about, classes = "cifar100", "CIFAR-100 images, 100 classes", 100


add_task(CIFAR10Pixels())
add_task(CIFAR10())
add_task(CIFAR100())
