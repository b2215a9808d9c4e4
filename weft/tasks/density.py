"""Density estimation of images, byte by byte: row by row, with the colours of a pixel in sequence.

    p(x) = Π_t p(x_t | start, x_1 … x_{t-1});   bits per dimension = -log2 p(x) / (3 · height · width)

An image is one example of 3,072 (CIFAR-10) or 12,288 bytes (ImageNet-64), predicted from a start token. ImageNet-64 is
read from the original files (image-net.org, "Imagenet64": train_data_batch_1.npz … 10, val_data.npz).
"""

from __future__ import annotations

import itertools
import math
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from . import cifar
from .base import Columns, Gallery, Task, TaskData
from .config import TrainConfig
from .files import DamagedData, find
from .registry import add_task
from .text import Bytes

SHOWN = 16  # samples on the page
START = 256  # the token before the first byte


class Density(Bytes):
    metric, vocab = "bits_per_dimension", 257
    encode = Task.encode  # an image is not a text
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

    def overlapping(self, rows: Columns, stride: int) -> Columns:
        raise ValueError("images are whole examples, not windows of a text: remove --stride")

    def next_command(self, run: str) -> str:
        return f"weft sample {run}"

    def galleries(self, model: nn.Module, data: TaskData, config: TrainConfig) -> list[Gallery]:
        device = next(model.parameters()).device
        samples = draw(model, self.side, SHOWN, 1.0, torch.Generator(device).manual_seed(config.seed))
        real = data.test["bytes"][:SHOWN].view(-1, self.side, self.side, 3)
        sheets = [(sheet(samples), "samples"), (sheet(real), "test images")]
        images = [(torch.from_numpy(np.array(image)), caption) for image, caption in sheets]
        return [Gallery("Samples", "Drawn byte by byte from the model, at temperature 1, next to real images.", images)]


@torch.no_grad()
def draw(model: Any, side: int, count: int, temperature: float, generator: torch.Generator | None = None) -> Tensor:
    """Sample images (count, side, side, 3) byte by byte, with the decoding form of the model's attention."""
    from ..models.generate import sample

    device = next(model.parameters()).device
    token = torch.full((count, 1), START, device=device)
    state, found = model.start(count, max_length=3 * side * side), []
    for _ in range(3 * side * side):
        logits, state = model.step(token, state)
        token = sample(logits[:, 0, :START], temperature, None, None, generator)[:, None]  # a start is not a byte
        found.append(token)
    return torch.cat(found, 1).view(count, side, side, 3).to(torch.uint8)


def sheet(images: Tensor) -> Any:
    """Images (n, side, side, 3) side by side in a square, with a border of one pixel, as a PIL image."""
    from PIL import Image

    n, side = images.shape[:2]
    across = math.ceil(n**0.5)
    down, step = math.ceil(n / across), side + 1
    canvas = np.full((down * step + 1, across * step + 1, 3), 255, np.uint8)
    for i, image in enumerate(images.cpu().numpy()):
        y, x = i // across * step + 1, i % across * step + 1
        canvas[y : y + side, x : x + side] = image
    return Image.fromarray(canvas)


def as_rows(pictures: np.ndarray) -> Tensor:
    """(n, 3, side, side) -> (n, bytes): row, column, colour."""
    return torch.from_numpy(np.ascontiguousarray(pictures.transpose(0, 2, 3, 1)).reshape(len(pictures), -1))


def _read(path: Path) -> np.ndarray:
    try:
        with np.load(path, allow_pickle=False) as batch:
            return batch["data"].reshape(-1, 3, 64, 64)
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DamagedData(path, f"its images cannot be read ({error})") from error


class AugmentedDensity(Density):
    """Training images are transformed at random, and the start token names the transformation.

    Jun et al. 2020, Distribution Augmentation for Generative Modeling: the model learns p(f(x) | f) for every
    transformation f, and is evaluated on f = identity. Here f is one of the 8 symmetries of the square (rotation,
    transposition) with one of the 6 orders of the colours; `--no-augment` trains on the identity alone.
    """

    vocab = START + 48
    reads = frozenset({"max_length", "augment", "norm", "qk_norm"})

    def batch(self, rows: Columns, config: TrainConfig, generator: torch.Generator, training: bool) -> Columns:
        content = rows["bytes"].long()
        kind = torch.zeros_like(content[:, :1])
        if training and config.augment:
            kind = torch.randint(48, kind.shape, generator=generator, device=kind.device)
            content = content.gather(1, self._orders().to(kind.device)[kind[:, 0]])
        return {"bytes": torch.cat([START + kind, content], 1)}

    def _orders(self) -> Tensor:
        """(48, bytes): where each byte of a transformed image comes from; the first is the identity."""
        at = torch.arange(3 * self.side**2).view(self.side, self.side, 3)
        squares = [turned for k in range(4) for turned in (at.rot90(k), at.rot90(k).transpose(0, 1))]
        colours = [list(order) for order in itertools.permutations(range(3))]
        return torch.stack([square[..., order].flatten() for square in squares for order in colours])


add_task(Density("cifar10-density", "bits per dimension of CIFAR-10 images", 32))
add_task(AugmentedDensity("cifar10-density-augmented", "cifar10-density with distribution augmentation", 32))
add_task(Density("imagenet64-density", "bits per dimension of ImageNet images at 64 x 64", 64))
