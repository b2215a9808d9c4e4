"""Long ListOps, generated as in the Long Range Arena.

Tay et al., Long Range Arena, https://arxiv.org/abs/2011.04006; Nangia & Bowman, https://arxiv.org/abs/1804.06028

    tree(depth) = a digit, or with probability 1/4 (never at depth 10) an operator over 2 to 10 trees of depth + 1
    [MIN, [MAX, [MED (median, rounded down), [SM (sum modulo 10) … ]          500 < tokens < 2000, no duplicates

96,000 train, 2,000 validation, 2,000 test. The vocabulary has both brackets. The official TSV files are supported too.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .base import Columns, Known, StudyTask, TaskData
from .config import TrainConfig
from .files import DamagedData, find, new_folder, pad_rows, processes, read_array, read_manifest, write_manifest
from .registry import add_task

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
VOCABULARY = ("<pad>", *OPERATORS, "]", *map(str, range(10)), "<unknown>")
END, FIRST_DIGIT = VOCABULARY.index("]"), VOCABULARY.index("0")
SIZES = {"train": 96_000, "val": 2_000, "test": 2_000}
OPERATOR_RATE, MAX_DEPTH, MAX_ARGS, MIN_LENGTH, MAX_LENGTH = 0.25, 10, 10, 500, 2000
CHUNK = 4096  # trees grown at once


def grow(rng: np.random.Generator, trees: int) -> list[dict[str, np.ndarray]]:
    """Grow many trees at once, level by level: per node its tree, kind (operator number, or -1), digit and number of
    arguments. The arguments of a level's operators are consecutive in the next level, in order.

    The root is always an operator, because a single digit is too short to be kept.
    """
    levels = []
    tree = np.arange(trees)
    for depth in range(1, MAX_DEPTH + 1):
        n = len(tree)
        operator = rng.random(n) <= OPERATOR_RATE if 1 < depth < MAX_DEPTH else np.full(n, depth == 1)
        level = {
            "tree": tree,
            "kind": np.where(operator, rng.integers(0, len(OPERATORS), n), -1),
            "value": rng.integers(0, 10, n),
            "args": np.where(operator, rng.integers(2, MAX_ARGS + 1, n), 0),
        }
        levels.append(level)
        tree = np.repeat(tree, level["args"])
        if not len(tree):
            break
    return levels


def keep_lengths(levels: list[dict[str, np.ndarray]], trees: int, low: int, high: int) -> tuple[list, int]:
    """Keep only the trees with low < tokens < high, and renumber them."""
    tokens = np.zeros(trees)
    for level in levels:
        tokens += np.bincount(level["tree"], 1 + (level["kind"] >= 0), minlength=trees)
    kept = (tokens > low) & (tokens < high)
    number = np.cumsum(kept) - 1
    cut = []
    for level in levels:
        here = kept[level["tree"]]
        level = {name: column[here] for name, column in level.items()}
        level["tree"] = number[level["tree"]]
        cut.append(level)
    return [level for level in cut if len(level["tree"])], int(kept.sum())


def solve(levels: list[dict[str, np.ndarray]]) -> None:
    """Compute each node's value and number of tokens, from the leaves up."""
    for level, below in zip(reversed(levels), [None, *reversed(levels[1:])], strict=True):
        level["size"] = np.ones(len(level["tree"]), np.int64)
        operators = np.flatnonzero(level["kind"] >= 0)
        if below is None or not len(operators):
            continue
        args = level["args"][operators]
        start = np.cumsum(args) - args
        value = below["value"]
        level["size"][operators] = 2 + np.add.reduceat(below["size"], start)
        # The median of an operator's sorted arguments is the middle one, or the mean of the middle two.
        ordered = value[np.lexsort((value, np.repeat(np.arange(len(args)), args)))]
        median = (ordered[start + (args - 1) // 2] + ordered[start + args // 2]) // 2
        results = np.stack(
            [np.minimum.reduceat(value, start), np.maximum.reduceat(value, start), median,
             np.add.reduceat(value, start) % 10]
        )  # fmt: skip
        level["value"][operators] = results[level["kind"][operators], np.arange(len(args))]


def write_out(levels: list[dict[str, np.ndarray]], trees: int) -> tuple[np.ndarray, np.ndarray]:
    """The trees as rows of ids, and their values."""
    ids = np.zeros((trees, MAX_LENGTH), np.uint8)
    at = np.zeros(trees, np.int64)  # start of each node of the level
    for level, below in zip(levels, [*levels[1:], None], strict=True):
        operator = level["kind"] >= 0
        ids[level["tree"], at] = np.where(operator, 1 + level["kind"], FIRST_DIGIT + level["value"])
        ids[level["tree"][operator], (at + level["size"] - 1)[operator]] = END
        if below is None:
            break
        parent = np.flatnonzero(operator)
        args = level["args"][parent]
        before = np.cumsum(below["size"]) - below["size"]  # tokens of all earlier nodes of that level
        start = np.cumsum(args) - args
        at = np.repeat(at[parent] + 1 - before[start], args) + before
    return ids, levels[0]["value"].astype(np.uint8)


def make_chunk(seed: int, chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """The examples of one chunk of trees; depends only on (seed, chunk)."""
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, chunk])))
    levels, kept = keep_lengths(grow(rng, CHUNK), CHUNK, MIN_LENGTH, MAX_LENGTH)
    if not kept:
        return np.zeros((0, MAX_LENGTH), np.uint8), np.zeros(0, np.uint8)
    solve(levels)
    return write_out(levels, kept)


def generate(count: int, seed: int = 0, workers: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """`count` distinct examples, ids (count, 2000) and labels; independent of the number of workers."""
    ids, labels = np.zeros((count, MAX_LENGTH), np.uint8), np.zeros(count, np.uint8)
    seen: set[bytes] = set()
    chunk = 0
    with processes(workers) if workers > 1 else _Here() as pool:
        while len(seen) < count:
            numbers = range(chunk, chunk + max(1, workers) * 2)
            chunk += len(numbers)
            for rows, values in pool.map(make_chunk, [seed] * len(numbers), numbers):
                for row, value in zip(rows, values, strict=True):
                    key = row.tobytes()
                    if len(seen) < count and key not in seen:
                        ids[len(seen)], labels[len(seen)] = row, value
                        seen.add(key)
    return ids, labels


class _Here:
    """A pool that runs in this process."""

    def __enter__(self) -> _Here:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def map(self, function, *columns):
        return map(function, *columns)


def make(data: Path, *, seed: int = 0, workers: int = 1, sizes: dict[str, int] = SIZES) -> Path:
    """Generate the data set into data/listops."""
    folder = data / "listops"
    if min(sizes.values()) < 1:
        raise ValueError(f"every part needs at least one example, got {sizes}")
    with new_folder(folder) as temporary:
        ids, labels = generate(sum(sizes.values()), seed, workers)
        begin = 0
        for split, count in sizes.items():
            np.save(temporary / f"{split}_ids.npy", ids[begin : begin + count])
            np.save(temporary / f"{split}_label.npy", labels[begin : begin + count])
            begin += count
        write_manifest(temporary, {"task": "listops", "seed": seed, "sizes": sizes})
    return folder


_SHORT = {name: bytes([ord("A") + i]) for i, name in enumerate(OPERATORS)}
_TABLE = np.full(256, 255, np.uint8)
for _i, _letter in enumerate(_SHORT.values(), 1):
    _TABLE[_letter[0]] = _i
_TABLE[ord("]")] = END
for _i in range(10):
    _TABLE[ord(str(_i))] = FIRST_DIGIT + _i


def encode(source: str) -> np.ndarray:
    """An expression as ids. The parentheses of the official files only group, and are dropped."""
    text = source.encode()
    for name, letter in _SHORT.items():
        text = text.replace(name.encode(), letter)
    ids = np.frombuffer(text.translate(_TABLE.tobytes(), delete=b"() \n"), np.uint8)
    if (ids == 255).any():
        raise ValueError(f"not a ListOps expression: {source[:60]!r}")
    return ids


def read_tsv(path: Path, length: int) -> Columns:
    """An official file: a header line, then Source and Target."""
    rows, labels = [], []
    csv.field_size_limit(2**24)
    with open(path, newline="", encoding="utf-8", errors="replace") as file:
        reader = csv.reader(file, delimiter="\t")
        if next(reader, None) != ["Source", "Target"]:
            raise DamagedData(path, "the first line must be 'Source<tab>Target'")
        for line, row in enumerate(reader, 2):
            try:
                source, target = row
                ids = np.zeros(length, np.uint8)
                found = encode(source)[:length]
                ids[: len(found)] = found
                rows.append(ids)
                if not target.isdigit() or int(target) > 9:
                    raise ValueError(f"the target is {target!r}, not a digit")
                labels.append(int(target))
            except ValueError as error:
                raise DamagedData(path, f"line {line}: {error}") from error
    if not rows:
        raise DamagedData(path, "it holds no examples")
    return {"ids": torch.from_numpy(np.stack(rows)), "label": torch.tensor(labels, dtype=torch.uint8)}


class ListOps(StudyTask):
    name = "listops"
    about = "nested MIN, MAX, MEDIAN, SUM over digits, up to 2k tokens; generated: weft data make listops"
    class_names = tuple("0123456789")

    def load(self, config: TrainConfig) -> TaskData:
        length = config.max_length or self.length
        names = ("listops", "listops-1000", "lra_release/listops-1000", "lra_release/lra_release/listops-1000")
        folder = find(config.data, names, f"generate it with: weft data make listops --data {config.data}")
        if (folder / "basic_train.tsv").exists():
            train, val, test = (read_tsv(folder / f"basic_{split}.tsv", length) for split in SIZES)
        else:
            read_manifest(folder)
            train, val, test = (self._read(folder, split, length) for split in SIZES)
        return TaskData(train, val, test, length=length, facts={"vocab": len(VOCABULARY), "classes": 10})

    def encode(self, examples: Sequence[Any], known: Known) -> Columns:
        rows = [np.array(encode(text), np.int16) for text in examples]
        return {"ids": torch.from_numpy(pad_rows(rows, known.length))}

    def _read(self, folder: Path, split: str, length: int) -> Columns:
        ids = np.ascontiguousarray(read_array(folder, f"{split}_ids")[:, :length])
        return {"ids": torch.from_numpy(ids), "label": torch.from_numpy(read_array(folder, f"{split}_label"))}


add_task(ListOps())
