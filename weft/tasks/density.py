"""Density estimation of images, byte by byte: row by row, with the colours of a pixel in sequence.

    p(x) = Π_t p(x_t | start, x_1 … x_{t-1});   bits per dimension = -log2 p(x) / (3 · height · width)

An image is one example of 3,072 (CIFAR-10) or 12,288 bytes (ImageNet-64), predicted from a start token. ImageNet-64 is
read from the original files (image-net.org, "Imagenet64": train_data_batch_1.npz … 10, val_data.npz).
"""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from . import cifar
from .base import Columns, TaskData
from .config import TrainConfig
from .files import DamagedData, find
from .registry import add_task
from .text import Bytes

START = 256  # the token before the first byte


class Density(Bytes):
    metric, vocab = "bits_per_dimension", 257
    defaults = {**Bytes.defaults, "positions": "learned"}

    def __init__(self, name: str, about: str, side: int):
        self.name, self.about, self.side = name, about, side  # type: ignore[misc]

    def pictures(self, data: str) -> tuple[np.ndarray, np.ndarray]:
        """Training and test images, (n, 3, side, side)."""
        if self.side == 32:
            (train, _), (test, _) = cifar.read(data, 10)
            return train, test
        folder = find(data, ("imagenet64",), "put image-net.org's Imagenet64 .npz files there")
        return tuple(  # type: ignore[return-value]
            np.concatenate([_read(folder / name) for name in names])
            for names in ([f"train_data_batch_{i}.npz" for i in range(1, 11)], ["val_data.npz"])
        )

    def load(self, config: TrainConfig) -> TaskData:
        length = 3 * self.side**2
        if config.max_length not in (0, length):
            raise ValueError(f"max_length must be {length}, the bytes of an image, got {config.max_length}: remove it")
        train, test = ({"bytes": as_rows(pictures)} for pictures in self.pictures(config.data))
        cut = len(train["bytes"]) - max(1, min(5000, len(train["bytes"]) // 10))
        val = {"bytes": train["bytes"][cut:]}
        return TaskData({"bytes": train["bytes"][:cut]}, val, test, length=length, facts={"vocab": self.vocab})

    def batch(self, rows: Columns, config: TrainConfig, generator: torch.Generator, training: bool) -> Columns:
        content = rows["bytes"].long()
        return {"bytes": torch.cat([torch.full_like(content[:, :1], START), content], 1)}

    def summary(self, sums: Mapping[str, float]) -> dict[str, float]:
        loss = sums["loss"] / sums["count"]
        return {"loss": loss, "bits_per_dimension": loss / math.log(2)}


def as_rows(pictures: np.ndarray) -> Tensor:
    """(n, 3, side, side) -> (n, bytes): row, column, colour."""
    return torch.from_numpy(np.ascontiguousarray(pictures.transpose(0, 2, 3, 1)).reshape(len(pictures), -1))


def _read(path: Path) -> np.ndarray:
    try:
        with np.load(path, allow_pickle=False) as batch:
            return batch["data"].reshape(-1, 3, 64, 64)
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DamagedData(path, f"its images cannot be read ({error})") from error


add_task(Density("cifar10-density", "bits per dimension of CIFAR-10 images", 32))
add_task(Density("imagenet64-density", "bits per dimension of ImageNet images at 64 x 64", 64))
