"""CIFAR-10 on the device, and a training loop that fits a number of minutes."""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.tasks.cifar import read
from weft.tasks.images import crop_and_flip

CLASSES = ["aeroplane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "lorry"]
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
CHUNKS = 32  # parts of a batch that get their own draw of RandAugment
CALIBRATION = 20  # steps timed to find out how many fit into the minutes


class Data:
    """All images as bytes on the device."""

    def __init__(self, data: Path | None, sheets: Path | None, device: torch.device):
        if (data is None) == (sheets is None):
            raise SystemExit("give --data (the folder that holds cifar-10-batches-bin) or --sheets, one of the two")
        train, test = read(str(data), 10) if data is not None else read_sheets(sheets)
        self.images, self.labels = (torch.from_numpy(np.ascontiguousarray(a)).to(device) for a in train)
        self.test_images, self.test_labels = (torch.from_numpy(np.ascontiguousarray(a)).to(device) for a in test)

    def batch(self, size: int, generator: torch.Generator, *, randaugment: bool = False) -> tuple[Tensor, Tensor]:
        """Random crops and mirrorings of random training images, and RandAugment (n = 2, m = 14) where asked for."""
        i = torch.randint(len(self.images), (size,), generator=generator, device=self.images.device)
        images = crop_and_flip(self.images[i], generator)
        if randaugment:
            from torchvision.transforms.v2 import RandAugment

            draw = RandAugment(num_ops=2, magnitude=14)
            images = torch.cat([draw(part) for part in images.chunk(CHUNKS)])  # one draw for each part, on the device
        return normalised(images), self.labels[i].long()


def read_sheets(folder: Path | None) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Sheets of 10,000 images, 20 to a row: train_0.webp … train_4.webp, test.webp, and *_labels.npy."""
    from PIL import Image

    assert folder is not None
    Image.MAX_IMAGE_PIXELS = None

    def sheet(name: str) -> np.ndarray:
        pixels = np.asarray(Image.open(folder / f"{name}.webp").convert("RGB"))
        rows, columns = pixels.shape[0] // 32, pixels.shape[1] // 32
        return pixels.reshape(rows, 32, columns, 32, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32)

    names = sorted(p.stem for p in folder.glob("train_*.webp"))
    labels = {split: np.load(folder / f"{split}_labels.npy", allow_pickle=False) for split in ("train", "test")}
    return (np.concatenate([sheet(n) for n in names]), labels["train"]), (sheet("test"), labels["test"])


def normalised(images: Tensor) -> Tensor:
    mean, deviation = (torch.tensor(v, device=images.device).view(3, 1, 1) for v in (MEAN, DEVIATION))
    return (images.float() / 255 - mean) / deviation


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of_batch: Callable[[nn.Module, torch.Generator], Tensor],
    *,
    minutes: float,
    steps: int | None,
    warmup: float,
    seed: int,
    compile: bool,
    see: Callable[[int, int], None] = lambda step, steps: None,
) -> dict[str, Any]:
    """Train for `steps`, or for as many as fit into the minutes; cosine decay after a linear warm-up.

    The clock stands still while the model compiles and while `see` (called at the start, after an eighth and at the
    end) looks at the model. With `steps` given, the same seed gives the same run.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    peaks = [group["lr"] for group in optimizer.param_groups]
    fast = torch.compile(model) if compile else model
    see(0, 0)

    def step(rate: float) -> Tensor:
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = rate * peak
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of_batch(fast, generator)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    for _ in range(3):  # compiles everything; a rate of zero leaves the weights as they are
        step(0.0)
    if steps is None:
        synchronise(device)
        start = time.perf_counter()
        for _ in range(CALIBRATION):
            step(0.0)
        synchronise(device)
        steps = max(1, int(minutes * 60 / ((time.perf_counter() - start) / CALIBRATION)))
    optimizer.state.clear()
    generator.manual_seed(seed)
    torch.manual_seed(seed)
    losses, seconds, start = [], 0.0, time.perf_counter()
    for i in range(steps):
        rate = min((i + 1) / max(1, warmup * steps), 0.5 * (1 + math.cos(math.pi * i / steps)))
        losses.append(step(rate))
        if i + 1 in (steps // 8, steps):
            synchronise(device)
            seconds += time.perf_counter() - start
            see(i + 1, steps)
            start = time.perf_counter()
    every = max(1, steps // 100)
    curve = torch.stack(losses).float().cpu()
    means = [curve[i : i + every].mean().item() for i in range(0, steps, every)]
    return {"steps": steps, "seconds": round(seconds, 2), "loss_every": every, "loss": [round(v, 4) for v in means]}


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor, batch: int = 1000) -> float:
    """On whole images, in the precision of training."""
    model.eval()
    correct = 0
    for i in range(0, len(images), batch):
        with torch.autocast(images.device.type, torch.bfloat16):
            guess = model(normalised(images[i : i + batch])).argmax(-1)
        correct += int((guess == labels[i : i + batch]).sum())
    model.train()
    return correct / len(images)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels, label_smoothing=0.1)


def machine(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "torch": torch.__version__}


def write(path: Path, found: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
