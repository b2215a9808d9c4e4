"""Gather tokens of the same group (a hash bucket, a cluster) into runs, at a bounded cost.

The members of each group fill runs of `size` slots, in order of position. A run holds one group only. L tokens in G
groups need at most ceil(L / size) + G runs for any group sizes. On a GPU and in compiled code, where shapes must not
depend on the data, that many runs are allocated; on a CPU, only the runs and slots in use. The run of a token depends
only on its group and on the number of earlier members. So in a causal mechanism later tokens never move an earlier one,
unlike in a plain sort by group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .blocks import ceil_div


@dataclass
class Runs:
    token: Tensor  # (..., R, size): the token in each slot; L in an empty slot
    group: Tensor  # (..., R): the group of each run
    number: Tensor  # (..., R): which run of its group it is: 0, 1, 2, ...
    slot: Tensor  # (..., L): the slot of each token, as an index into the flattened (R * size)

    @property
    def filled(self) -> Tensor:
        return self.token < self.slot.shape[-1]


def gather_runs(group: Tensor, groups: int, size: int) -> Runs:
    """Arrange tokens in runs of at most `size` slots; `group` is (..., L) with values in [0, groups)."""
    L = group.shape[-1]
    ordered, order = torch.sort(group, dim=-1, stable=True)
    counts = torch.zeros(*group.shape[:-1], groups, dtype=torch.long, device=group.device)
    counts = counts.scatter_add(-1, group, torch.ones_like(group))
    size = min(size, max(room_for(counts, size), 1))
    runs = (counts + size - 1) // size
    n_runs = room_for(runs.sum(-1), ceil_div(L, size) + groups)
    first_token = counts.cumsum(-1) - counts
    first_run = runs.cumsum(-1) - runs
    rank = torch.arange(L, device=group.device) - first_token.gather(-1, ordered)
    slot_of_ordered = first_run.gather(-1, ordered) * size + rank
    token = torch.full((*group.shape[:-1], n_runs * size), L, dtype=torch.long, device=group.device)
    token = token.scatter(-1, slot_of_ordered, order)
    slot = torch.zeros_like(group).scatter(-1, order, slot_of_ordered)
    index = torch.arange(n_runs, device=group.device).expand(*group.shape[:-1], n_runs).contiguous()
    group_of_run = torch.searchsorted(runs.cumsum(-1), index, right=True)  # `groups` for empty runs at the end
    number = index - first_run.gather(-1, group_of_run.clamp(max=groups - 1))
    return Runs(torch.unflatten(token, -1, (n_runs, size)), group_of_run, number, slot)


def fixed_shapes(x: Tensor) -> bool:
    """Whether shapes must not depend on the data of x: on a GPU, where to read it takes long, and in compiled code."""
    return x.device.type != "cpu" or torch.compiler.is_compiling()


def room_for(counts: Tensor, most: int) -> int:
    """The largest of `counts`, or `most` if shapes must not depend on the data."""
    if fixed_shapes(counts):
        return most
    return int(counts.max()) if counts.numel() else 0


def take_tokens(x: Tensor, token: Tensor) -> Tensor:
    """x (B, H, L, D) at token (B, H, ...) -> (B, H, ..., D), zeros for token L."""
    return take_rows(F.pad(x, (0, 0, 0, 1)), token)


def take_rows(x: Tensor, at: Tensor) -> Tensor:
    """x (B, H, L, D) at (B, H, ...) -> (B, H, ..., D). Copies whole rows: several times faster than gather on a CPU."""
    B, H, L, D = x.shape
    first = L * torch.arange(B * H, device=at.device).view(B, H, 1)
    return x.reshape(-1, D).index_select(0, (at.flatten(2) + first).flatten()).view(*at.shape, D)


def take_mask(mask: Tensor | None, token: Tensor, length: int) -> Tensor:
    """mask (B, L) at token (B, H, ...), False in empty slots."""
    filled = token < length
    if mask is None:
        return filled
    flat = token.clamp(max=length - 1).flatten(1)
    return mask.gather(1, flat).view_as(token) & filled
