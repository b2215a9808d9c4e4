"""What the lab prints: no control codes out of names and files, no markup, and a closed pipe ends nothing."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

# Everything that can move the cursor, change colours or hide text; line breaks and tabs stay.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def plain(text: object) -> str:
    """The text with control characters written out: '\\x1b[31m' shows as it would in Python."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], str(text))


def say(text: object, *, error: bool = False) -> None:
    """Print a line. Nobody has to be there to read it."""
    stream = sys.stderr if error else sys.stdout
    try:
        print(plain(text), file=stream, flush=True)
    except (OSError, ValueError):  # a closed pipe or terminal, a full disk under a log
        mute(stream)


def mute(stream: Any) -> None:
    """Send what is still in its buffer, and all that follows, nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, stream.fileno())
    except (OSError, ValueError):  # no file at all
        name = "stderr" if stream is sys.stderr else "stdout"
        setattr(sys, name, open(os.devnull, "w"))
    finally:
        os.close(nowhere)


def console() -> Any:
    """A rich console that takes names as they are: brackets and colons in them mean nothing."""
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False)
