"""Print without control characters or markup; a closed pipe is not an error."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

# Characters that move the cursor, change colours or hide text; line breaks and tabs are allowed.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def plain(text: object) -> str:
    """The text with control characters escaped as in Python: '\\x1b[31m'."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], str(text))


def say(text: object, *, error: bool = False) -> None:
    """Print a line. A closed stream is not an error."""
    stream = sys.stderr if error else sys.stdout
    try:
        print(plain(text), file=stream, flush=True)
    except (OSError, ValueError):  # a closed pipe or terminal, a full disk under a log
        mute(stream)


def mute(stream: Any) -> None:
    """Redirect the stream to /dev/null, with its buffered output."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, stream.fileno())
    except (OSError, ValueError):  # not a real file
        name = "stderr" if stream is sys.stderr else "stdout"
        setattr(sys, name, open(os.devnull, "w"))
    finally:
        os.close(nowhere)


def console(width: int | None = None) -> Any:
    """A rich console that prints text literally, without markup or emoji."""
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False, width=width)


def show_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    title: str = "",
    wrap: Sequence[str] = (),
    numbers: bool = False,
) -> None:
    """Print a table that cuts nothing: only the columns in `wrap` take several lines, between words.

    If the terminal is too narrow for that, the table is as wide as it needs to be. With `numbers`, all columns but the
    first are aligned on the right.
    """
    from rich.cells import cell_len
    from rich.table import Table

    cells = [[plain(value) for value in row] for row in rows]
    table = Table(title=title or None, title_justify="left")
    total = 1
    for number, column in enumerate(columns):
        words = [part for row in cells for part in (row[number].split() if column in wrap else [row[number]])]
        width = max(map(cell_len, [*words, *(column.split() if column in wrap else [column])]), default=0)
        width = max(width, 30) if column in wrap else width
        justify: Any = "right" if numbers and number else "left"
        table.add_column(column, no_wrap=column not in wrap, min_width=width, justify=justify)
        total += width + 3
    for row in cells:
        table.add_row(*row)
    console(max(console().width, total)).print(table)
