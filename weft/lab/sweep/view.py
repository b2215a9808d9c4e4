"""The output of a sweep: a live table on a terminal, one line per change elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from ..progress import short
from ..say import console, plain, say
from .jobs import DONE, FAILED, IN_USE, RUNNING, STOPPED, WAITING, State

ORDER = (RUNNING, FAILED, IN_USE, STOPPED, WAITING, DONE)
COLOURS = {RUNNING: "cyan", FAILED: "red", IN_USE: "yellow", STOPPED: "yellow", WAITING: "dim", DONE: "green"}


class View:
    """Called by `run_jobs` with the current states."""

    def __init__(self, live: bool | None = None):
        self.live: Any = None
        self._drawn = self._printed = time.monotonic()
        if sys.stdout.isatty() if live is None else live:
            from rich.live import Live

            self.live = Live(auto_refresh=False, console=console())
            self.live.start()

    def __call__(self, states: Sequence[State], changed: State | None) -> None:
        now = time.monotonic()
        if self.live is not None:
            if changed is not None or now - self._drawn > 0.5:
                self._drawn = now
                self.live.update(table(states, self.live.console.height - 6), refresh=True)
        elif changed is not None:
            say(line(changed))
            self._printed = now
        elif now - self._printed > 60:
            self._printed = now
            for state in states:
                if state.state == RUNNING:
                    say(line(state))

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None


def line(state: State) -> str:
    """'done     full / 6x8 / seed 0: test accuracy 36.9 %'"""
    job = state.job
    text = f"{state.shown:8} {job.name}"
    if job.variant:
        text += f" ({job.variant})"
    if state.state == DONE:
        return f"{text}: {_value(state)}"
    if state.state != RUNNING:
        return f"{text}: {state.why}"
    if not state.step:
        return f"{text}: {job.folder}"
    text += f": step {state.step}/{state.steps}"
    if state.tokens_per_s:
        left = duration(state.left)
        text += f", loss {state.loss:.4f}, {short(state.tokens_per_s).strip()} tokens/s"
        text += f", {left} left" if left else ""
    return text


def table(states: Sequence[State], height: int = 1000) -> Any:
    """All states in the order of ORDER; rows that do not fit are counted."""
    from rich.table import Table
    from rich.text import Text

    counts = ", ".join(f"{n} {name}" for name in ORDER if (n := sum(state.state == name for state in states)))
    titles = dict.fromkeys(state.job.sweep.title for state in states)
    shown = Table("run", title=Text(plain("; ".join(titles))), caption=counts)
    for column in ("", "step", "loss", "tokens/s", "left"):
        shown.add_column(column, no_wrap=True)
    values = [len(_value(state)) for state in states if state.state == DONE]
    shown.add_column("result", min_width=max([6, *values]))  # figures are not cut; reasons are, and follow below
    ordered = sorted(states, key=lambda state: ORDER.index(state.state))
    for state in ordered[: max(1, height)]:
        result = state.why if state.why and state.state != DONE else _value(state)
        shown.add_row(
            Text(plain(state.job.name + (f" ({state.job.variant})" if state.job.variant else ""))),
            Text(state.shown, style=COLOURS[state.state]),
            f"{state.step}/{state.steps}",
            "" if math.isnan(state.loss) else f"{state.loss:.4f}",
            short(state.tokens_per_s).strip() if state.state == RUNNING and state.tokens_per_s else "",
            duration(state.left) if state.state == RUNNING else "",
            Text(plain(result), overflow="ellipsis", no_wrap=True),
        )
    if len(ordered) > height:
        shown.add_row(f"… {len(ordered) - height} more", *[""] * 6)
    return shown


def failures(states: Sequence[State]) -> str:
    """Each failed run with the last lines of its log."""
    parts = []
    for state in states:
        if state.state == FAILED:
            lines = "\n".join(f"    {text}" for text in state.log)
            end = f"; the end of {state.job.folder / 'log.txt'}:\n{lines}" if lines else f": {state.why}"
            parts.append(f"{state.job.name} failed{end}")
    return "\n".join(parts)


def duration(seconds: float) -> str:
    return "" if math.isnan(seconds) else str(timedelta(seconds=int(seconds)))


def _value(state: State) -> str:
    sweep = state.job.sweep
    if math.isnan(state.value):
        return state.why
    split = "test" if state.state == DONE else "validation"
    return f"{split} {sweep.metric.replace('_', ' ')} {sweep.show(state.value)}{' ' + sweep.unit if sweep.unit else ''}"
