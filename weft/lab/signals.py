"""Stop requests: SIGTERM, SIGINT and SIGHUP are counted instead of ending the process."""

from __future__ import annotations

import signal
import threading
from typing import Any


class Signals:
    """Counts signals inside the `with` block. With `once`, a second signal ends the process as usual."""

    def __init__(self, once: bool = False) -> None:
        self.count, self.once = 0, once
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP: leave it ignored
                    self._before[number] = signal.signal(number, self._record)
        return self

    def _record(self, number: int, frame: Any) -> None:
        self.count += 1
        if self.once:
            signal.signal(number, signal.SIG_DFL)

    def __exit__(self, *exc: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
