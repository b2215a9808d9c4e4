"""Differentiable exchange of rows between ranks.

Every rank holds some rows of a long list and wants some rows, both named by their numbers in the list. All ranks know
what all ranks hold and want, so one all-to-all moves every row to where it is wanted. The backward pass sends the
gradients the same way back and adds them up in the order of the ranks, so they are the same in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

Numbers = Sequence[int] | range | Tensor


class Exchange:
    """The rows that each rank sends and receives."""

    def __init__(self, held: Sequence[Numbers], wanted: Sequence[Numbers], rank: int):
        have, want = _tensor(held[rank]), _tensor(wanted[rank])
        self.rows = len(want)
        self.held = len(have)
        self.send, self.place = [], []  # by rank: which of my rows it wants; where its rows go in my result
        for numbers, others in zip(held, wanted, strict=True):
            self.place.append(_found(_tensor(numbers), want)[0])
            self.send.append(_found(have, _tensor(others))[1])
        if sum(map(len, self.place)) != self.rows:
            raise ValueError("a wanted row is held by no rank, or by more than one")

    def on(self, device: torch.device) -> Exchange:
        self.send, self.place = [x.to(device) for x in self.send], [x.to(device) for x in self.place]
        return self


def _tensor(numbers: Numbers) -> Tensor:
    if isinstance(numbers, range):
        return torch.arange(numbers.start, numbers.stop, numbers.step)
    return torch.as_tensor(numbers, dtype=torch.long)


def _found(have: Tensor, want: Tensor) -> tuple[Tensor, Tensor]:
    """Positions in `want` of the numbers that are in `have`, and their positions in `have`."""
    if not len(have) or not len(want):
        return torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long)
    ordered, order = have.sort()
    at = torch.searchsorted(ordered, want).clamp(max=len(have) - 1)
    inside = ordered[at] == want
    return inside.nonzero()[:, 0], order[at[inside]]


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, context: Any) -> Tensor:
        ctx.exchange, ctx.context = exchange, context
        received = context.all_to_all([x[at] for at in exchange.send], [len(at) for at in exchange.place])
        out = x.new_empty(exchange.rows, *x.shape[1:])
        for at, rows in zip(exchange.place, received, strict=True):
            out[at] = rows
        return out

    @staticmethod
    @once_differentiable  # what other ranks send has no graph
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:
        exchange = ctx.exchange
        received = ctx.context.all_to_all([dout[at] for at in exchange.place], [len(at) for at in exchange.send])
        dx = dout.new_zeros(exchange.held, *dout.shape[1:])
        for at, rows in zip(exchange.send, received, strict=True):
            dx[at] += rows
        return dx, None, None


def exchange_rows(x: Tensor, exchange: Exchange, context: Any) -> Tensor:
    """x (held rows, ..) -> (wanted rows, ..)."""
    if x.shape[0] != exchange.held:
        raise ValueError(f"this rank should hold {exchange.held} rows, got {x.shape[0]}")
    return _Rows.apply(x, exchange, context)


def all_to_all(parts: list[Tensor], counts: list[int], group: Any) -> list[Tensor]:
    """Send parts[r] to rank r; receive `counts[r]` rows from rank r."""
    sent = torch.cat(parts).contiguous()
    received = sent.new_empty(sum(counts), *sent.shape[1:])
    dist.all_to_all_single(received, sent, counts, [len(p) for p in parts], group=group)
    return list(received.split(counts))
