"""Killed and resumed: the losses must be bit-identical to those of a run that was left alone."""

from __future__ import annotations

from pathlib import Path

from ..lab.report import read_run
from ..pages import text
from .digits import charts
from .runs import VICTIM
from .story import Scale, Story


def tell(out: Path, scale: Scale, killed_at: int) -> Story:
    whole, mended = (read_run(out / name)["losses"] for name in ("deep", VICTIM))
    equal = sum(a == b for a, b in zip(whole, mended, strict=True))
    return Story(
        "Killed and resumed",
        "A run that is killed at any moment continues from its last checkpoint with exactly the same losses.",
        f"killed after step {killed_at}: {equal} of {len(whole)} losses are bit-identical to those of the other run",
        [
            text(f"The run got SIGKILL after step {killed_at}, and was started again with --resume."),
            *charts({"left alone": out / "deep", "killed": out / VICTIM}, {"killed": [(killed_at, "killed")]}),
        ],
        holds=equal == len(whole),
    )
