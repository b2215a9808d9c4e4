"""State that a training forward rewrites, kept safe under activation checkpointing.

Checkpointing runs a forward a second time, inside the backward pass. The second run must begin with the state the
first one began with, and must leave no trace. Several forwards may wait for their backward, in any order and even of
the same batch. So each training forward draws a ticket from torch's CPU generator: checkpointing restores that
generator (`preserve_rng_state=True`, the default), and the second run draws the same ticket again.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def recomputing() -> bool:
    """True when this forward runs inside a backward pass, which is where activation checkpointing repeats it."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


@torch.library.custom_op("weft::once", mutates_args=())
def once(x: Tensor) -> Tensor:
    """A copy of x, for compiled graphs, which cannot ask where they run: repeated in a backward pass, it refuses."""
    if torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            "activation checkpointing repeats a compiled forward, which would update the layer's state twice: "
            "compile around the checkpoint, not inside it"
        )
    return x.clone()


@once.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class _Alive:
    """Kept by a node of the autograd graph: gone when the graph is."""


@dataclass
class _Entry:
    ticket: Tensor
    content: Tensor  # sums of the input, for forwards that drew the same ticket
    state: Any
    graph: weakref.ref | None  # None where no graph was recorded: reentrant checkpointing runs without
    recalled: bool = False


class Replays:
    """What the forwards began with whose backward may still come."""

    untied = 64  # how many are kept of those that no graph keeps alive

    def __init__(self) -> None:
        self.entries: list[_Entry] = []

    def remember(self, x: Tensor, state: Any, made: Tensor) -> None:
        """The forward on x began with `state`; `made`, which it computed, is part of its graph, if there is one."""
        if torch.compiler.is_compiling():  # a compiled graph recomputes without running this code again
            return
        graph = None
        node: Any = made.grad_fn
        if node is not None:
            graph = weakref.ref(node.metadata.setdefault(_Alive, _Alive()))
        tied = [e for e in self.entries if e.graph is not None and e.graph() is not None]
        untied = [e for e in self.entries if e.graph is None and not e.recalled]
        self.entries = [*tied, *untied[-self.untied + 1 :], _Entry(_ticket(), _content(x), state, graph)]

    def recall(self, x: Tensor) -> Any:
        """What the forward began with that this one repeats."""
        ticket, content = _ticket(), _content(x)
        found = [e for e in self.entries if torch.equal(e.ticket, ticket)]
        if len(found) != 1:
            found = [e for e in found or self.entries if torch.equal(e.content, content)]
        if len(found) != 1:
            raise RuntimeError(
                f"activation checkpointing repeats a forward of a layer with state, and {len(found)} of the "
                f"{len(self.entries)} forwards that wait for their backward fit it. Use checkpoint(..., "
                "preserve_rng_state=True), do not seed the random generator between these forwards, and without "
                f"gradients (use_reentrant=True) let at most {self.untied} wait"
            )
        found[0].recalled = True
        return found[0].state

    def __reduce__(self) -> tuple[type[Replays], tuple[()]]:
        return Replays, ()  # a copy of a layer has no forwards that wait


def _ticket() -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu").random_()


@torch.no_grad()
def _content(x: Tensor) -> Tensor:
    """The sums of x over its rows and over its channels; as bits, so that NaN equals NaN."""
    rows = x.detach().flatten(0, -2)
    return torch.cat([rows.sum(1, dtype=torch.float32), rows.sum(0, dtype=torch.float32)]).view(torch.int32)
