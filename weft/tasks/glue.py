"""Fine-tune a masked language model on sentences or pairs of sentences, in the layout of GLUE.

    weft train c4-masked --data corpus --out runs/mlm …
    weft train glue --data GLUE/MNLI --init-from runs/mlm --layers 6 …          the sizes of that run
    weft train sts-b --data GLUE/STS-B --init-from runs/mlm --layers 6 …        scores instead of classes

Reads train.tsv and dev.tsv (or dev_matched.tsv) of CoLA, SST-2, MRPC, QQP, MNLI, QNLI, RTE, WNLI and STS-B as
distributed (gluebenchmark.com): values between tabs, without quotes; or train.csv and dev.csv with such columns. The
labels of test.tsv are not public, so dev is the test part and a fixed twentieth of train is validation data. The
tokenizer is that of the run; without `--init-from`, a BPE is trained (`--tokenizer bpe:SIZE`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import BuiltFromData, Classification, Columns, DataMissing, Known, TaskData, block_options
from .config import TrainConfig
from .files import DamagedData, lines_of, read_text, split_off
from .own import make_tokenizer
from .registry import add_task
from .tables import Table, read_table
from .tokens import Pieces

TEXTS = (
    ("sentence1", "sentence2"), ("question1", "question2"), ("question", "sentence"), ("#1 String", "#2 String"),
    ("premise", "hypothesis"), ("sentence",), ("text",),
)  # fmt: skip
LABELS = ("label", "gold_label", "is_duplicate", "Quality")
SCORES = ("score",)
COLA = ["source", "label", "mark", "sentence"]  # the columns of CoLA, which has no heading
SIZES = ("layers", "heads", "head_dim", "dim", "mlp_dim", "attention", "attention_options", "positions")
Example = tuple[tuple[str, ...], str]


class Glue(BuiltFromData, Classification):
    name, about = "glue", "sentences or pairs in the layout of GLUE: --data GLUE/TASK --init-from RUN of c4-masked"
    length = 128
    columns: tuple[str, ...] = LABELS
    reads = frozenset({"max_length", "tokenizer"})
    defaults = dict(
        layers=6, heads=8, dim=512, head_dim=64, mlp_dim=2048, dropout=0.1, steps=3000, batch_size=32,
        optimizer="adamw", learning_rate=5e-5, weight_decay=0.01, beta2=0.999, eps=1e-8, schedule="linear", warmup=300,
        clip=1.0, positions="learned", eval_every=500,
    )  # fmt: skip

    def check(self, config: TrainConfig) -> None:
        super().check(config)
        place = Path(config.init_from) / "config.json"
        if not config.init_from or not place.is_file():
            return
        theirs = json.loads(place.read_text())
        other = [name for name in SIZES if theirs.get(name, getattr(config, name)) != getattr(config, name)]
        if other:
            wanted = " ".join(f"--{name.replace('_', '-')} {theirs[name]}" for name in other)
            raise ValueError(f"init_from: {config.init_from} has another model; use {wanted}")

    def read(self, config: TrainConfig, known: Known | None) -> TaskData:
        folder = Path(config.data)
        files = file_of(folder, "train"), file_of(folder, "dev", "dev_matched")
        train, test = (examples(file, self.columns) for file in files)
        length = known.length if known else config.max_length or self.length
        texts = [text for pair, _ in train for text in pair]
        tokenizer = known.tokenizer if known else self._tokenizer(config, texts)
        classes = known.classes if known else self.names(train, folder)
        strange = next((label for _, label in [*train, *test] if classes and label not in classes), None)
        if strange is not None:
            where = "among the classes of the run" if known else "in train.tsv"
            raise DamagedData(folder, f"the label {strange!r} is not {where}")
        assert tokenizer is not None
        code = Pieces(tokenizer)

        def rows(part: Sequence[Example]) -> Columns:
            return {**pairs(code, [pair for pair, _ in part], length), **self.labels(part, classes)}

        stay, out = split_off(len(train), max(1, len(train) // 20))
        facts = {"vocab": len(code) + 1, "classes": len(classes) if classes else 1}
        parts = rows([train[i] for i in stay]), rows([train[i] for i in out]), rows(test)
        return TaskData(*parts, length, facts, classes=classes, tokenizer=tokenizer)

    def names(self, train: Sequence[Example], folder: Path) -> list[str] | None:
        classes = sorted({label for _, label in train})
        if len(classes) < 2:
            raise DamagedData(folder / "train.tsv", f"its labels are all {classes[0]!r}; at least two are needed")
        return classes

    def labels(self, part: Sequence[Example], classes: list[str] | None) -> Columns:
        assert classes is not None
        return {"label": torch.tensor([classes.index(label) for _, label in part], dtype=torch.int32)}

    def _tokenizer(self, config: TrainConfig, texts: list[str]) -> str:
        if not config.init_from:
            found = make_tokenizer(config.tokenizer or "bpe:8000", texts)[1]
            if found is None:
                raise ValueError(f"--tokenizer must be bpe:SIZE or a tokenizer.json for glue, got {config.tokenizer!r}")
            return found
        if config.tokenizer:
            raise ValueError("the tokenizer is that of the run in --init-from: remove --tokenizer")
        path = Path(config.init_from) / "tokenizer.json"
        if not path.is_file():
            raise DataMissing(f"{path} does not exist: --init-from must be a run of c4-masked")
        return path.read_text(encoding="utf-8")

    def model(self, config: TrainConfig, data: TaskData) -> nn.Module:
        from ..models.language import SegmentClassifier

        options: dict[str, Any] = dict(positions=config.positions, **block_options(config))
        return SegmentClassifier(data.facts["vocab"], data.facts["classes"], max_length=data.length, **options)

    def begin(self, model: nn.Module, weights: Columns) -> bool:
        """Load the encoder of a masked language model, with as many positions as this model has."""
        if "kind.weight" not in weights:
            return False  # a run of this task
        encoder: Any = model.encoder
        own, theirs = encoder.state_dict(), {k: v for k, v in weights.items() if not k.startswith("scores.")}
        if "positions" in own:
            if len(theirs["positions"]) < len(own["positions"]):
                raise ValueError(
                    f"init_from: the run has {len(theirs['positions'])} positions, this model {len(own['positions'])}: "
                    f"use --max-length {len(theirs['positions'])}"
                )
            theirs["positions"] = theirs["positions"][: len(own["positions"])]
        encoder.load_state_dict(theirs)
        return True

    def inputs(self, batch: Columns) -> tuple[Tensor, ...]:
        return batch["ids"].long(), batch["kinds"].long()

    def encode(self, examples: Sequence[Any], known: Known) -> Columns:
        """Texts, or pairs of texts."""
        assert known.tokenizer is not None
        given = [(one,) if isinstance(one, str) else tuple(one) for one in examples]
        return pairs(Pieces(known.tokenizer), given, known.length)


class Scores(Glue):
    """Similarity from 0 to 5. Correlations are not sums over examples: predictions are kept until `summary`."""

    name, about = "sts-b", "scores of pairs in GLUE's layout: --data GLUE/STS-B --init-from RUN of c4-masked"
    metric, answers = "pearson", "values"
    columns = SCORES
    reads = Glue.reads
    defaults = Glue.defaults

    def __init__(self) -> None:
        self.found: dict[int, tuple[float, float]] = {}

    def names(self, train: Sequence[Example], folder: Path) -> None:
        return None

    def labels(self, part: Sequence[Example], classes: list[str] | None) -> Columns:
        values = torch.tensor([float(label) for _, label in part])
        return {"label": values, "number": torch.arange(len(part))}

    def loss(self, model: nn.Module, batch: Columns, config: TrainConfig) -> Tensor:
        return F.mse_loss(model(*self.inputs(batch)).float()[:, 0], batch["label"])

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        self.found = {}  # without those of an evaluation that was interrupted
        yield

    def score(self, model: nn.Module, batch: Columns) -> dict[str, Tensor]:
        answer = model(*self.inputs(batch)).float()[:, 0]
        columns = (batch["number"].tolist(), answer.tolist(), batch["label"].tolist())
        self.found |= {number: (mine, true) for number, mine, true in zip(*columns, strict=True)}
        return {"loss": (answer - batch["label"]).square(), "count": torch.ones_like(answer)}

    def summary(self, sums: Mapping[str, float]) -> dict[str, float]:
        if torch.distributed.is_initialized():
            everywhere: list[Any] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(everywhere, self.found)
            self.found = {number: pair for found in everywhere for number, pair in found.items()}
        mine, true = np.array(list(self.found.values())).T
        self.found = {}
        found = {"pearson": correlation(mine, true), "spearman": correlation(ranks(mine), ranks(true))}
        return {"loss": sums["loss"] / sums["count"], **found}

    def decode(self, out: Tensor, rows: Columns, known: Known) -> list[dict[str, Any]]:
        return [{"answer": value} for value in out[:, 0].tolist()]


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's correlation; 0 if one of them is constant."""
    x, y = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum()) / scale if scale else 0.0


def ranks(x: np.ndarray) -> np.ndarray:
    """Ranks from 0; equal values share their mean rank."""
    _, place, count = np.unique(x, return_inverse=True, return_counts=True)
    return (count.cumsum() - (count + 1) / 2)[place]


def file_of(folder: Path, *names: str) -> Path:
    for name in names:
        for ending in ("tsv", "csv"):
            if (folder / f"{name}.{ending}").is_file():
                return folder / f"{name}.{ending}"
    raise DataMissing(f"{folder}/{names[0]}.tsv does not exist: pass the folder of a GLUE task with --data")


def layout(path: Path, labels: Sequence[str] = ()) -> tuple[Table, tuple[str, ...]]:
    """A file and the names of its texts; one of `labels`, if given, must be a column."""
    table = read_table(path) if path.suffix == ".csv" else unquoted(path)
    texts = next((names for names in TEXTS if set(names) <= set(table.columns)), None)
    if texts is None or (labels and not set(labels) & set(table.columns)):
        known = ", ".join(" and ".join(names) for names in TEXTS)
        what = f"line 1 names the columns {', '.join(table.columns) or '(none)'}; expected {known}"
        what += f", and {' or '.join(labels)}" if labels else ""
        what += ". For scores, use weft train sts-b" if labels is LABELS and SCORES[0] in table.columns else ""
        raise DamagedData(path, what)
    return table, texts


def sentences(path: Path) -> tuple[list[dict[str, Any]], list[tuple[str, ...]]]:
    """The rows of a file, perhaps without labels, and their texts."""
    table, texts = layout(path)
    return table.rows, [tuple(row[name] for name in texts) for row in table.rows]


def examples(path: Path, columns: Sequence[str] = LABELS) -> list[Example]:
    """(texts, label) of every line; the label is in one of these columns."""
    table, texts = layout(path, columns)
    label = next(name for name in columns if name in table.columns)
    found = []
    for row, place in zip(table.rows, table.places, strict=True):
        if columns is SCORES and not re.fullmatch(r"-?\d+(\.\d+)?", row[label]):
            raise DamagedData(path, f"{place} has the score {row[label]!r}, which is not a number")
        if row[label] != "-":  # MNLI: the judges did not agree
            found.append((tuple(row[name] for name in texts), row[label]))
    if not found:
        raise DamagedData(path, "it has no examples")
    return found


def unquoted(path: Path) -> Table:
    """Values between tabs, without quotes; CoLA has no heading."""
    values = [line.split("\t") for line in lines_of(read_text(path))] or [[""]]
    heading, first = values[0], 1
    if len(heading) == len(COLA) and heading[1] in ("0", "1"):
        heading, first = COLA, 0
    # QQP has a few broken lines, which its other readers leave out too.
    spare = len(values) // 1000 if "is_duplicate" in heading else 0
    rows, places = [], []
    for number, row in enumerate(values[first:], first + 1):
        if len(row) == len(heading):
            rows.append(dict(zip(heading, row, strict=True)))
            places.append(f"line {number}")
        elif (spare := spare - 1) < 0:
            what = f"line {number} has {len(row)} values between tabs, line 1 has {len(heading)}"
            raise DamagedData(path, what)
    return Table(path, heading, rows, places)


def pairs(code: Pieces, given: Sequence[Sequence[str]], length: int) -> Columns:
    """Ids and kinds (1 and 2 for the two texts, 0 for padding), (n, length); the longer text is cut first."""
    ids, kinds = np.zeros((len(given), length), np.int32), np.zeros((len(given), length), np.uint8)
    for row, texts in enumerate(given):
        parts = [code.bpe.encode(text).ids for text in texts]
        while sum(map(len, parts)) > length:
            max(parts, key=len).pop()
        whole = [i for part in parts for i in part]
        ids[row, : len(whole)] = whole
        kinds[row, : len(whole)] = [kind for kind, part in enumerate(parts, 1) for _ in part]
    return {"ids": torch.from_numpy(ids), "kinds": torch.from_numpy(kinds)}


add_task(Glue())
add_task(Scores())
