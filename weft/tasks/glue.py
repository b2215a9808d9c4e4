"""Fine-tune a masked language model on sentences or pairs of sentences, in the layout of GLUE.

    weft train c4-masked --data corpus --out runs/mlm …
    weft train glue --data GLUE/MNLI --init-from runs/mlm --layers 6 …          the sizes of that run

Reads train.tsv and dev.tsv (or dev_matched.tsv) of CoLA, SST-2, MRPC, QQP, MNLI, QNLI, RTE and WNLI as distributed
(gluebenchmark.com): values between tabs, without quotes. The labels of test.tsv are not public, so dev is the test part
and a fixed twentieth of train is validation data. The tokenizer is that of the run; without `--init-from`, a BPE is
trained (`--tokenizer bpe:SIZE`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .base import BuiltFromData, Classification, Columns, DataMissing, Known, TaskData, block_options
from .config import TrainConfig
from .files import DamagedData, read_text, split_off
from .own import make_tokenizer
from .registry import add_task
from .tokens import Pieces

TEXTS = (
    ("sentence1", "sentence2"), ("question1", "question2"), ("question", "sentence"), ("#1 String", "#2 String"),
    ("premise", "hypothesis"), ("sentence",), ("text",),
)  # fmt: skip
LABELS = ("label", "gold_label", "is_duplicate", "Quality")
COLA = ["source", "label", "mark", "sentence"]  # the columns of CoLA, which has no heading
SIZES = ("layers", "heads", "head_dim", "dim", "mlp_dim", "attention", "attention_options", "positions")
Example = tuple[tuple[str, ...], str]


class Glue(BuiltFromData, Classification):
    name, about = "glue", "sentences or pairs in the layout of GLUE: --data GLUE/TASK --init-from RUN of c4-masked"
    length = 128
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
            raise ValueError(f"init_from: {config.init_from} has another model; give {wanted}")

    def read(self, config: TrainConfig, known: Known | None) -> TaskData:
        folder = Path(config.data)
        train, test = (examples(file_of(folder, *names)) for names in (("train",), ("dev", "dev_matched")))
        length = known.length if known else config.max_length or self.length
        texts = [text for pair, _ in train for text in pair]
        tokenizer = known.tokenizer if known else self._tokenizer(config, texts)
        classes = known.classes if known else sorted({label for _, label in train})
        assert tokenizer is not None and classes is not None
        if len(classes) < 2:
            raise DamagedData(folder / "train.tsv", f"its labels are all {classes[0]!r}; at least two are needed")
        strange = next((label for _, label in test if label not in classes), None)
        if strange is not None:
            raise DamagedData(folder, f"the label {strange!r} of the test part is not in train.tsv")
        code = Pieces(tokenizer)

        def rows(part: Sequence[Example]) -> Columns:
            labels = torch.tensor([classes.index(label) for _, label in part], dtype=torch.int32)
            return {**pairs(code, [pair for pair, _ in part], length), "label": labels}

        stay, out = split_off(len(train), max(1, len(train) // 20))
        facts = {"vocab": len(code) + 1, "classes": len(classes)}
        parts = rows([train[i] for i in stay]), rows([train[i] for i in out]), rows(test)
        return TaskData(*parts, length, facts, classes=classes, tokenizer=tokenizer)

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
                    f"give --max-length {len(theirs['positions'])}"
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


def file_of(folder: Path, *names: str) -> Path:
    for name in names:
        if (folder / f"{name}.tsv").is_file():
            return folder / f"{name}.tsv"
    raise DataMissing(f"{folder}/{names[0]}.tsv does not exist: give the folder of a task of GLUE with --data")


def examples(path: Path) -> list[Example]:
    """(texts, label) of every line."""
    lines = read_text(path).removeprefix("\ufeff").splitlines()
    heading = lines[0].split("\t") if lines else []
    first = 1
    if len(heading) == len(COLA) and heading[1] in ("0", "1"):
        heading, first = COLA, 0
    texts = next((pair for pair in TEXTS if set(pair) <= set(heading)), None)
    label = next((name for name in LABELS if name in heading), None)
    if texts is None or label is None:
        known = ", ".join(" and ".join(pair) for pair in TEXTS)
        what = f"line 1 names the columns {', '.join(heading) or '(none)'}; expected {known}, and one of {LABELS}"
        raise DamagedData(path, what)
    found = []
    for number, line in enumerate(lines[first:], first + 1):
        values = line.split("\t")
        if len(values) != len(heading):
            what = f"line {number} has {len(values)} values between tabs, line 1 has {len(heading)}"
            raise DamagedData(path, what)
        row = dict(zip(heading, values, strict=True))
        if row[label] != "-":  # MNLI: the judges did not agree
            found.append((tuple(row[name] for name in texts), row[label]))
    if not found:
        raise DamagedData(path, "it has no examples")
    return found


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
