"""Lock a run's folder, so that only one process writes to it.

The lock is a `flock`, which the kernel releases when the process ends in any way. A parent process can pass the lock
to a child: WEFT_LOCK_FD is the number of the open file.
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
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # the file system does not support locks


class InUse(Exception):
    """Another process is writing to the folder."""


def take(folder: Path) -> int:
    """Lock the folder and return the open lock file. Closing it releases the lock."""
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
    except OSError:  # only informative
        pass
    return handle


def is_free(folder: Path) -> bool:
    """Whether no process holds the lock. Takes it for an instant."""
    handle = os.open(folder / NAME, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return True
    except OSError:  # held, or the file system does not support locks
        return False
    finally:
        os.close(handle)


def holder(folder: Path) -> str:
    """A description of the process that holds the lock."""
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
