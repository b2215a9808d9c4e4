"""The commands `weft predict` and `weft export`: use a trained model on your own examples, or take it elsewhere."""

from __future__ import annotations

import csv
import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .device import Device, chosen


def predict(
    run: Annotated[Path, typer.Argument(help="the folder of a run or of an exported model")],
    file: Annotated[
        Path,
        typer.Argument(
            help="a table (.csv, .jsonl, .parquet), a text with one example per line, or a folder of images"
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="write a CSV file; default: standard output")] = None,
    text_column: Annotated[
        str, typer.Option(help="column of the texts; default: the run's, or one with a usual name, such as text")
    ] = "",
    which: Annotated[str, typer.Option(help="weights: best, last or average; default: the run's test_on")] = "",
    batch_size: Annotated[int, typer.Option(min=1, help="examples at a time")] = 32,
    device: Device = "",
) -> None:
    """Predict the answers for the examples of a file. The columns of a table are kept, and the answers added.

    The new columns are answer and, for classes, probability; predicted_answer … if the table has these names already.
    """
    from ..lab.trained import load
    from ..tasks.base import Task
    from ..tasks.files import DamagedData
    from ..tasks.glue import Glue, sentences
    from ..tasks.images import PICTURES, ImageClassification

    if not file.exists():
        raise typer.BadParameter(f"{file} does not exist")
    if out is not None:  # fail before predicting
        if out.is_dir() or (out.exists() and out.samefile(file)):
            what = "a folder" if out.is_dir() else "the input, which it would overwrite"
            raise typer.BadParameter(f"--out {out} is {what}: pass another file")
        out.parent.mkdir(parents=True, exist_ok=True)
    model = load(run, which, chosen(device))
    if type(model.task).decode is Task.decode:
        raise typer.BadParameter(
            f"{run} was trained on {model.task.name!r}, which has no answers to predict; use "
            f"{model.task.next_command(shlex.quote(str(run)))}"
        )
    if not isinstance(model.task, ImageClassification) and (file.is_dir() or file.suffix.lower() in PICTURES):
        what = "a folder" if file.is_dir() else "an image"
        raise typer.BadParameter(f"{run} reads texts ({model.task.name}), and {file} is {what}: pass a table or a text")
    rows: list[dict[str, Any]]
    examples: list[Any]
    if isinstance(model.task, Glue) and file.suffix in (".tsv", ".csv") and not text_column:
        rows, examples = sentences(file)
    else:
        rows, examples = read_examples(file, text_column, model.config.text_column, tokens=model.task.name == "tag")
    if not rows:
        raise DamagedData(file, "it has no examples")
    answers = model.predict(examples, batch_size)
    table = [_with_answer(_joined(row), _joined(answer)) for row, answer in zip(rows, answers, strict=True)]
    if out is None:
        _write(table, sys.stdout)
        return
    with open(out, "w", newline="", encoding="utf-8") as target:
        _write(table, target)
    print(f"{len(table)} predictions in {out}")


def export(
    run: Annotated[Path, typer.Argument(help="the folder of a run")],
    folder: Annotated[Path, typer.Argument(help="a new folder")],
    which: Annotated[str, typer.Option(help="weights: best, last or average; default: the run's test_on")] = "",
) -> None:
    """Write the model of a run to a folder that `weft.load` and `weft predict` open anywhere."""
    from ..lab.trained import load

    model = load(run, which)
    model.export(folder)
    print(f'{folder}: open it with weft.load("{folder}"); next: {model.task.next_command(shlex.quote(str(folder)))}')


def read_examples(
    file: Path, text_column: str, trained_on: str, tokens: bool
) -> tuple[list[dict[str, Any]], list[Any]]:
    """The rows of a file, and the examples in them, which may be in the column of the training data; `tokens`: lists of
    tokens are examples too."""
    from ..tasks.files import DamagedData, kind_of, lines_of, read_text
    from ..tasks.images import PICTURES, pictures_of
    from ..tasks.tables import ENDINGS, TEXT, read_table
    from ..tasks.tags import COLUMNS, TOKENS, read_columns

    ending = kind_of(file)[1]
    if tokens and ending in COLUMNS and ending != ".txt":
        sentences = [row["tokens"] for row in read_columns(file, tagged=False).rows]
        return [{"tokens": sentence} for sentence in sentences], sentences
    if file.is_dir() or file.suffix.lower() in PICTURES:
        files = [file] if file.is_file() else pictures_of(file)
        if not files:
            raise DamagedData(file, "it has no images")
        return [{"file": str(p)} for p in files], files
    if ending in ENDINGS:
        table = read_table(file)
        text_column = text_column or (trained_on if trained_on in table.columns else "")
        column = table.column(text_column, (*TOKENS, *TEXT) if tokens else TEXT, "text", "--text-column")
        for row, place in zip(table.rows, table.places, strict=True):
            if not isinstance(row[column], (str, list) if tokens else str):
                raise DamagedData(file, f"{place}: column {column!r} must be text, got {row[column]!r:.60}")
        return table.rows, [row[column] for row in table.rows]
    lines = [line for line in lines_of(read_text(file)) if line.strip()]
    return [{"text": line} for line in lines], lines


def _joined(row: dict[str, Any]) -> dict[str, Any]:
    """Lists of tokens and tags with spaces between, as in a text; other lists, and objects, as JSON."""

    def cell(value: Any) -> Any:
        if isinstance(value, list) and all(x is None or isinstance(x, str) for x in value):
            return " ".join(x or "" for x in value)
        return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, (list, dict)) else value

    return {name: cell(value) for name, value in row.items()}


def _with_answer(row: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """The row and its answer, whose columns get another name if the row has them already."""
    added = {}
    for name, value in answer.items():
        while name in row:
            name = f"predicted_{name}"
        added[name] = value
    return row | added


def _write(table: list[dict[str, Any]], target: Any) -> None:
    writer = csv.DictWriter(target, list(table[0]))
    writer.writeheader()
    writer.writerows(table)
