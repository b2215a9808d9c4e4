"""From what can go wrong to one sentence and an exit code. WEFT_DEBUG=1 shows the traceback."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from .say import say

# Codes follow sysexits.h where it has a suitable one.
BAD_REQUEST = 2
NO_DATA = 66
LOST = 69  # another process of the run has ended
DIVERGED = 70
MISCOMPILED = 71
NO_MEMORY = 73
CANNOT_SAVE = 74
INTERRUPTED = 75  # saved; can be continued with --resume

SMALLER = "Lower --batch-size and raise --accumulate by the same factor, or add --checkpoint-activations."
PEER = re.compile(r"connection (closed|reset|refused)|broken pipe|socket|timed out|peer|store", re.IGNORECASE)

# From click, or from the copy of click inside newer versions of typer.
PARSER_ERRORS: tuple[type[Exception], ...] = tuple(
    kind
    for parsed in (typer.BadParameter, typer.Exit, typer.Abort)
    for kind in parsed.__mro__
    if issubclass(kind, Exception) and kind.__name__ in ("ClickException", "Exit", "Abort")
)


class Group(TyperGroup):
    """Lists its commands with their whole first sentence."""

    def format_commands(self, context: Any, formatter: Any) -> None:
        found = [(name, self.get_command(context, name)) for name in self.list_commands(context)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(1000)) for name, command in found if command])


class Commands(Group):
    """Commands that print errors as one line instead of a traceback."""

    def invoke(self, context: Any) -> Any:
        with one_line_errors():
            return super().invoke(context)


@contextmanager
def one_line_errors() -> Iterator[None]:
    try:
        yield
    except PARSER_ERRORS:
        raise
    except BrokenPipeError:  # the reader closed the pipe; click exits quietly
        raise
    except (Exception, KeyboardInterrupt) as error:
        text, code = explain(error)
        first = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))) == 0
        if os.environ.get("WEFT_DEBUG"):
            say("".join(traceback.format_exception(error)), error=True)
        elif text and first:  # all processes fail together; only the first prints
            say(f"weft: {text}", error=True)
        # A launcher kills the first process if another exits with an error, so the others exit with 0.
        raise SystemExit(code if first or code != INTERRUPTED else 0) from None


def explain(error: BaseException) -> tuple[str, int]:
    """The message and the exit code. The message is empty if the training loop has already printed it."""
    from ..tasks import DataMissing
    from .checkpoint import CannotSave, DamagedCheckpoint
    from .compiled import Miscompiled
    from .divergence import Diverged
    from .kept import OtherData
    from .lock import InUse
    from .loop import Interrupted
    from .memory import TooLarge
    from .run import RunExists

    printed = {Diverged: DIVERGED, Miscompiled: MISCOMPILED, Interrupted: INTERRUPTED}
    for known, code in printed.items():
        if isinstance(error, known):
            return "", code
    codes: dict[type[Exception], int] = {
        DataMissing: NO_DATA, OtherData: NO_DATA, DamagedCheckpoint: NO_DATA, CannotSave: CANNOT_SAVE,
        RunExists: BAD_REQUEST, InUse: BAD_REQUEST, TooLarge: NO_MEMORY,
    }  # fmt: skip
    for kind, code in codes.items():
        if isinstance(error, kind):
            return str(error), code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 130
    text = str(error)
    full = "allocate memory" in text or "CUDA error: out of memory" in text  # of the system, or of the driver
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or full:
        return f"out of memory: {(text.splitlines() or ['allocation failed'])[0]} {SMALLER}", NO_MEMORY
    if isinstance(error, UnicodeDecodeError):
        return f"a file is not {error.encoding} text: {error}", NO_DATA
    if isinstance(error, (NotADirectoryError, IsADirectoryError, FileExistsError)):
        return f"{error.filename2 or error.filename}: {error.strerror}. Use another path.", BAD_REQUEST
    unwritten = type(error).__name__ == "SafetensorError" and "I/O error" in text
    if unwritten or (isinstance(error, OSError) and not isinstance(error, FileNotFoundError)):
        return f"{text}. Is the disk full, or the folder not writable?", CANNOT_SAVE
    if isinstance(error, FileNotFoundError) and error.filename is not None:  # the system's, not one of weft's
        return f"{error.filename2 or error.filename} does not exist", BAD_REQUEST
    if isinstance(error, (ValueError, ImportError, FileNotFoundError)):
        return text, BAD_REQUEST
    if isinstance(error, RuntimeError) and int(os.environ.get("WORLD_SIZE", "1")) > 1 and PEER.search(text):
        reason = text.strip().splitlines()[0][:200]
        return f"another process ended ({reason}). The last checkpoint is intact: continue with --resume.", LOST
    where = traceback.extract_tb(error.__traceback__)
    place = f" at {Path(where[-1].filename).name}:{where[-1].lineno}" if where else ""
    reason = (text.strip().splitlines() or [""])[0][:300]
    return f"unexpected {type(error).__name__}{place}: {reason} (WEFT_DEBUG=1 shows the traceback)", 1
