"""Tables of your own: CSV, JSON lines, Parquet, or a folder saved by `datasets`. Errors name the file and the line."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .base import DataMissing
from .files import DamagedData, kind_of, lines_of, read_text

TEXT = ("text", "sentence", "review", "document", "content", "body", "message", "comment")
LABEL = ("label", "labels", "class", "category", "target", "sentiment", "y")
SPLITS = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val",
          "test": "test"}  # fmt: skip
ENDINGS = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
ONE_OF = f"{', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}"


@dataclass
class Table:
    """Rows of named columns; `places` are their positions in the file, for error messages."""

    path: Path
    columns: list[str]
    rows: list[dict[str, Any]]
    places: list[str]

    def column(self, given: str, known: Sequence[str], what: str, option: str) -> str:
        """The name of a column: given, or one of the usual names."""
        if given:
            if given not in self.columns:
                raise DamagedData(self.path, f"it has no column {given!r}", f"Its columns: {', '.join(self.columns)}.")
            return given
        found = [name for name in self.columns if name.strip().lower() in known]
        if len(found) != 1:
            which = (
                f"several columns may hold the {what} ({', '.join(found)})"
                if found
                else f"no column is named {known[0]!r}"
            )
            raise DamagedData(self.path, which, f"Choose with {option}: {', '.join(self.columns)}.")
        return found[0]

    def split(self, row: dict[str, Any], where: str) -> str:
        """The part that a row belongs to, train, val or test, by its column `split`; empty without this column."""
        column = next((name for name in self.columns if name.strip().lower() == "split"), None)
        if column is None:
            return ""
        found = SPLITS.get(str(row[column]).strip().lower())
        if found is None:
            what = f"column {column!r} must be train, validation or test, got {row[column]!r}"
            raise DataMissing(f"{where}: {what}")
        return found


def read_table(path: Path) -> Table:
    if not path.exists():
        raise DataMissing(f"{path} does not exist: pass a {ONE_OF} file with --data")
    ending = kind_of(path)[1]
    if ending in (".csv", ".tsv"):
        return _csv(path, "\t" if ending == ".tsv" else None)
    if ending in (".jsonl", ".json"):
        return _json_lines(path)
    if path.suffix.lower() == ".parquet":
        return _parquet(path)
    raise DamagedData(path, f"it is not a {ONE_OF} file", "Convert it, or rename it if it is one of them.")


def read_tables(data: str, any_part: bool = False) -> dict[str, Table]:
    """The tables of a file or folder by split; "" for a table that has all rows. With `any_part`, a folder need not
    have a training part."""
    path = Path(data)
    if path.is_dir():
        if (path / "dataset_dict.json").exists() or (path / "dataset_info.json").exists():
            return _saved_by_datasets(path)
        found = by_split((kind_of(p)[0], p) for p in sorted(path.iterdir()) if kind_of(p)[1] in ENDINGS)
        if "train" not in found and not (any_part and found):
            raise DataMissing(
                f"{path} has no file train ({ONE_OF}): put train.csv there, and optionally "
                "validation.csv and test.csv, or pass a single file with --data"
            )
        return {split: read_table(file) for split, file in found.items()}
    if path.exists() or kind_of(path)[1] in ENDINGS:
        return {"": read_table(path)}
    return _from_hub(data)


def by_split(named: Iterable[tuple[str, Path]]) -> dict[str, Path]:
    """The files or folders that are named after a part of the data, by this part."""
    found: dict[str, Path] = {}
    for name, path in named:
        split = SPLITS.get(name.lower())
        if split in found:
            what = f"{found[split].name} and {path.name} are the same part of the data"
            raise DamagedData(path.parent, what, "Merge them, or move one of them away.")
        if split:
            found[split] = path
    return found


def _csv(path: Path, delimiter: str | None) -> Table:
    text = read_text(path)
    if delimiter is None:
        first = text.split("\n", 1)[0]
        delimiter = max(",;\t", key=first.count)
    csv.field_size_limit(2**31 - 1)  # the default, 131,072 characters, is less than a long document
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows, places, begin = [], [], 1
    try:
        columns = next(reader, [])
        if not any(columns):
            raise DamagedData(path, "it is empty; the first line must name the columns")
        if twice := [name for name in columns if name and columns.count(name) > 1]:
            raise DamagedData(path, f"several columns are named {twice[0]!r}", "Rename them.")
        begin = reader.line_num + 1
        for values in reader:
            line, begin = begin, reader.line_num + 1
            if not values:
                continue
            if len(values) != len(columns):
                raise DamagedData(path, f"line {line} has {len(values)} values, but there are {len(columns)} columns",
                                  "Put quotes around values with a delimiter or a line break.")  # fmt: skip
            rows.append(dict(zip(columns, values, strict=True)))
            places.append(f"line {line}")
    except csv.Error as error:
        raise DamagedData(path, f"line {begin}: {error}", "Check the quotes around that line.") from None
    return Table(path, columns, rows, places)


def _json_lines(path: Path) -> Table:
    text = read_text(path)
    try:
        whole = json.loads(text) if text.lstrip().startswith("[") else None
    except ValueError as error:
        raise DamagedData(path, f"it is not valid JSON ({error})") from None
    found: list[tuple[str, Any]] = [(f"entry {n}", row) for n, row in enumerate(whole or [], 1)]
    if whole is None:
        for number, line in enumerate(lines_of(text), 1):
            if line.strip():
                try:
                    found.append((f"line {number}", json.loads(line)))
                except ValueError as error:
                    what = f"line {number} is not valid JSON ({error})"
                    raise DamagedData(path, what, "Write a list of objects, or one whole object per line.") from None
    for place, row in found:
        if not isinstance(row, dict):
            raise DamagedData(path, f'{place} must be an object such as {{"text": "…", "label": "…"}}, got {row!r:.40}')
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            what = f"{place} has half of a surrogate pair (\\ud800 to \\udfff), which is no character"
            raise DamagedData(path, what) from None
    columns = list(dict.fromkeys(name for _, row in found for name in row))
    return Table(path, columns, [{name: row.get(name) for name in columns} for _, row in found], [p for p, _ in found])


def _parquet(path: Path) -> Table:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise DataMissing("reading Parquet files needs pyarrow: pip install 'weft[lab]'") from error
    try:
        table = parquet.read_table(path)
    except Exception as error:  # pyarrow raises many kinds
        raise DamagedData(path, f"it cannot be read ({error})") from error
    names = _class_names(table.schema.metadata or {})
    rows = [{column: _named(value, names.get(column)) for column, value in row.items()} for row in table.to_pylist()]
    return Table(path, table.column_names, rows, [f"row {n}" for n in range(table.num_rows)])


def _class_names(metadata: dict[bytes, bytes]) -> dict[str, Sequence[Any]]:
    """The names of classes by column, if `datasets` wrote the file: it stores classes as numbers. Tags get their names,
    labels stay numbers."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        kinds = {name: kind[0] if isinstance(kind, list) else kind.get("feature", kind)
                 for name, kind in features.items()}  # fmt: skip
        return {name: range(len(kind["names"])) if kind is features[name] else kind["names"]
                for name, kind in kinds.items() if kind.get("_type") == "ClassLabel"}  # fmt: skip
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataMissing("this needs Hugging Face datasets: pip install datasets") from error
    return datasets


def _saved_by_datasets(path: Path) -> dict[str, Table]:
    found = _datasets().load_from_disk(str(path))
    return _by_split(found if hasattr(found, "keys") else {"": found}, path)


def _from_hub(name: str) -> dict[str, Table]:
    if name.count("/") > 1 or name.startswith((".", "/")):
        raise DataMissing(f"{name} does not exist: pass a {ONE_OF} file, or a folder, with --data")
    try:
        import datasets
    except ImportError:
        raise DataMissing(
            f"{name} does not exist: pass a {ONE_OF} file, or a folder, with --data (the name of a data "
            "set on the hub needs `pip install datasets`)"
        ) from None
    try:
        return _by_split(datasets.load_dataset(name), Path(name))
    except DataMissing:
        raise
    except Exception as error:
        raise DataMissing(f"{name} is neither a file nor a data set that can be loaded ({error})") from error


def _by_split(found: Any, path: Path) -> dict[str, Table]:
    tables = {}
    for split, rows in found.items():
        if split in SPLITS or split == "":
            names = {column: _names(feature) for column, feature in rows.features.items()}
            listed = [{column: _named(value, names[column]) for column, value in row.items()} for row in rows]
            tables[SPLITS.get(split, "")] = Table(
                path, rows.column_names, listed, [f"row {n}" for n in range(len(listed))]
            )
    if not tables:
        raise DamagedData(path, f"its splits are {', '.join(found)}; one must be named train")
    return tables


def _names(feature: Any) -> list[str] | None:
    """The classes of a feature of `datasets`, a ClassLabel or a list of them; None for other features."""
    if isinstance(feature, list):  # how older versions write a list of features
        feature = feature[0]
    while hasattr(feature, "feature"):
        feature = feature.feature
    return getattr(feature, "names", None)


def _named(value: Any, names: Sequence[Any] | None) -> Any:
    if names is not None and isinstance(value, list):
        return [_named(entry, names) for entry in value]
    if names is None or not isinstance(value, int):
        return value
    return names[value] if value >= 0 else None  # -1: unlabelled
