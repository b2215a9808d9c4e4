"""Language modelling on words or subwords: perplexity, causal or masked.

    DATA/<corpus>/train.txt, valid.txt, test.txt          plain text; .txt.xz is read too

are encoded once, and again if they change, into DATA/<corpus>/{pieces32000,words}-<part>.npy: subwords by a byte-level
BPE trained on train.txt (the papers' SentencePiece vocabularies are not published), words by white space with <eos> at
each line end, as in WikiText.
"""

from __future__ import annotations

import json
import lzma
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .base import BuiltFromData, Columns, DataMissing, Known, TaskData, block_options
from .config import TrainConfig
from .files import DamagedData, alone, atomic, find, sha256
from .registry import add_task
from .text import Bytes, Masked, counted, evaluated

PARTS = ("train", "valid", "test")
LINES = 10_000  # encoded at a time
NOT_A_CHARACTER = "\ufdd0"  # Unicode guarantees that no text has it, unlike "<unk>"


def lines(folder: Path, part: str) -> Iterator[str]:
    path = source(folder, part)
    opener: Any = lzma.open if path.suffix == ".xz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            yield from file
    except UnicodeDecodeError as error:
        raise DamagedData(path, f"it is not UTF-8 ({error})", "Convert it with iconv.") from None
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise DamagedData(path, f"it cannot be read ({error})") from error


def source(folder: Path, part: str) -> Path:
    for path in (folder / f"{part}.txt", folder / f"{part}.txt.xz"):
        if path.is_file():
            return path
    raise DataMissing(f"{folder}/{part}.txt does not exist: put the corpus there as train.txt, valid.txt and test.txt")


class Words:
    """Words by id; frequent words first, as adaptive softmax requires."""

    tokenizer = None

    def __init__(self, vocabulary: list[str]):
        self.vocabulary: list[str] | None = vocabulary
        self.number = {word: i for i, word in enumerate(vocabulary)}

    @classmethod
    def of(cls, text: Iterable[str]) -> Words:
        counts: Counter[str] = Counter()
        for line in text:
            counts.update([*line.split(), "<eos>"])
        found = [word for word, _ in counts.most_common()]
        return cls(found if "<unk>" in counts else [*found, "<unk>"])

    def __len__(self) -> int:
        return len(self.number)

    def encode(self, text: Iterator[str]) -> Iterator[Iterable[int]]:
        unknown = self.number["<unk>"]
        for line in text:
            yield (self.number.get(word, unknown) for word in [*line.split(), "<eos>"])


class Pieces:
    """A byte-level BPE, or another tokenizer of the library `tokenizers`."""

    vocabulary = None

    def __init__(self, tokenizer: str):
        from tokenizers import Tokenizer

        self.tokenizer: str | None = tokenizer
        self.bpe = Tokenizer.from_str(tokenizer)
        self.bpe.no_padding()  # a file may ask for it
        self.bpe.no_truncation()

    @classmethod
    def of(cls, text: Iterable[str], size: int, spaced: bool = False) -> Pieces:
        """`spaced`: a text gets a space at its beginning. Texts may then be single words: their pieces are those of
        words inside of a text."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=spaced)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(text, trainer)
        return cls(tokenizer.to_str())

    @classmethod
    def unigram(cls, text: Iterable[str], size: int, spaced: bool = False) -> Pieces:
        """The unigram pieces of SentencePiece, without its normalisation: decoding gives back the text, except for
        characters that are not in the training text, and U+2581, which stands for a space."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer, scheme = Tokenizer(models.Unigram()), "always" if spaced else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
        trainer = trainers.UnigramTrainer(
            vocab_size=size, show_progress=False, unk_token=NOT_A_CHARACTER, special_tokens=[NOT_A_CHARACTER]
        )
        tokenizer.train_from_iterator(text, trainer)
        return cls(tokenizer.to_str())

    def __len__(self) -> int:
        return self.bpe.get_vocab_size()

    def encode(self, text: Iterator[str]) -> Iterator[Iterable[int]]:
        while batch := list(islice(text, LINES)):
            for found in self.bpe.encode_batch(batch):
                yield found.ids


Code = Words | Pieces
Parts = dict[str, np.ndarray]


def encoded(folder: Path, pieces: int, known: Known | None = None) -> tuple[Parts, Code]:
    """The memory-mapped ids of each part, and the meaning of the ids; `pieces` is 0 for words.

    An existing run has its own code. If it differs from the one stored with the corpus, nothing is stored.
    """
    name = f"pieces{pieces}" if pieces else "words"
    if known is None:
        with alone(folder / f".{name}.lock"):
            return _stored(folder, name) or _store(folder, name, pieces)
    found = _stored(folder, name)
    code = _code(known.vocabulary, known.tokenizer)
    if found and (found[1].vocabulary, found[1].tokenizer) == (code.vocabulary, code.tokenizer):
        return found
    return {part: _as_array(code.encode(lines(folder, part))) for part in PARTS}, code


def _code(vocabulary: list[str] | None, tokenizer: str | None) -> Code:
    if tokenizer is not None:
        return Pieces(tokenizer)
    if vocabulary is None or "<unk>" not in vocabulary:
        raise DataMissing("the run has no vocabulary, so it cannot use this corpus")
    return Words(vocabulary)


def _stored(folder: Path, name: str) -> tuple[Parts, Code] | None:
    """The stored ids, if the texts have not changed since."""
    try:
        about = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        for part in PARTS:
            was, path = about["texts"][part], source(folder, part)
            same = (path.stat().st_size, path.stat().st_mtime_ns) == (was["size"], was["mtime"])
            if not same and sha256(path) != was["sha256"]:
                return None
            if (folder / f"{name}-{part}.npy").stat().st_size != about["sizes"][part]:
                return None
        found = {part: np.load(folder / f"{name}-{part}.npy", mmap_mode="c") for part in PARTS}
        return found, _code(about["vocabulary"], about["tokenizer"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _store(folder: Path, name: str, pieces: int) -> tuple[Parts, Code]:
    (folder / f"{name}.json").unlink(missing_ok=True)
    about: dict[str, Any] = {"texts": {}, "sizes": {}}
    for part in PARTS:
        path = source(folder, part)
        state = path.stat()
        about["texts"][part] = {"size": state.st_size, "mtime": state.st_mtime_ns, "sha256": sha256(path)}
    code = Pieces.of(lines(folder, "train"), pieces) if pieces else Words.of(lines(folder, "train"))
    for part in PARTS:
        target = folder / f"{name}-{part}.npy"
        with atomic(target) as temporary, open(temporary, "wb") as file:
            np.save(file, _as_array(code.encode(lines(folder, part))))
        about["sizes"][part] = target.stat().st_size
    about |= {"vocabulary": code.vocabulary, "tokenizer": code.tokenizer}
    with atomic(folder / f"{name}.json") as temporary:
        temporary.write_text(json.dumps(about), encoding="utf-8")
    found = _stored(folder, name)
    if found is None:
        raise DataMissing(f"the texts in {folder} changed while they were read: try again")
    return found


def _as_array(ids: Iterator[Iterable[int]]) -> np.ndarray:
    return np.fromiter((i for row in ids for i in row), np.int32)


def windows(ids: np.ndarray, length: int, extra: int, stride: int = 0) -> Tensor:
    """(n, length + extra): windows that start every `stride` tokens, by default without overlap."""
    if len(ids) < length + extra:
        raise DataMissing(
            f"a part of the corpus has {len(ids)} tokens, but one window needs {length + extra}: lower --max-length or "
            "use a longer text"
        )
    return torch.from_numpy(ids).unfold(0, length + extra, stride or length)


class Tokens(BuiltFromData, Bytes):
    """Predict the next token; metric perplexity."""

    metric = "perplexity"
    reads = frozenset({"max_length", "eval_stride"})

    def __init__(self, name: str, corpus: str, *, length: int, pieces: int = 32_000):
        self.name, self.corpus, self.length, self.pieces = name, corpus, length, pieces  # type: ignore[misc]
        what = f"subwords (BPE, {pieces:,})" if pieces else "words"
        self.about = f"predict {what} of {corpus}/{{train,valid,test}}.txt"  # type: ignore[misc]

    def ids(self, config: TrainConfig, known: Known | None) -> tuple[Parts, Code]:
        folder = Path(config.data)
        if not any(folder.glob("train.txt*")):
            how = "put the corpus there as train.txt, valid.txt and test.txt"
            folder = find(config.data, (self.corpus,), how)
            if not folder.is_dir():
                raise DataMissing(f"{folder} is a file: pass the folder of the corpus with --data, and {how}")
        return encoded(folder, self.pieces, known)

    def read(self, config: TrainConfig, known: Known | None) -> TaskData:
        length = config.max_length or self.length
        ids, code = self.ids(config, known)
        train = {"bytes": windows(ids["train"], length, self.overlap)}
        val, test = (evaluated(torch.from_numpy(ids[part]), length, config.eval_stride) for part in PARTS[1:])
        facts = {"vocab": len(code)}
        return TaskData(train, val, test, length, facts, code.vocabulary, tokenizer=code.tokenizer)

    def check(self, config: TrainConfig) -> None:
        super().check(config)
        if config.eval_stride > (config.max_length or self.length):
            raise ValueError(
                f"eval_stride={config.eval_stride} would leave tokens out: at most max_length, "
                f"{config.max_length or self.length}"
            )


class Likelihoods(Tokens):
    """For models with a large vocabulary: `model(ids, targets)` gives the negative log-likelihood of every target."""

    answers, splits = "nll", False

    def inputs(self, batch: Columns) -> tuple[Tensor, ...]:
        return batch["bytes"][:, :-1].long(), batch["bytes"][:, 1:].long()

    def loss(self, model: nn.Module, batch: Columns, config: TrainConfig) -> Tensor:
        return model(*self.inputs(batch)).mean()

    def score(self, model: nn.Module, batch: Columns) -> dict[str, Tensor]:
        losses = model(*self.inputs(batch))
        return counted(losses, batch.get("counts", torch.ones_like(losses, dtype=torch.bool)))


class AdaptiveTokens(Likelihoods):
    """Words by a Transformer with ALiBi, adaptive input and adaptive softmax, in the recipe of subsampled attention's
    paper for WikiText-103 (https://arxiv.org/abs/2306.01705)."""

    reads = frozenset({"max_length", "eval_stride", "mlp_dropout"})
    defaults = dict(
        layers=16, heads=8, head_dim=128, dim=1024, mlp_dim=4096, dropout=0.3, attention_dropout=0.1, mlp_dropout=0.1,
        steps=64_000, batch_size=64, warmup=16_000, learning_rate=1e-3, final_learning_rate=1e-5, schedule="cosine",
        optimizer="adam", beta2=0.999, eps=1e-8, clip=0.1, sigma=0.2, sigma_last=0.35, precision="bf16-mixed",
        eval_every=2000, eval_batches=20, checkpoint_every=1000,
    )  # fmt: skip

    def model(self, config: TrainConfig, data: TaskData) -> nn.Module:
        from ..models.words import WordModel

        return WordModel(data.facts["vocab"], data.length, **block_options(config))


class MaskedTokens(Tokens, Masked):
    """Predict masked tokens of sequences with at most two segments; the mask is the id after the last token.

    Documents are separated by empty lines. A sequence has the rest of one document and the beginning of the next, each
    with its own embedding, and is padded if both end before it is full.
    """

    overlap, splits, uneven = 0, False, True
    reads = frozenset({"max_length", "mask_rate"})

    def read(self, config: TrainConfig, known: Known | None) -> TaskData:
        length = config.max_length or self.length
        ids, code = self.ids(config, known)
        self.mask = len(code)
        kinds = white_space(code)
        train, val, test = (two_segments(ids[part], *kinds, length) for part in PARTS)
        facts = {"vocab": self.mask + 1}
        return TaskData(train, val, test, length, facts, code.vocabulary, tokenizer=code.tokenizer)

    def model(self, config: TrainConfig, data: TaskData) -> nn.Module:
        from ..models.language import TwoSegments

        return TwoSegments(
            data.facts["vocab"],
            max_length=data.length,
            positions=config.positions or "learned",
            **block_options(config),
        )

    def batch(self, rows: Columns, config: TrainConfig, generator: torch.Generator, training: bool) -> Columns:
        hide = self.hide if training else self.hide_each
        columns = hide(rows["bytes"].long(), rows["segment"] > 0, config.mask_rate, generator)
        return {**columns, "segment": rows["segment"].long()}

    def inputs(self, batch: Columns) -> tuple[Tensor, ...]:
        return batch["ids"], batch["segment"]

    def as_inputs(self, ids: Tensor) -> Columns:
        return {"ids": ids, "segment": torch.ones_like(ids)}

    def count(self, batch: Columns) -> Tensor:
        return batch["counts"].sum()

    def score(self, model: nn.Module, batch: Columns) -> dict[str, Tensor]:
        return Masked.score(self, model, batch)


def white_space(code: Code) -> tuple[np.ndarray, np.ndarray]:
    """Of every token: whether it is only white space, and whether it ends a line."""
    if isinstance(code, Words):
        ends = np.arange(len(code)) == code.number["<eos>"]
        return ends, ends
    texts = code.bpe.decode_batch([[i] for i in range(len(code))])
    return np.array([not text.strip() for text in texts]), np.array([text.endswith("\n") for text in texts])


def two_segments(ids: np.ndarray, white: np.ndarray, ends: np.ndarray, length: int) -> Columns:
    """Rows of consecutive tokens from at most two documents: ids, 0 at padding, and segments, 1 or 2, 0 at padding.

    `white` and `ends` are those of `white_space`; empty lines belong to the document before them.
    """
    ids = np.asarray(ids)
    breaks, solid = np.flatnonzero(ends[ids]), np.cumsum(~white[ids])
    empty = breaks[1:][solid[breaks[1:]] == solid[breaks[:-1]]]  # where lines of white space end
    after = empty[np.diff(solid[empty], append=len(ids) + 1) > 0] + 1  # the last of several
    borders = np.append(after[after < len(ids)], len(ids))
    rows, kinds, at = [], [], 0
    while at < len(ids):
        first = int(np.searchsorted(borders, at, side="right"))  # the end of the current document
        cut = int(borders[first])
        stop = min(at + length, int(borders[min(first + 1, len(borders) - 1)]))
        row, kind = np.zeros(length, ids.dtype), np.zeros(length, np.uint8)
        row[: stop - at] = ids[at:stop]
        kind[: stop - at] = 1 + (np.arange(at, stop) >= cut)
        rows.append(row)
        kinds.append(kind)
        at = stop
    if not rows:
        raise DataMissing("a part of the corpus is empty: use a longer text")
    return {"bytes": torch.from_numpy(np.stack(rows)), "segment": torch.from_numpy(np.stack(kinds))}


add_task(Tokens("wiki40b", "wiki40b", length=2048))
add_task(AdaptiveTokens("wikitext103", "wikitext-103", length=3072, pieces=0))
add_task(MaskedTokens("c4-masked", "c4", length=2048))
