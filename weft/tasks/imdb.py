"""IMDb sentiment: 25,000 training and 25,000 test reviews, as words or bytes.

Maas et al., Learning Word Vectors for Sentiment Analysis (2011). Reads the original folder aclImdb, or imdb.parquet
with columns text, label and split. A fixed tenth of the training reviews is validation data; the test reviews are only
used at the end.

Words are case-sensitive runs of letters, digits and underscores. The training reviews have 93,929, which matches the
vocabulary size in the wide-attention study. Byte b has id b + 1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .base import BuiltFromData, Columns, Known, StudyTask, TaskData
from .config import TrainConfig
from .files import DamagedData, as_ids, as_labels, find, pad_rows, read_parquet, read_text, split_off
from .registry import add_task

HOW = "download it with: weft data get imdb, or unpack aclImdb_v1.tar.gz (ai.stanford.edu/~amaas/data/sentiment) there"
WORD = re.compile(r"\w+")

Reviews = list[tuple[str, int]]


def read(data: str) -> tuple[Reviews, Reviews]:
    """The training and the test reviews with their labels, 1 = positive."""
    path = find(data, ("imdb.parquet", "aclImdb"), HOW)
    if path.suffix != ".parquet" and not path.is_dir():
        raise DamagedData(path, "it is neither a Parquet file nor the folder aclImdb")
    train, test = _read_parquet(path) if path.suffix == ".parquet" else _read_folder(path)
    for split, reviews in (("train", train), ("test", test)):
        if len({label for _, label in reviews}) != 2:
            raise DamagedData(path, f"its {split} part must have both positive and negative reviews")
    return train, test


def _read_parquet(path: Path) -> tuple[Reviews, Reviews]:
    table = read_parquet([path], ["text", "label", "split"])
    for row, text in enumerate(table["text"]):
        if not isinstance(text, str):
            raise DamagedData(path, f"the text of row {row} is {text!r}, not a string")
    labels = as_labels(table["label"], 2, path).tolist()
    rows = list(zip(table["text"], labels, table["split"], strict=True))
    train, test = ([(text, label) for text, label, s in rows if s == split] for split in ("train", "test"))
    return train, test


def _read_folder(path: Path) -> tuple[Reviews, Reviews]:
    def part(split: str) -> Reviews:
        found: Reviews = []
        for label, kind in enumerate(("neg", "pos")):
            files = sorted((path / split / kind).glob("*.txt"), key=lambda p: (p.stem.split("_")[0].zfill(12), p.name))
            if not files:
                raise DamagedData(path, f"{split}/{kind} has no reviews")
            found += [(read_text(file), label) for file in files]
        return found

    return part("train"), part("test")


class IMDb(BuiltFromData, StudyTask):
    class_names = ("negative", "positive")

    def read(self, config: TrainConfig, known: Known | None) -> TaskData:
        train, test = read(config.data)
        length = config.max_length or self.length
        vocabulary = (known and known.vocabulary) or self.vocabulary(train)
        stay, held_out = split_off(len(train), len(train) // 10)
        ids, labels = self.rows([text for text, _ in train], vocabulary, length), np.array([y for _, y in train])
        splits = [(ids[stay], labels[stay]), (ids[held_out], labels[held_out])]
        splits.append((self.rows([text for text, _ in test], vocabulary, length), np.array([y for _, y in test])))
        train_part, val_part, test_part = (
            {"ids": torch.from_numpy(rows), "label": torch.from_numpy(label.astype(np.uint8))} for rows, label in splits
        )
        facts = {"vocab": len(vocabulary) if vocabulary else 257, "classes": 2}
        return TaskData(train_part, val_part, test_part, length, facts, vocabulary)

    def vocabulary(self, train: Reviews) -> list[str] | None:
        return None

    def encode(self, examples: Sequence[Any], known: Known) -> Columns:
        return {"ids": torch.from_numpy(self.rows(list(examples), known.vocabulary, known.length))}

    def rows(self, texts: list[str], vocabulary: list[str] | None, length: int) -> np.ndarray:
        return pad_rows([as_ids(text.encode(), length) for text in texts], length)


class IMDbBytes(IMDb):
    name = "imdb-byte"
    about = "IMDb sentiment from the first 1000 bytes"


class IMDbTokens(IMDb):
    name = "imdb-token"
    about = "IMDb sentiment from the first 500 words"

    def vocabulary(self, train: Reviews) -> list[str]:
        words = {word for text, _ in train for word in WORD.findall(text)}
        return ["<pad>", "<unknown>", *sorted(words)]

    def rows(self, texts: list[str], vocabulary: list[str] | None, length: int) -> np.ndarray:
        assert vocabulary is not None
        number = {word: i for i, word in enumerate(vocabulary)}
        rows = [np.array([number.get(w, 1) for w in WORD.findall(text)[:length]], np.int32) for text in texts]
        return pad_rows(rows, length, np.int32)


add_task(IMDbBytes())
add_task(IMDbTokens())
