"""Bytes that a mechanism sends between ranks, counted without running it: the same code on tensors without data."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from ..core import sharding
from ..core.contract import Attention
from .context import Context, split_sizes


class _Counting(Context):
    """One rank of many; what it sends is counted and goes nowhere."""

    tile = 1 << 62

    def __init__(self, rank: int, ranks: int, length: int):
        self.rank, self.ranks, self.bytes, self.bounds, self.length = rank, ranks, 0, [0], 0
        self._plans, self._given, self._met = {}, length, True
        self._set(split_sizes(length, ranks))

    def all_to_all(self, parts: list[Tensor], counts: list[int]) -> list[Tensor]:
        self.bytes += sum(p.numel() * p.element_size() for r, p in enumerate(parts) if r != self.rank)
        return [parts[0].new_empty(n, *parts[0].shape[1:]) for n in counts]


@torch.no_grad()
def traffic(
    attn: Attention,
    length: int,
    ranks: int,
    *,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    masked: bool = False,
    only: Sequence[int] | None = None,
) -> list[int]:
    """Bytes that each rank (or those of `only`) sends in the forward pass of one call with `length` tokens."""
    sent = []
    empty = copy.deepcopy(attn).to("meta")
    for rank in range(ranks) if only is None else only:
        context = _Counting(rank, ranks, length)
        shape = batch, attn.heads, context.stop - context.start, attn.head_dim
        q, k, v = (torch.empty(shape, dtype=dtype, device="meta") for _ in range(3))
        mask = torch.empty(batch, shape[2], dtype=torch.bool, device="meta") if masked else None
        with sharding.use(context):
            empty(q, k, v, mask)
        sent.append(context.bytes)
    return sent
