"""Show the progress of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from .say import console, mute, plain, say


class Progress:
    """Prints only on the first process."""

    def __init__(self, total: int, start: int, *, show: bool):
        self.total, self.start, self.show = total, start, show
        self._seen = (time.perf_counter(), start)  # time and step of the last update
        self.metric = ""
        self._bar: Any = None
        self._last_line = 0.0
        if show and sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as RichProgress

            columns = [
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            ]
            self._bar = RichProgress(*columns, console=console())
            self._bar.start()
            self._task = self._bar.add_task("starting", total=total, completed=start)

    def update(self, step: int, loss: float, tokens_per_s: float) -> None:
        if not self.show:
            return
        text = f"loss {loss:.4f}{self.metric}  {short(tokens_per_s)} tokens/s"
        now, (then, before) = time.perf_counter(), self._seen
        self._seen = (now, step)
        if self._bar is not None:
            self._draw(lambda: self._bar.update(self._task, completed=step, total=self.total, description=text))
        elif step == self.total or now - self._last_line > 5:
            left = (now - then) / max(1, step - before) * (self.total - step)
            say(f"step {step}/{self.total}  {text}  {left:.0f} s left")
            self._last_line = now

    def counter(self, what: str) -> Callable[[int, int], None]:
        """Shows every five seconds how many batches of an evaluation are done."""
        start = last = time.perf_counter()

        def tell(done: int, total: int) -> None:
            nonlocal last
            now = time.perf_counter()
            if not self.show or not done or now - last < 5:
                return
            last = now
            text = f"{what} batch {done}/{total}  {(now - start) / done * (total - done):.0f} s left"
            if self._bar is not None:
                self._draw(lambda: self._bar.update(self._task, description=text))
            else:
                say(text)

        return tell

    def evaluated(self, step: int, metric: str, value: float, best: bool) -> None:
        self.metric = f"  {metric} {figure(value)}"
        self.say(f"step {step}  validation {metric} {figure(value)}{'  (best so far)' if best else ''}")

    def say(self, text: str) -> None:
        if not self.show:
            return
        if self._bar is not None:
            self._draw(lambda: self._bar.console.print(plain(text)))
        else:
            say(text)

    def _draw(self, act: Callable[[], Any]) -> None:
        """The terminal may have been closed."""
        try:
            act()
        except OSError:
            self._bar = None
            mute(sys.stdout)

    def close(self) -> None:
        if self._bar is not None:
            self._draw(self._bar.stop)
            self._bar = None


class Count:
    """Shows on stderr how many are done: on a terminal one line that changes, elsewhere a line every five seconds."""

    def __init__(self, what: str):
        self.what, self.start = what, 0.0
        self._last, self._width = 0.0, 0

    def __call__(self, done: int, total: int) -> None:
        now = time.perf_counter()
        if not self.start:
            self.start = self._last = now
        left = f", {(now - self.start) / done * (total - done):.0f} s left" if done else ""
        text = f"{self.what} {done + 1} of {total}{left}"
        if sys.stderr.isatty():
            self._write(f"\r{text:{self._width}}")
            self._width = len(text)
        elif now - self._last > 5:
            self._last = now
            say(text, error=True)

    def _write(self, text: str) -> None:
        try:
            print(text, end="", file=sys.stderr, flush=True)
        except OSError:  # a closed terminal
            mute(sys.stderr)

    def __enter__(self) -> Count:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._width:
            self._write(f"\r{'':{self._width}}\r")


def figure(value: float, digits: int = 4) -> str:
    """With this many decimals; numbers that are too small or large for them with an exponent."""
    plain = not value or 10**-digits <= abs(value) < 1e9
    return f"{value:.{digits}f}" if plain else f"{value:.4g}"


def short(number: float) -> str:
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.2f} {letter}"
    return f"{number:.0f} "
