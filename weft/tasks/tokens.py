"""Language modelling on words or pieces of words: perplexity, causal or masked.

    DATA/<corpus>/train.txt, valid.txt, test.txt          plain text; .txt.xz is read too

are encoded once, into DATA/<corpus>/{pieces32000,words}-<part>.npy: pieces by a byte-level BPE that is trained on
train.txt (the papers' SentencePiece vocabularies are not published), words by white space with <eos> at each line end,
as the makers of WikiText count.
"""

from __future__ import annotations

import json
import lzma
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .base import Columns, DataMissing, TaskData
from .config import TrainConfig
from .files import find
from .registry import add_task
from .text import Bytes, Masked

PARTS = ("train", "valid", "test")
LINES = 10_000  # encoded at a time


def lines(folder: Path, part: str) -> Iterator[str]:
    for path, opener in ((folder / f"{part}.txt", open), (folder / f"{part}.txt.xz", lzma.open)):
        if path.exists():
            with opener(path, "rt", encoding="utf-8") as file:
                yield from file
            return
    raise DataMissing(f"there is no {folder}/{part}.txt: put the corpus there as train.txt, valid.txt and test.txt")


def encoded(folder: Path, pieces: int) -> tuple[dict[str, np.ndarray], int]:
    """The parts as ids, mapped into memory, and the number of different ids; `pieces` 0 for words."""
    name = f"pieces{pieces}" if pieces else "words"
    about = folder / f"{name}.json"
    if not about.exists():
        vocab, encode = train_pieces(folder, pieces) if pieces else count_words(folder)
        for part in PARTS:
            write(folder / f"{name}-{part}.npy", encode(lines(folder, part)))
        about.write_text(json.dumps({"vocab": vocab}) + "\n")
    found = {part: np.load(folder / f"{name}-{part}.npy", mmap_mode="c") for part in PARTS}
    return found, json.loads(about.read_text())["vocab"]


def train_pieces(folder: Path, size: int) -> tuple[int, Any]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(lines(folder, "train"), trainer)
    tokenizer.save(str(folder / f"pieces{size}.tokenizer.json"))

    def encode(text: Iterator[str]) -> Iterator[Iterable[int]]:
        while batch := list(islice(text, LINES)):
            for found in tokenizer.encode_batch(batch):
                yield found.ids

    return tokenizer.get_vocab_size(), encode


def count_words(folder: Path) -> tuple[int, Any]:
    """Frequent words first, as adaptive softmax wants them."""
    counts: Counter[str] = Counter()
    for line in lines(folder, "train"):
        counts.update([*line.split(), "<eos>"])
    number = {word: i for i, (word, _) in enumerate(counts.most_common())}
    unknown = number.get("<unk>", len(number))

    def encode(text: Iterator[str]) -> Iterator[Iterable[int]]:
        for line in text:
            yield (number.get(word, unknown) for word in [*line.split(), "<eos>"])

    return max(len(number), unknown + 1), encode


def write(target: Path, ids: Iterator[Iterable[int]]) -> None:
    found = np.fromiter((i for row in ids for i in row), np.int32)
    with open(target.with_suffix(".tmp"), "wb") as file:
        np.save(file, found)
    os.replace(target.with_suffix(".tmp"), target)


def windows(ids: np.ndarray, length: int, extra: int) -> Tensor:
    if len(ids) < length + extra:
        raise DataMissing(f"a part of the corpus has {len(ids)} tokens, one window needs {length + extra}")
    return torch.from_numpy(ids).unfold(0, length + extra, length)


class Tokens(Bytes):
    """Predict the next token; metric perplexity."""

    metric = "perplexity"

    def __init__(self, name: str, corpus: str, *, length: int, pieces: int = 32_000):
        self.name, self.corpus, self.length, self.pieces = name, corpus, length, pieces  # type: ignore[misc]
        what = f"pieces (BPE, {pieces:,})" if pieces else "words"
        self.about = f"predict {what} of {corpus}/{{train,valid,test}}.txt"  # type: ignore[misc]

    def ids(self, config: TrainConfig) -> tuple[dict[str, np.ndarray], int]:
        folder = Path(config.data)
        if not any(folder.glob("train.txt*")):
            folder = find(config.data, (self.corpus,), "put the corpus there as train.txt, valid.txt and test.txt")
        return encoded(folder, self.pieces)

    def load(self, config: TrainConfig) -> TaskData:
        length = config.max_length or self.length
        ids, vocab = self.ids(config)
        train, val, test = ({"bytes": windows(ids[part], length, self.overlap)} for part in PARTS)
        return TaskData(train, val, test, length=length, facts={"vocab": vocab})

    def summary(self, sums: Mapping[str, float]) -> dict[str, float]:
        loss = sums["loss"] / sums["count"]
        return {"loss": loss, "perplexity": math.exp(min(loss, 50.0))}


class Likelihoods(Tokens):
    """For models with a large vocabulary: `model(ids, targets)` gives the negative log-likelihood of every target."""

    answers = "nll"

    def inputs(self, batch: Columns) -> tuple[Tensor, ...]:
        return batch["bytes"][:, :-1].long(), batch["bytes"][:, 1:].long()

    def loss(self, model: nn.Module, batch: Columns, config: TrainConfig) -> Tensor:
        return model(*self.inputs(batch)).mean()

    def score(self, model: nn.Module, batch: Columns) -> dict[str, Tensor]:
        loss = model(*self.inputs(batch))
        return {"loss": loss.sum(1), "count": torch.full_like(loss[:, 0], loss.shape[1])}


class MaskedTokens(Tokens, Masked):
    """Predict hidden tokens; the id after the last is the mask."""

    overlap = 0

    def load(self, config: TrainConfig) -> TaskData:
        found = super().load(config)
        self.mask = found.facts["vocab"]
        found.facts = {"vocab": self.mask + 1}
        return found


add_task(Tokens("wiki40b", "wiki40b", length=2048))
add_task(MaskedTokens("c4-masked", "c4", length=2048))
