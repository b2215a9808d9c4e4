"""Pathfinder: are two discs connected by a dashed curve? An image as a sequence of pixels, two classes.

Linsley et al., https://arxiv.org/abs/1805.08315; Tay et al., Long Range Arena, https://arxiv.org/abs/2011.04006

    two dashed curves and many short distractors, without crossings or contact
    yes   a disc at both ends of the first curve          no   a disc at the start of each curve

Curves have 6 (easy), 9 (medium) or 14 (hard) dashes and distractors a third of that. Sides, gaps, thickness and disc
sizes are those of the Long Range Arena for 32 x 32 and 128 x 128. Our own generator draws the images from this
description, so they are similar to the arena's, not equal. Half of them are yes. The arena's folders of PNG files are
supported too. 80 % train, 10 % validation, 10 % test.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .base import DataMissing, TaskData, TextClassification
from .config import TrainConfig
from .files import (
    DamagedData,
    decoded,
    find,
    new_folder,
    processes,
    read_array,
    read_manifest,
    read_text,
    write_manifest,
)
from .registry import add_task

DASHES = {"easy": 6, "medium": 9, "hard": 14}
OFFICIAL = {"easy": "curv_baseline", "medium": "curv_contour_length_9", "hard": "curv_contour_length_14"}
COUNT = 200_000
CHUNK = 512  # images started at once; those that reach a dead end are dropped
TRIES = 12  # directions or positions tried at once
FINE = 2  # cells of the occupancy map per pixel


@dataclass(frozen=True)
class Style:
    """Sizes in pixels."""

    size: int
    dash: float  # length of a dash
    gap: float  # between dashes
    thickness: float
    disc: float  # radius
    apart: float  # minimum distance between the starts of the two curves
    room: float  # margin around a dash that others must not enter
    bend: float  # standard deviation of the angle between two dashes, in radians
    distractor_dashes: int  # in all distractors together
    grey: float  # of the dashes; discs are white


STYLES = {
    32: Style(32, 2.0, 1.0, 0.5, 1.5, 7.0, 1.9, 0.45, 20, 0.75),
    128: Style(128, 5.0, 2.5, 1.5, 3.0, 20.0, 3.5, 0.35, 35, 0.9),
}


class Ground:
    """Occupied cells of each image."""

    def __init__(self, pictures: int, style: Style):
        self.side = style.size * FINE
        self.taken = np.zeros((pictures, self.side, self.side), bool)
        self.around_dash = _disc(style.room * FINE)
        self.around_disc = _disc((style.room + style.disc) * FINE)
        self.edge = style.thickness + 1.0

    def free(self, points: np.ndarray) -> np.ndarray:
        """points (B, tries, n, 2): whether all n are inside the image and free, (B, tries)."""
        inside = ((points >= self.edge) & (points <= self.side / FINE - 1 - self.edge)).all(-1)
        cell = (points * FINE).astype(np.int64).clip(0, self.side - 1)
        taken = self.taken[np.arange(len(points))[:, None, None], cell[..., 0], cell[..., 1]]
        return (inside & ~taken).all(-1)

    def take(self, points: np.ndarray, rows: np.ndarray, around: np.ndarray) -> None:
        """points (B, n, 2): occupy the cells around them in the images where `rows` is true."""
        cell = (points[rows] * FINE).astype(np.int64)[:, :, None] + around
        cell = cell.clip(0, self.side - 1)
        self.taken[np.flatnonzero(rows)[:, None, None], cell[..., 0], cell[..., 1]] = True


def _disc(radius: float) -> np.ndarray:
    """The offsets of all cells within the radius."""
    reach = math.ceil(radius)
    y, x = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    near = y**2 + x**2 <= radius**2
    return np.stack([y[near], x[near]], -1)


def along(start: np.ndarray, end: np.ndarray, style: Style) -> np.ndarray:
    """Points from start to end, half a pixel apart: (..., n, 2)."""
    share = np.linspace(0, 1, max(2, math.ceil(style.dash * FINE) + 1))[:, None]
    return start[..., None, :] + (end - start)[..., None, :] * share


def first_good(good: np.ndarray, *choices: np.ndarray) -> list[np.ndarray]:
    """The first good try of (B, tries, …): whether there is one, and its values."""
    pick = good.argmax(1)
    rows = np.arange(len(good))
    return [good.any(1), *(choice[rows, pick] for choice in choices)]


def draw_curve(
    rng: np.random.Generator,
    ground: Ground,
    style: Style,
    dashes: int,
    avoid: np.ndarray | None = None,
    discs: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """One curve per image: dashes (B, dashes, 2, 2) as (start, end) in (y, x), and the number of dashes (B,).

    The curve starts away from `avoid` (B, 2); with `discs` there is room for a disc at both ends.
    """
    turn = np.linspace(0, 2 * np.pi, 8, endpoint=False)
    ring = (style.disc + 0.5) * np.stack([np.sin(turn), np.cos(turn)], -1)
    B = len(ground.taken)
    lines = np.zeros((B, dashes, 2, 2))
    count = np.zeros(B, np.int64)
    alive = np.ones(B, bool)
    tip = heading = np.zeros(0)
    for number in range(dashes):
        if number == 0:
            start = rng.uniform(0, style.size - 1, (B, TRIES, 2))
            angle = rng.uniform(0, 2 * np.pi, (B, TRIES))
        else:
            # Later tries bend more, to avoid obstacles.
            wider = np.linspace(1, 2.5, TRIES)
            angle = heading[:, None] + rng.normal(0, style.bend, (B, TRIES)) * wider
        step = np.stack([np.sin(angle), np.cos(angle)], -1)
        if number:
            start = tip[:, None] + style.gap * step
        end = start + style.dash * step
        good = ground.free(along(start, end, style))
        if discs and number in (0, dashes - 1):
            good &= ground.free((start if number == 0 else end)[:, :, None] + ring)
        if number == 0 and avoid is not None:
            good &= np.linalg.norm(start - avoid[:, None], axis=-1) >= style.apart
        found, begin, tip, heading = first_good(good, start, end, angle)
        if number:  # occupy the cells of a dash after the next one has been placed
            ground.take(along(lines[:, number - 1, 0], lines[:, number - 1, 1], style), alive, ground.around_dash)
        alive &= found
        lines[alive, number, 0], lines[alive, number, 1] = begin[alive], tip[alive]
        count += alive
    whole = count == dashes
    ground.take(along(lines[:, -1, 0], lines[:, -1, 1], style), whole, ground.around_dash)
    if discs:
        ground.take(np.stack([lines[:, 0, 0], lines[:, -1, 1]], 1), whole, ground.around_disc)
    return lines, count


def paint(
    pictures: np.ndarray, row: np.ndarray, start: np.ndarray, end: np.ndarray, radius: float, value: float
) -> None:
    """Draw lines with round ends into float images (n, size, size), anti-aliased over one pixel."""
    size = pictures.shape[-1]
    middle = np.rint((start + end) / 2).astype(np.int64)
    reach = math.ceil(np.abs(end - start).max() / 2 + radius + 1) if len(start) else 0
    y, x = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    pixel = middle[:, None] + np.stack([y.ravel(), x.ravel()], -1)  # (lines, patch, 2)
    way = end - start
    length2 = np.maximum((way**2).sum(-1), 1e-9)
    share = (((pixel - start[:, None]) * way[:, None]).sum(-1) / length2[:, None]).clip(0, 1)
    off = pixel - (start[:, None] + share[..., None] * way[:, None])
    bright = value * (radius + 0.5 - np.sqrt((off**2).sum(-1))).clip(0, 1)
    inside = ((pixel >= 0) & (pixel < size)).all(-1) & (bright > 0)
    rows = np.broadcast_to(row[:, None], inside.shape)[inside]
    np.maximum.at(pictures, (rows, pixel[..., 0][inside], pixel[..., 1][inside]), bright[inside])


def make_chunk(size: int, difficulty: str, seed: int, chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, size, size) as bytes, and labels, half of them yes; depends only on the arguments."""
    pictures, labels, _ = draw(size, difficulty, seed, chunk)
    return pictures, labels


def draw(size: int, difficulty: str, seed: int, chunk: int) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Like `make_chunk`, and also returns the lines of the two curves and the discs."""
    style, dashes = STYLES[size], DASHES[difficulty]
    key = [seed, chunk, size, dashes]
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))
    ground = Ground(CHUNK, style)
    first, grown = draw_curve(rng, ground, style, dashes, discs=True)
    second, grown_too = draw_curve(rng, ground, style, dashes, avoid=first[:, 0, 0], discs=True)
    whole = (grown == dashes) & (grown_too == dashes)
    ground.taken = ground.taken[whole]
    first, second = first[whole], second[whole]
    short = max(1, dashes // 3)
    others = [draw_curve(rng, ground, style, short) for _ in range(style.distractor_dashes // short)]

    n = len(first)
    labels = (np.arange(n) % 2).astype(np.uint8)
    canvas = np.zeros((n, size, size), np.float32)
    for lines, count in [(first, np.full(n, dashes)), (second, np.full(n, dashes)), *others]:
        row, number = np.nonzero(np.arange(lines.shape[1]) < count[:, None])
        paint(canvas, row, lines[row, number, 0], lines[row, number, 1], style.thickness / 2, style.grey)
    discs = np.stack([first[:, 0, 0], np.where(labels[:, None] == 1, first[:, -1, 1], second[:, 0, 0])], 1)
    for at in (discs[:, 0], discs[:, 1]):
        paint(canvas, np.arange(n), at, at, style.disc, 1.0)
    pictures = np.rint(canvas * 255).astype(np.uint8)
    return pictures, labels, {"first": first, "second": second, "discs": discs}


def make(
    data: Path, *, size: int = 32, difficulty: str = "hard", count: int = COUNT, seed: int = 0, workers: int = 1
) -> Path:
    """Generate the data set into data/pathfinderSIZE-DIFFICULTY; independent of the number of workers."""
    if size not in STYLES or difficulty not in DASHES:
        raise ValueError(
            f"size must be one of {list(STYLES)} and difficulty one of {list(DASHES)}, got {size} and {difficulty!r}"
        )
    if count < 10:
        raise ValueError(f"count must be at least 10, for three parts; got {count}")
    folder = data / f"pathfinder{size}-{difficulty}"
    with new_folder(folder) as temporary:
        images = np.lib.format.open_memmap(
            temporary / "images.npy", mode="w+", dtype=np.uint8, shape=(count, size, size)
        )
        labels = np.zeros(count, np.uint8)
        done = 0
        with processes(workers) as pool:
            # Queue four chunks per worker and collect them in order, so that no worker waits for the slowest.
            numbers = itertools.count()
            jobs = deque(pool.submit(make_chunk, size, difficulty, seed, next(numbers)) for _ in range(4 * workers))
            while done < count:
                pictures, values = jobs.popleft().result()
                jobs.append(pool.submit(make_chunk, size, difficulty, seed, next(numbers)))
                room = min(len(pictures), count - done)
                images[done : done + room], labels[done : done + room] = pictures[:room], values[:room]
                done += room
            for job in jobs:
                job.cancel()
        images.flush()
        np.save(temporary / "labels.npy", labels)
        about = {"task": "pathfinder", "size": size, "difficulty": difficulty, "count": count, "seed": seed}
        write_manifest(temporary, about)
    return folder


def read_official(folder: Path, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The arena's layout: metadata/*.npy (text lines: folder, file, number, label, …) and folders of PNG files."""
    entries: list[tuple[Path, int]] = []
    for path in sorted((folder / "metadata").glob("*.npy"), key=lambda p: p.stem.zfill(12)):
        for number, line in enumerate(read_text(path).splitlines(), 1):
            words = line.split(" ")
            if len(words) < 4 or words[3] not in ("0", "1"):
                raise DamagedData(path, f"line {number} must be: folder, file, number, 0 or 1; got {line[:40]!r}")
            entries.append((folder / words[0] / words[1], int(words[3])))
    if not entries:
        raise DamagedData(folder, "its metadata folder lists no images")

    def picture(path: Path) -> np.ndarray:
        image = np.asarray(decoded(path, path, "L"))
        if image.shape != (size, size):
            raise DamagedData(path, f"it has {image.shape[1]} x {image.shape[0]} pixels, not {size} x {size}")
        return image

    with ThreadPoolExecutor() as pool:
        images = np.stack(list(pool.map(picture, [path for path, _ in entries])))
    return images, np.array([label for _, label in entries], np.uint8)


class Pathfinder(TextClassification):
    class_names = ("not connected", "connected")
    padded = False
    reads = frozenset({"max_length", "pooling", "norm", "qk_norm"})
    defaults: Mapping[str, Any] = dict(
        layers=4, heads=8, dim=128, head_dim=16, mlp_dim=128, dropout=0.1, steps=62_500, batch_size=256,
        learning_rate=1e-3, schedule="cosine", warmup=2000, optimizer="adam", beta2=0.98, eps=1e-9, eval_every=1000,
    )  # fmt: skip

    def __init__(self, size: int, difficulty: str):
        self.size, self.difficulty = size, difficulty
        self.name = f"pathfinder{size}-{difficulty}"  # type: ignore[misc]
        self.about = f"are two discs connected? {size} x {size} pixels, {difficulty}"  # type: ignore[misc]

    def load(self, config: TrainConfig) -> TaskData:
        if config.max_length not in (0, self.size**2):
            raise ValueError(f"max_length must be {self.size**2}, the pixels of an image, got {config.max_length}")
        how = f"generate it with: weft data make {self.name} --data {config.data}"
        names = (self.name, f"pathfinder{self.size}/{OFFICIAL[self.difficulty]}", OFFICIAL[self.difficulty])
        folder = find(config.data, names, how)
        if (folder / "metadata").is_dir():
            images, labels = read_official(folder, self.size)
        else:
            read_manifest(folder)
            images, labels = read_array(folder, "images"), read_array(folder, "labels")
        if images.shape[1:] != (self.size, self.size):
            raise DamagedData(folder, f"its images are {images.shape[1:]}, not {self.size} x {self.size}")
        if len(images) < 10:
            raise DataMissing(f"{folder} has {len(images)} images, too few for three parts")
        # Stored as bytes; the grey values 0 … 255 become ids 1 … 256 in the batch.
        rows, label = torch.from_numpy(images.reshape(len(images), -1)), torch.from_numpy(labels)
        cuts = [0, len(rows) * 8 // 10, len(rows) * 9 // 10, len(rows)]
        train, val, test = (
            {"pixels": rows[a:b], "label": label[a:b]} for a, b in zip(cuts[:-1], cuts[1:], strict=True)
        )
        return TaskData(train, val, test, length=self.size**2, facts={"vocab": 257, "classes": 2})

    def inputs(self, batch):
        return (batch["pixels"].long() + 1,)


for _size in STYLES:
    for _difficulty in DASHES:
        add_task(Pathfinder(_size, _difficulty))
