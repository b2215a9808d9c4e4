"""The command `weft translate RUN`: translate lines of text with a translation model of the lab."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from .device import Device, chosen


def translate(
    run: Annotated[Path, typer.Argument(help="the folder of a run of a translation task")],
    file: Annotated[Path | None, typer.Option(help="one sentence per line; default: standard input")] = None,
    beam: Annotated[int, typer.Option(min=0, help="width of the beam search; 0: the model's")] = 0,
    length_penalty: Annotated[
        float | None, typer.Option(help="divide the score of n tokens by n to this power; default: the model's")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="sentences translated together")] = 32,
    which: Annotated[str, typer.Option(help="weights: best, last or average; default: the run's test_on")] = "",
    device: Device = "",
) -> None:
    """Translate text line by line; prints one translation per line."""
    from ..lab.say import say
    from ..lab.trained import load
    from ..models.translation import Translator
    from ..tasks.base import cut_note
    from ..tasks.files import lines_of, read_text
    from ..tasks.translation import as_rows, as_text, cut, load_tokenizer

    place = chosen(device)
    trained = load(run, which, place)
    model, config, text = trained.model, trained.config, trained.known.tokenizer
    if not isinstance(model, Translator) or text is None:
        raise typer.BadParameter(f"{run} was trained on {config.task!r}: weft translate needs a translation task")
    tokenizer = load_tokenizer(text)
    lines = lines_of(read_text(file) if file else sys.stdin.read())
    encoded = [one.ids for one in tokenizer.encode_batch(lines)]
    if note := cut_note([len(ids) + 2 for ids in encoded], config.max_length):  # with begin and end
        say(note, error=True)
    for start in range(0, len(lines), batch):
        rows = as_rows(encoded[start : start + batch], config.max_length)
        found = model.translate(cut(rows).to(place), beam, length_penalty).tolist()
        for line, ids in zip(lines[start : start + batch], found, strict=True):
            print(as_text(tokenizer, ids) if line.strip() else "", flush=True)
