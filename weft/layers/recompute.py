"""State that a training forward rewrites, kept safe under activation checkpointing.

Checkpointing runs a forward a second time, inside the backward pass. The second run must begin with the state the
first one began with, and must leave no trace. So a layer remembers what its last few forwards began with, and finds
the right one again by what it was fed: several forwards may wait for their backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("weft::count_update", mutates_args=())
def count_update(updates: Tensor) -> Tensor:
    """updates + 1, in a compiled graph, which cannot ask where it runs: repeated in a backward pass, it refuses."""
    if torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            "activation checkpointing repeats a compiled forward, which would write the cache twice: "
            "compile around the checkpoint, not inside it"
        )
    return updates + 1


@count_update.register_fake
def _(updates: Tensor) -> Tensor:
    return torch.empty_like(updates)


@dataclass
class _Entry:
    number: int  # counts forwards
    key: Tensor
    state: Any
    recalled: bool = False


class Recent:
    """What the last `keep` forwards began with."""

    def __init__(self, keep: int = 4):
        self.keep, self.number = keep, 0
        self.entries: list[_Entry] = []

    def remember(self, x: Tensor, state: Any) -> None:
        if torch.compiler.is_compiling():  # a compiled graph recomputes without running this code again
            return
        self.number += 1
        oldest = self.number - self.keep
        self.entries = [e for e in self.entries if not e.recalled and e.number > oldest]
        self.entries.append(_Entry(self.number, _key(x), state))

    def recall(self, x: Tensor) -> Any:
        if not self.entries:
            raise RuntimeError("a training forward runs inside a backward pass, but no forward outside came before it")
        found = self.entries[0]
        if len(self.entries) > 1:  # several forwards wait for their backward: which one is this?
            key = _key(x)
            distance = (torch.stack([e.key for e in self.entries]) - key).abs()
            found = self.entries[int(distance.argmin())]
            if distance.min() > 1e-3 * (1 + key.abs()):
                raise RuntimeError(
                    f"activation checkpointing repeats a forward that is none of the last {self.keep}, which is all "
                    "that a cache remembers: run the backward passes earlier"
                )
        found.recalled = True
        return found.state


def _key(x: Tensor) -> Tensor:
    return x.detach().nansum(dtype=torch.float32)
