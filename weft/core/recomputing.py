"""Correct state updates in training forwards under activation checkpointing.

Checkpointing runs a forward a second time, inside the backward pass. The second run must start from the same state as
the first and must not update it. Several forwards may be waiting for their backward, in any order, even of the same
batch. So each training forward draws a ticket from torch's CPU generator. Checkpointing restores that generator
(`preserve_rng_state=True`, the default), so the second run draws the same ticket.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .staging import refuse_trace


def recomputing() -> bool:
    """Return True inside a backward pass, where activation checkpointing repeats the forward."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def refuse_replica(layer: nn.Module) -> None:
    if "_is_replica" in vars(layer):
        raise RuntimeError(
            f"torch.nn.DataParallel runs copies of {type(layer).__name__} and throws them away, with the state that "
            "they should update; use torch.nn.parallel.DistributedDataParallel"
        )


@torch.library.custom_op("weft::once", mutates_args=())
def once(x: Tensor) -> Tensor:
    """Copy x; raise an error inside a backward pass. For compiled graphs, which cannot call `recomputing`."""
    if torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            "activation checkpointing repeats a compiled forward, which would update the layer's state twice; "
            "compile around the checkpoint, not inside it"
        )
    return x.clone()


@once.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class _Alive:
    """Held by a node of the autograd graph, and freed with it."""


@dataclass
class _Entry:
    ticket: Tensor
    content: Tensor  # sums of the input, for forwards that drew the same ticket
    state: Any
    graph: weakref.ref[Any] | None  # None if no graph was recorded, as in reentrant checkpointing
    recalled: bool = False


class Replays:
    """Initial states of the forwards whose backward may still run."""

    untied = 64  # how many entries without a graph are kept

    def __init__(self) -> None:
        self.tied: list[_Entry] = []
        self.loose: deque[_Entry] = deque(maxlen=self.untied)
        self.recalled = False  # whether any entry was, since the last forward

    @property
    def entries(self) -> list[_Entry]:
        return [*self.tied, *self.loose]

    def remember(self, x: Tensor, state: Any, made: Tensor, content: Tensor | None = None) -> None:
        """Record that the forward on x started from `state`. `made`, its result, links the entry to the graph.
        `content` is that of x if `recall` gets another function for it."""
        if torch.compiler.is_compiling():  # a compiled graph recomputes without running this code again
            return
        if torch.jit.is_tracing():
            raise refuse_trace("a layer that updates its state; call eval() first")
        graph = None
        node: Any = made.grad_fn
        if node is not None:
            graph = weakref.ref(node.metadata.setdefault(_Alive, _Alive()))
        entry = _Entry(_ticket(), _content(x) if content is None else content, state, graph)
        if self.tied:
            self.tied = [e for e in self.tied if e.graph is not None and e.graph() is not None]
        if self.recalled:
            self.loose = deque((e for e in self.loose if not e.recalled), maxlen=self.untied)
            self.recalled = False
        (self.loose if graph is None else self.tied).append(entry)

    def recall(self, x: Tensor, content_of: Callable[[Tensor], Tensor] | None = None) -> Any:
        """Return the initial state of the forward that this one repeats."""
        ticket = _ticket()
        entries = self.entries
        found = [e for e in entries if torch.equal(e.ticket, ticket)]
        if len(found) != 1:
            content = (content_of or _content)(x)
            found = [e for e in found or entries if torch.equal(e.content, content)]
        if len(found) != 1:
            raise RuntimeError(
                f"activation checkpointing repeats a forward of a layer with state, but {len(found)} of the "
                f"{len(entries)} forwards waiting for their backward match it (need 1). Use checkpoint(..., "
                "preserve_rng_state=True), do not seed the random generator between these forwards, and with "
                f"use_reentrant=True keep at most {self.untied} forwards waiting"
            )
        found[0].recalled = self.recalled = True
        return found[0].state

    def __reduce__(self) -> tuple[type[Replays], tuple[()]]:
        return Replays, ()  # a copy of a layer has no pending forwards


def _ticket() -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu").random_()


@torch.no_grad()
def _content(x: Tensor) -> Tensor:
    """Sums of x over tokens, viewed as int32 so that NaN equals NaN."""
    return x.detach().sum(-2, dtype=torch.float32).view(torch.int32)
