"""One process at a time writes a run's folder.

The lock is the kernel's (`flock`) and goes with the process that holds it, however it ends. A process that starts
another for the folder hands the open file on: its number stands in WEFT_LOCK_FD.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import sys
import time
from pathlib import Path

NAME, INHERITED = ".lock", "WEFT_LOCK_FD"
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # a file system that has none


class InUse(Exception):
    """Another process is writing to the folder."""


def take(folder: Path) -> int:
    """The open lock file; closing it gives the folder free."""
    handle = _inherited(folder)
    if handle is None:
        handle = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(handle)
                if not isinstance(error, BlockingIOError):
                    raise
                raise InUse(f"{folder} is in use by {holder(folder)}: wait for it, or stop it first") from None
    who = {"pid": os.getpid(), "host": platform.node(), "since": time.strftime("%Y-%m-%d %H:%M:%S"), "argv": sys.argv}
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(who).encode() + b"\n", 0)
    except OSError:  # only for people to read
        pass
    return handle


def holder(folder: Path) -> str:
    """Who holds the lock, in words."""
    try:
        who = json.loads((folder / NAME).read_text())
        return f"process {who['pid']} on {who['host']} since {who['since']} ({' '.join(who['argv'])[:200]})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _inherited(folder: Path) -> int | None:
    given = os.environ.pop(INHERITED, "")
    try:
        handle = int(given)
        if os.path.samestat(os.fstat(handle), os.stat(folder / NAME)):
            os.set_inheritable(handle, False)
            return handle
    except (ValueError, OSError):
        pass
    return None
