"""Your own data: classify or rate the texts of a table, or model a text.

    weft train classify --data reviews.csv        columns text and label; also .jsonl, .parquet, a folder with train.csv
    weft train regress --data reviews.csv         labels are numbers
    weft train lm --data book.txt                 a text, or a folder of texts

`--tokenizer` is bytes, words, bpe:SIZE or unigram:SIZE (trained on the training texts), or the file of a tokenizer.
Without a column `split` and without separate files, a fixed tenth of the rows is validation data, and another tenth
test data. `--model hf:NAME` trains a model of transformers, see hosts.py.
"""

from __future__ import annotations

import functools
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import BuiltFromData, Columns, DataMissing, Known, TaskData, TextClassification
from .config import TrainConfig
from .files import DamagedData, as_ids, as_utf8, files_of, pad_rows, split_off
from .hosts import host_facts, hosted_model, longest, tokenizer_of
from .imdb import WORD
from .registry import add_task
from .tables import LABEL, TEXT, Table, read_tables
from .text import Bytes, one_part
from .tokens import Pieces, windows

MADE = {"bpe": Pieces.of, "unigram": Pieces.unigram}  # tokenizers trained on the texts
PLACES = chain(range(0x300, 0x1F000), range(0xE0100, 0xE01F0))
MARKS = "".join(c for c in map(chr, PLACES) if unicodedata.category(c)[0] == "M")
MARKED = re.compile(rf"\w[\w{MARKS}]*")  # Python's \w has no combining marks, such as vowels in Hindi
Encode = Callable[[Sequence[str]], tuple[Tensor, list[int]]]


def meaning_of(config: TrainConfig, texts: Sequence[str], spaced: bool = False) -> tuple[list[str] | None, str | None]:
    """(vocabulary, tokenizer): of --tokenizer, or those that belong to the model's weights."""
    own = tokenizer_of(config)
    return make_tokenizer(config.tokenizer, texts, spaced) if own is None else (None, own)


def make_tokenizer(kind: str, texts: Sequence[str], spaced: bool = False) -> tuple[list[str] | None, str | None]:
    """(vocabulary, tokenizer) as a run stores them, for a value of --tokenizer; `spaced` as in `Pieces.of`."""
    if kind in ("", "bytes"):
        return None, None
    if kind == "words":
        words = Counter(word for text in texts for word in MARKED.findall(text))
        return ["<pad>", "<unk>", *sorted(words)], None
    name, _, size = kind.partition(":")
    if name in MADE:
        size = size or "8000"
        if not size.isdigit() or int(size) < 300:
            raise ValueError(f"--tokenizer {name}:SIZE needs a size of at least 300, got {kind!r}")
        return None, MADE[name](texts, int(size), spaced).tokenizer
    path = Path(kind)
    if not path.is_file():
        raise ValueError(f"--tokenizer must be bytes, words, bpe:SIZE, unigram:SIZE or a tokenizer.json, got {kind!r}")
    try:
        return None, Pieces(path.read_text(encoding="utf-8")).tokenizer
    except Exception as error:  # tokenizers raises plain Exception
        raise ValueError(f"{path} is not a file of a tokenizer ({error})") from None


def words_of(vocabulary: list[str]) -> re.Pattern[str]:
    """What a word is. Vocabularies without combining marks come from texts without them, or from older versions."""
    return WORD if all(WORD.fullmatch(word) for word in vocabulary[2:]) else MARKED


def from_file(config: TrainConfig, tokenizer: str | None) -> bool:
    """Whether the tokenizer was not made from the data."""
    return tokenizer is not None and not config.tokenizer.startswith(tuple(MADE))


def encoder(vocabulary: list[str] | None, tokenizer: str | None, length: int) -> tuple[Encode, int]:
    """From texts to rows of ids, cut and padded with 0 to `length`, and the tokens that each text had; and the number
    of ids, with 0."""
    if tokenizer is not None:
        pieces = cutting(tokenizer, length)
        vocab = len(pieces) + 1

        def one(text: str) -> tuple[np.ndarray, int]:
            found = pieces.bpe.encode(text)
            return np.array(found.ids, np.int32) + 1, tokens_of(found)
    elif vocabulary is not None:
        number, word = {word: i for i, word in enumerate(vocabulary)}, words_of(vocabulary)
        vocab = len(number)

        def one(text: str) -> tuple[np.ndarray, int]:
            words = word.findall(text)
            return np.array([number.get(w, 1) for w in words[:length]], np.int32), len(words)
    else:
        vocab = 257

        def one(text: str) -> tuple[np.ndarray, int]:
            return as_ids(text.encode(), length), len(text.encode())

    def encode(texts: Sequence[str]) -> tuple[Tensor, list[int]]:
        found = [one(text) for text in texts]
        return torch.from_numpy(pad_rows([ids for ids, _ in found], length, np.int32)), [count for _, count in found]

    return encode, vocab


@functools.lru_cache(maxsize=4)  # reading a tokenizer takes longer than the step of a small model
def cutting(tokenizer: str, length: int) -> Pieces:
    """A tokenizer that cuts texts to `length` tokens, and keeps the special ones at their end."""
    pieces = Pieces(tokenizer)
    pieces.bpe.enable_truncation(length)
    return pieces


def tokens_of(found: Any) -> int:
    """The tokens of a text that the library `tokenizers` has cut: every part of it has the special ones."""
    return len(found.ids) + sum(part.special_tokens_mask.count(0) for part in found.overflowing)


def undivided(found: Mapping[str, Sequence[tuple[Any, ...]]]) -> bool:
    """Whether no file and no row, whose last entry is its split, names the part it belongs to."""
    return set(found) == {""} and not any(row[-1] for row in found[""])


class TextTable(BuiltFromData, TextClassification):
    """Texts of a table in, one answer each out."""

    length = 512
    hosts = "SequenceClassification"
    reads = frozenset(
        {
            "max_length", "pooling", "packed", "text_column", "label_column", "tokenizer", "skip_unlabelled", "norm",
            "qk_norm",
        }
    )  # fmt: skip
    defaults = dict(
        layers=2, heads=8, dim=256, head_dim=32, mlp_dim=512, dropout=0.1, steps=2000, batch_size=32,
        optimizer="adamw", learning_rate=5e-4, weight_decay=0.01, beta2=0.999, eps=1e-8, schedule="cosine",
        warmup=200, clip=1.0, eval_every=200, pooling="mean",
    )  # fmt: skip

    def read(self, config: TrainConfig, known: Known | None) -> TaskData:
        whole = known is not None and known.whole
        found = {split: self._examples(table, config) for split, table in read_tables(config.data, whole).items()}
        parts = self._split(found, whole)
        length = known.length if known else longest(config, config.max_length or self.length)
        texts = [text for text, _, _ in parts["train"]]
        meaning = (known.vocabulary, known.tokenizer) if known else meaning_of(config, texts)
        encode, vocab = encoder(*meaning, length)
        names = known.classes if known else self.names([label for part in parts.values() for _, label, _ in part])
        columns, tokens = {}, {}
        for split, part in parts.items():
            ids, tokens[split] = encode([text for text, _, _ in part])
            columns[split] = {"ids": ids, "label": self.labels([(label, where) for _, label, where in part], names)}
        if known is None and not any(tokens["train"]):
            what = "the training texts have no tokens" + ("; --tokenizer words finds no word" * any(texts))
            raise DataMissing(f"{config.data}: {what}; choose another column with --text-column")
        facts = {"vocab": vocab, "classes": len(names) if names else 1}
        facts |= host_facts(config, known, length=length, vocab=vocab, classes=names or ["value"],
                            from_file=from_file(config, meaning[1]))  # fmt: skip
        return TaskData(columns["train"], columns["val"], columns["test"], length, facts, meaning[0], classes=names,
                        tokenizer=meaning[1], whole=whole and undivided(found), tokens=tokens)  # fmt: skip

    def _examples(self, table: Table, config: TrainConfig) -> list[tuple[str, str, str, str]]:
        """(text, label, where, split) of every row."""
        text = table.column(config.text_column, TEXT, "text", "--text-column")
        label = table.column(config.label_column, LABEL, "label", "--label-column")
        rows = []
        for row, place in zip(table.rows, table.places, strict=True):
            where = f"{table.path}, {place}"
            if not isinstance(row[text], str):
                raise DataMissing(f"{where}: column {text!r} must be text, got {row[text]!r:.60}")
            if row[label] is None or row[label] != row[label] or str(row[label]).strip() == "":  # the second for NaN
                if config.skip_unlabelled:
                    continue
                raise DataMissing(
                    f"{where}: column {label!r} is empty; fill it in, or leave out such rows with --skip-unlabelled"
                )
            if isinstance(row[label], (list, dict)):
                raise DataMissing(f"{where}: column {label!r} must be one label, got {row[label]!r:.60}")
            whole = isinstance(row[label], float) and row[label].is_integer()
            given = str(int(row[label]) if whole else row[label]).strip()  # 1.0 is 1, as in JSON and Python
            rows.append((row[text], given, where, table.split(row, where)))
        if not table.rows:
            raise DamagedData(table.path, "it has no rows")
        return rows

    def _split(
        self, found: dict[str, list[tuple[str, str, str, str]]], whole: bool
    ) -> dict[str, list[tuple[str, str, str]]]:
        parts: dict[str, list[tuple[str, str, str]]] = {"train": [], "val": [], "test": []}
        for split, rows in found.items():
            for text, label, where, own in rows:
                if split and own and own != split:
                    what = f"its column split says {own}, but its file is the {split} part"
                    raise DataMissing(f"{where}: {what}; pass the file itself with --data, or remove the column")
                parts[split or own or ("test" if whole else "train")].append((text, label, where))
        for name in () if whole else ("test", "val"):  # held out of the training rows, always the same ones
            if not parts[name]:
                rows3 = parts["train"]
                if len(rows3) < 10:
                    raise DataMissing(
                        f"{len(rows3)} training rows are too few to hold out a tenth for {name}: add rows"
                    )
                stay, out = split_off(len(rows3), max(1, len(rows3) // 10), seed=1 if name == "test" else 2)
                parts[name], parts["train"] = [rows3[i] for i in sorted(out)], [rows3[i] for i in sorted(stay)]
        return parts

    def names(self, labels: Sequence[str]) -> list[str] | None:
        raise NotImplementedError

    def labels(self, found: Sequence[tuple[str, str]], names: list[str] | None) -> Tensor:
        raise NotImplementedError

    def next_command(self, run: str) -> str:
        return f"weft predict {run} FILE"

    def encode(self, examples: Sequence[Any], known: Known) -> Columns:
        for text in examples:
            if not isinstance(text, str):
                raise TypeError(f"predict() takes a list of texts, got an entry of type {type(text).__name__}")
        ids, tokens = encoder(known.vocabulary, known.tokenizer, known.length)[0](examples)
        return {"ids": ids, "tokens": torch.tensor(tokens)}


class Classify(TextTable):
    name = "classify"
    about = "classes of your own texts: --data FILE.csv (.jsonl, .parquet, a folder)"

    def names(self, labels: Sequence[str]) -> list[str]:
        found = set(labels)
        if len(found) < 2:
            raise DataMissing(f"the rows have {len(found)} class ({', '.join(found)}); at least 2 are needed")
        if len(found) > max(20, len(labels) // 2):
            raise DataMissing(
                f"the {len(labels)} rows have {len(found)} different labels: choose another column with "
                "--label-column, or train numbers with `weft train regress`"
            )
        numbers = all(re.fullmatch(r"-?\d+", label) for label in found)
        return sorted(sorted(found), key=int if numbers else None)  # type: ignore[arg-type]  # 1 and 01 are equal

    def labels(self, found: Sequence[tuple[str, str]], names: list[str] | None) -> Tensor:
        assert names is not None
        number = {re.sub(r"^(-?\d+)\.0$", r"\1", name): i for i, name in enumerate(names)}  # of older versions: "1.0"
        number |= {name: i for i, name in enumerate(names)}
        for label, where in found:
            if label not in number:
                raise DataMissing(f"{where}: the class {label!r} is not among those of the run: {', '.join(names)}")
        return torch.tensor([number[label] for label, _ in found], dtype=torch.int32)


class Regress(TextTable):
    """The model predicts deviations from the mean of the training labels; the fact "scale" is that mean and the
    labels' standard deviation. Runs of older versions have no scale: their models predict the labels themselves."""

    name = "regress"
    about = "numbers from your own texts: --data FILE.csv (.jsonl, .parquet, a folder)"
    metric, higher_is_better, answers = "mae", False, "values"

    def check(self, config: TrainConfig) -> None:
        super().check(config)
        if config.label_smoothing:
            raise ValueError("label_smoothing has no effect on regression: remove --label-smoothing")

    def read(self, config: TrainConfig, known: Known | None) -> TaskData:
        data = super().read(config, known)
        if known is None:
            values = data.train["label"]
            data.facts["scale"] = [float(values.mean()), float(values.std(correction=0)) or 1.0]
            if not all(map(math.isfinite, data.facts["scale"])):
                raise DataMissing(f"{config.data}: labels up to {values.abs().max():g} are too large: divide them")
        elif "scale" in known.facts:
            data.facts["scale"] = known.facts["scale"]
        mean, deviation = data.facts.get("scale", (0.0, 1.0))
        for part in (data.train, data.val, data.test):
            part["label"] = ((part["label"] - mean) / deviation).float()  # float32 has too few digits for the values
            if "scale" in data.facts:  # the same in every row
                part["deviation"] = torch.tensor(deviation).expand(len(part["label"]))
        return data

    def names(self, labels: Sequence[str]) -> None:
        return None

    def labels(self, found: Sequence[tuple[str, str]], names: list[str] | None) -> Tensor:
        values = []
        for label, where in found:
            try:
                values.append(float(label))
            except ValueError:
                raise DataMissing(f"{where}: the label must be a number, got {label!r}") from None
            if not math.isfinite(values[-1]):
                raise DataMissing(f"{where}: the label must be a finite number, got {label!r}")
        return torch.tensor(values, dtype=torch.float64)

    def loss(self, model: nn.Module, batch: Columns, config: TrainConfig) -> Tensor:
        return F.mse_loss(model(*self.inputs(batch)).float()[:, 0], batch["label"])

    def score(self, model: nn.Module, batch: Columns) -> dict[str, Tensor]:
        off = model(*self.inputs(batch)).float()[:, 0] - batch["label"]  # in deviations
        count = torch.ones_like(off)
        return {
            "loss": off.square(), "absolute": off.abs(), "deviation": batch.get("deviation", count), "count": count
        }  # fmt: skip

    def decode(self, out: Tensor, rows: Columns, known: Known) -> list[dict[str, Any]]:
        mean, deviation = known.facts.get("scale", (0.0, 1.0))
        return [{"answer": value * deviation + mean} for value in out[:, 0].tolist()]

    def summary(self, sums: Mapping[str, float]) -> dict[str, float]:
        loss, absolute, deviation = (sums[name] / sums["count"] for name in ("loss", "absolute", "deviation"))
        return {"loss": loss, "mae": absolute * deviation, "rmse": math.sqrt(loss) * deviation}


class TextModel(BuiltFromData, Bytes):
    name = "lm"
    about = "a language model of your own text: --data FILE or folder, --tokenizer bytes or bpe:SIZE"
    metric, hosts = "perplexity", "CausalLM"
    reads = frozenset({"max_length", "tokenizer", "norm", "qk_norm"})
    defaults = {
        **Bytes.defaults,
        "layers": 4,
        "dim": 256,
        "head_dim": 32,
        "mlp_dim": 1024,
        "steps": 2000,
        "warmup": 200,
    }
    length = 512

    def content(self, config: TrainConfig) -> bytes:
        path = Path(config.data)
        if path.is_dir():
            for file in files_of(path):
                as_utf8(file, file.read_bytes())
        content = super().content(config)
        as_utf8(path, content)
        return content

    def read(self, config: TrainConfig, known: Known | None) -> TaskData:
        length = known.length if known else longest(config, config.max_length or self.length)
        whole = known is not None and known.whole
        parts = (self.content(config),) if whole else self.parts(self.content(config))
        if config.tokenizer == "words":
            raise ValueError("--tokenizer words is for classify, regress and tag; use bytes, bpe:SIZE or a "
                             "tokenizer.json")  # fmt: skip
        texts = [part.decode("utf-8", errors="replace") for part in parts]  # a cut may be inside a character
        tokenizer = known.tokenizer if known else meaning_of(config, texts[0].splitlines(keepends=True))[1]
        if tokenizer is None:
            arrays = [np.frombuffer(part, np.uint8).astype(np.int32) for part in parts]
            vocab = 256
        else:
            pieces = Pieces(tokenizer)
            arrays = [np.array(pieces.bpe.encode(text).ids, np.int32) for text in texts]
            vocab = len(pieces)
        facts = {"vocab": vocab}
        facts |= host_facts(config, known, length=length, vocab=vocab, padding=False,
                            from_file=from_file(config, tokenizer))  # fmt: skip
        if whole:
            return one_part(torch.from_numpy(arrays[0]), length, facts, tokenizer)
        train, val, test = ({"bytes": windows(array, length, self.overlap)} for array in arrays)
        return TaskData(train, val, test, length, facts, tokenizer=tokenizer)

    def model(self, config: TrainConfig, data: TaskData) -> nn.Module:
        if "hf" in data.facts:
            return hosted_model(config, data.facts, self.hosts, data.length, padding=False)
        return super().model(config, data)


add_task(Classify())
add_task(Regress())
add_task(TextModel())
