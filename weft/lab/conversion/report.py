"""The report of `weft.convert`."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...tasks.files import atomic

STAGES = ("before", "after swap", "after transfer", "after fine-tuning")


@dataclass
class Conversion:
    """Prints as a table; `as_dict()` can be written as JSON."""

    to: str
    settings: dict[str, Any]
    replaced: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)  # layer -> why it was not replaced
    losses: dict[str, float] = field(default_factory=dict)  # stage -> validation loss
    # layer -> relative squared error of its output, before and after transfer
    errors: dict[str, list[float]] = field(default_factory=dict)
    speed: dict[str, float] = field(default_factory=dict)  # "before", "after": tokens/s of forward and backward
    memory: dict[str, float] = field(default_factory=dict)  # "before", "after": peak bytes of forward and backward
    seconds: dict[str, float] = field(default_factory=dict)  # "transfer", "fine-tuning"
    tokens: dict[str, int] = field(default_factory=dict)  # "transfer", "fine-tuning"

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def save(self, path: str | Path) -> None:
        with atomic(Path(path)) as temporary:
            temporary.write_text(json.dumps(self.as_dict(), indent=1) + "\n")

    def __str__(self) -> str:
        left = f", {len(self.left)} left" if self.left else ""
        lines = [f"converted to {self.to}: {len(self.replaced)} layers replaced{left}"]
        lines += [f"  loss {stage:<18} {self.losses[stage]:.4f}" for stage in STAGES if stage in self.losses]
        for earlier, later in pairwise(stage for stage in STAGES[1:] if stage in self.losses):
            if self.losses[later] > self.losses[earlier]:
                option = "transfer_learning_rate" if later == "after transfer" else "learning_rate"
                lines.append(f"  the loss is higher {later} than {earlier}: try a smaller {option}")
        if self.errors:
            first, last = (sum(e[i] for e in self.errors.values()) / len(self.errors) for i in (0, -1))
            lines.append(f"  error of the layers     {first:.4f} after swap, {last:.4f} after transfer")
        for stage in ("transfer", "fine-tuning"):
            if self.tokens.get(stage):
                lines.append(f"  {stage:<23} {self.tokens[stage]:,} tokens in {self.seconds[stage]:,.0f} s")
        lines.append(f"  tokens/s in training    {_pair(self.speed, 1, ',.0f')}")
        lines.append(f"  peak memory, MiB        {_pair(self.memory, 2**20, ',.1f')}")
        return "\n".join(lines)


def _pair(found: dict[str, float], unit: float, form: str) -> str:
    def shown(when: str) -> str:
        value = found.get(when, math.nan)
        return "not measured" if value is None or math.isnan(value) else format(value / unit, form)

    return f"{shown('before')} before, {shown('after')} after"
