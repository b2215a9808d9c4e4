"""What a run records of its data: the meaning of ids and labels, and a fingerprint of all rows.

data.json         rows and SHA-256 of each split, facts, class names, checksums of the next two files
vocabulary.txt    one word per line, in the order of their ids
tokenizer.json    if a tokenizer was trained on the data

Every checkpoint contains the checksum of data.json, so changes to these files are detected.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..tasks import DataMissing, Known, TaskData
from ..tasks.base import Columns, Task
from ..tasks.config import TrainConfig, differences
from .say import say as say_

if TYPE_CHECKING:
    from .run import Run

SPLITS = ("train", "val", "test")
KINDS = {"rows": dict, "sha256": dict, "facts": dict, "length": int, "classes": list | None, "vocabulary": str | None,
         "tokenizer": str | None}  # of data.json  # fmt: skip
SAMPLED = 2 * 2**30  # columns with more bytes are hashed in samples spread over them


class OtherData(Exception):
    """The data differs from the data the run was trained on."""


class EditedConfig(ValueError):
    """config.json differs from the config the run was trained with."""


@dataclass(frozen=True)
class Kept:
    """The contents of data.json, vocabulary.txt and tokenizer.json."""

    record: dict[str, Any]
    vocabulary: list[str] | None = None
    tokenizer: str | None = None

    @property
    def digest(self) -> str:
        return _sha(json.dumps(self.record, sort_keys=True))

    @property
    def known(self) -> Known:
        facts, classes, length = (self.record[name] for name in ("facts", "classes", "length"))
        return Known(facts, self.vocabulary, classes, self.tokenizer, length)

    def files(self) -> dict[str, str]:
        found = {"data.json": json.dumps(self.record, indent=2) + "\n"}
        if self.vocabulary is not None:
            found["vocabulary.txt"] = _lines(self.vocabulary)
        if self.tokenizer is not None:
            found["tokenizer.json"] = self.tokenizer
        return found


def describe(data: TaskData) -> Kept:
    """The record of this data."""
    record = {
        "rows": {split: data.rows(split) for split in SPLITS},
        "sha256": {split: fingerprint(getattr(data, split)) for split in SPLITS},
        "length": data.length,
        "facts": {name: value for name, value in data.facts.items() if _is_json(value)},
        "classes": data.classes,
        "vocabulary": None if data.vocabulary is None else _sha(_lines(data.vocabulary)),
        "tokenizer": None if data.tokenizer is None else _sha(data.tokenizer),
    }
    return Kept(json.loads(json.dumps(record)), data.vocabulary, data.tokenizer)


def read_kept(folder: Path) -> Kept | None:
    """The record in a run's folder; None for a run of an older version. A damaged record raises an error, because wrong
    words would give wrong metrics."""
    path = folder / "data.json"
    if not path.exists():
        return None
    way_out = "restore it from a copy; it defines the meaning of the model's ids and labels"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        wrong = [name for name, kind in KINDS.items() if not isinstance(record[name], kind)]
        if wrong or any(split not in record[name] for name in ("rows", "sha256") for split in SPLITS):
            raise ValueError(f"{wrong[0] if wrong else 'a split'} has an unexpected value")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}): {way_out}") from None
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{path} cannot be read (missing: {error}): {way_out}") from None
    texts: dict[str, str | None] = {"vocabulary": None, "tokenizer": None}
    for name, file in (("vocabulary", "vocabulary.txt"), ("tokenizer", "tokenizer.json")):
        if record[name] is None:
            continue
        try:
            texts[name] = (folder / file).read_bytes().decode("utf-8")
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder / file} cannot be read ({error}): {way_out}") from None
        if _sha(texts[name] or "") != record[name]:
            raise ValueError(f"{folder / file} was changed after the run wrote it: {way_out}")
    words = texts["vocabulary"]
    return Kept(record, None if words is None else _words(words), texts["tokenizer"])


def load_kept(
    task: Task,
    config: TrainConfig,
    run: Run,
    *,
    other: bool = False,
    whole: bool = False,
    say: Callable[[str], None] = say_,
) -> tuple[TaskData, Kept | None]:
    """Load the data as the run did. With `other`, the rows may differ, but not the meaning of ids and labels; with
    `whole`, nothing is then held out of them (`Known.whole`)."""
    kept = read_kept(run.folder)
    if kept is None:
        say(f"{run.folder} has no data.json (written by an older version): its data cannot be checked")
        return task.load(config), None
    data = task.load_again(config, dataclasses.replace(kept.known, whole=whole))
    now, was = describe(data).record, kept.record
    more = sum(now["rows"].values()) - sum(was["rows"].values())
    lost = len(SPLITS) * config.batch_size  # a part of a text may lose a last row, in each of its streams
    if whole and now["rows"] != was["rows"] and 0 <= more <= lost:
        with suppress(DataMissing):
            again = task.load_again(config, kept.known)
            if describe(again).record["sha256"] == was["sha256"]:  # the run's own data, in another place
                data, now = again, was
    meaning = [f"{name}: {_short(was[name])} -> {_short(now[name])}" for name in ("classes", "vocabulary", "tokenizer")
               if was[name] != now[name]]  # fmt: skip
    meaning += [f"{name}: {_short(value)} -> {_short(now['facts'].get(name))}" for name, value in was["facts"].items()
                if not _measured(value) and now["facts"].get(name) != value]  # fmt: skip
    meaning += [f"length: {was['length']} -> {now['length']}"] if was["length"] != now["length"] else []
    if meaning:
        raise OtherData(
            f"the data in {config.data} does not match {run.folder} ({'; '.join(meaning)}): "
            "the model cannot be used with it"
        )
    before, after = (
        {split: f"{r['rows'][split]:,} rows {r['sha256'][split][:8]}" for split in SPLITS} for r in (was, now)
    )
    rows = [f"{split}: {before[split]} -> {after[split]}" for split in SPLITS if before[split] != after[split]]
    if rows and not other:
        raise OtherData(
            f"the data in {config.data} is not what {run.folder} was trained on ({'; '.join(rows)}): restore "
            "the original data, or pass its folder with --data"
        )
    if data.whole:
        say(f"note: {config.data} is not the data the run was trained on, and has no parts: all of it is tested")
    elif rows:
        say(f"note: this is not the data the run was trained on ({'; '.join(rows)})")
    # The model uses the means and deviations of its original training data.
    return dataclasses.replace(data, facts={**data.facts, **was["facts"]}), kept


def check_numbers(run: Run, config: TrainConfig, kept: Kept | None, numbers: Mapping[str, Any]) -> None:
    """Raise an error if config.json or data.json was changed since the checkpoint was written."""
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    then = TrainConfig(**{name: value for name, value in numbers.get("config", {}).items() if name in names})
    changed = differences(then, config) if numbers.get("config") else []
    if changed:
        raise EditedConfig(
            f"{run.folder / 'config.json'} differs from the config of the checkpoint of step {numbers['step']} "
            f"({'; '.join(changed)}): restore it, or start a new run"
        )
    if kept is not None and numbers.get("data", kept.digest) != kept.digest:
        raise OtherData(
            f"{run.folder / 'data.json'} was changed after the checkpoint of step {numbers['step']} was written: "
            "restore it from a copy"
        )


def check_data(task: Task, config: TrainConfig, data: TaskData, splits: Sequence[str] = SPLITS) -> None:
    """Every split must have rows, and labels must be valid class indices."""
    for split in splits:
        columns: Columns = getattr(data, split)
        if not data.rows(split):
            others = [name for name in SPLITS if data.rows(name)]
            way_out = f"add more data{f', or choose its part {others[0]}' if others else ''}"
            raise DataMissing(f"{task.name}: no {split} examples in {config.data}; {way_out}")
        label, classes = columns.get("label"), data.facts.get("classes")
        if label is None or classes is None or label.is_floating_point():
            continue
        low, high = int(label.min()), int(label.max())
        if low < 0 or high >= classes:
            raise DataMissing(
                f"{task.name}: the {split} labels in {config.data} are between {low} and {high}; "
                f"with {classes} classes they must be between 0 and {classes - 1}"
            )


def fingerprint(columns: Columns) -> str:
    """SHA-256 of all rows; very large columns are sampled."""
    total = hashlib.sha256()
    for name in sorted(columns):
        column = columns[name]
        total.update(f"\0{name}\0{column.dtype}\0{tuple(column.shape)}\0".encode())
        for part in _parts(column):
            total.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _parts(column: Tensor) -> list[Tensor]:
    if not column.numel():
        return []
    stored = column.untyped_storage().nbytes()
    size = min(stored, column.numel() * column.element_size())
    if size > SAMPLED:
        picks = torch.linspace(0, len(column) - 1, 4096, dtype=torch.float64).long().unique()
        return [column[int(i)].cpu() for i in picks]
    if not column.is_contiguous() and stored < column.numel() * column.element_size():
        # Overlapping windows of a text: hash its storage once.
        whole = torch.empty(0, dtype=column.dtype).set_(column.untyped_storage())
        return [whole, torch.tensor([column.storage_offset(), *column.stride()])]
    return [column.cpu()]


def _measured(value: Any) -> bool:
    """A float, or a list of floats: measured on the data, and not bit-identical on all machines."""
    return isinstance(value, float) or (isinstance(value, list) and any(isinstance(v, float) for v in value))


def _is_json(value: Any) -> bool:
    try:
        return json.loads(json.dumps(value)) == value
    except (TypeError, ValueError):
        return False


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _lines(words: list[str]) -> str:
    return "".join(w.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r") + "\n" for w in words)


def _words(text: str) -> list[str]:
    escapes = {"\\\\": "\\", "\\n": "\n", "\\r": "\r"}
    return [re.sub(r"\\[\\nr]", lambda found: escapes[found[0]], line) for line in text.split("\n")[:-1]]


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
