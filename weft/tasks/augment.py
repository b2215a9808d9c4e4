"""timm's image augmentation: `create_transform` (random crops, flips, colour jitter, RandAugment), mixup and CutMix.

timm's transforms take single images on the CPU and global random numbers. Every image gets its own seed from the step's
generator, so the result does not depend on the number of worker processes, which are used for large batches. The lab
starts them one step ahead, while the device trains.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .base import Columns

IN_PROCESS = 64  # images; starting workers takes seconds
SEEDS = 2**31
ENDED = (
    "worker processes of --augmentation ended twice, perhaps because memory is short: use fewer CPUs (taskset), or "
    "--resume later. A script that trains must do so under if __name__ == '__main__', because workers import it."
)


def augmenting(image: Tensor, recipe: str, generator: torch.Generator) -> Callable[[], Tensor]:
    """Start timm's training transform of images (B, 3, side, side), bytes on the CPU; the returned function gives them.

    recipe: "color" for colour jitter, or timm's name of an auto-augmentation, such as rand-m9-mstd0.5-inc1.
    """
    seeds = torch.randint(SEEDS, (len(image),), generator=generator).tolist()
    pixels = image.numpy()
    if len(pixels) < IN_PROCESS or (count := cpus() - 1) < 1:
        return lambda: torch.from_numpy(transformed(pixels, seeds, recipe))

    def start() -> list[Future[np.ndarray]]:
        parts = [slice(i, i + 16) for i in range(0, len(pixels), 16)]
        return [submit(count, pixels[part], seeds[part], recipe) for part in parts]

    def wait() -> Tensor:
        try:
            done = [job.result() for job in jobs]
        except BrokenProcessPool:  # for example, the system has killed a worker because memory was short
            try:
                done = [job.result() for job in start()]
            except BrokenProcessPool as error:
                raise RuntimeError(ENDED) from error
        return torch.from_numpy(np.concatenate(done))

    jobs = start()
    return wait


def transformed(images: np.ndarray, seeds: list[int], recipe: str) -> np.ndarray:
    from PIL import Image

    transform, found = timm_transform(recipe, images.shape[-1]), []
    with own_random_numbers() as seed:
        for image, number in zip(images, seeds, strict=True):
            seed(number)
            found.append(np.asarray(transform(Image.fromarray(image.transpose(1, 2, 0)))))
    return np.stack(found)


@functools.cache
def timm_transform(recipe: str, side: int) -> Callable[[Any], Any]:
    """From an image to bytes (3, side, side)."""
    try:
        from timm.data import create_transform
    except ImportError as error:
        raise ImportError("--augmentation needs timm: pip install 'weft[timm]'") from error
    named = None if recipe == "color" else recipe
    size = (3, side, side)
    return create_transform(size, is_training=True, auto_augment=named, interpolation="bicubic", normalize=False)


def mixed(batch: Columns, mixup: float, cutmix: float, generator: torch.Generator) -> Columns:
    """timm's mixup and CutMix of a batch: image i is share · image i + (1 − share) · image B − 1 − i, whose label is
    "other". Images become floats in [0, 1]."""
    from timm.data import Mixup

    label, B = batch["label"], len(batch["label"])
    mixer = Mixup(mixup, cutmix, label_smoothing=0.0, num_classes=B)
    with own_random_numbers() as seed:
        seed(generator.initial_seed() % SEEDS)  # a number drawn on a GPU would have to be waited for
        # The numbers of the images in place of their classes: timm's targets are then the shares.
        image, shares = mixer(batch["image"].float() / 255, torch.arange(B, device=label.device))
    return {**batch, "image": image, "other": label.flip(0), "share": shares.diagonal().float()}


@contextmanager
def own_random_numbers() -> Iterator[Callable[[int], None]]:
    """Gives a function that seeds the global generators on the CPU, and restores them at the end."""
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()

    def seed(number: int) -> None:
        random.seed(number)
        np.random.seed(number)
        torch.default_generator.manual_seed(number)

    try:
        yield seed
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.set_rng_state(kept[2])


def cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def submit(count: int, *work: Any) -> Future[np.ndarray]:
    try:
        return workers(count).submit(transformed, *work)
    except BrokenProcessPool:  # all its workers have ended; start others
        workers.cache_clear()
        return workers(count).submit(transformed, *work)


@functools.cache
def workers(count: int) -> ProcessPoolExecutor:
    # Not forked: this process has threads, and perhaps a GPU.
    return ProcessPoolExecutor(min(count, 16), get_context("spawn"), _begin, (os.getpid(),))


def _begin(parent: int) -> None:
    # Ctrl-C and `timeout` signal all processes of a group: the parent still needs its workers to save and stop.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)

    def end_with_the_parent() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=end_with_the_parent, daemon=True).start()
