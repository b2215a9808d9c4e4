"""Putting tokens that share a group (a hash bucket, a cluster) next to each other, at a bounded cost.

Each group's members, in order of position, fill runs of `size` slots; no run holds two groups. L tokens in G groups
need at most ceil(L / size) + G runs whatever the groups' sizes. That many there are, most of them half empty, where
shapes must not depend on the data: on a GPU, and when compiled. On a CPU there are as many as are used. Which run a
token falls into depends only on its group and on how many members came before it: in a causal mechanism nothing of
the future can move a token, which a plain sort by group cannot promise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .blocks import ceil_div


@dataclass
class Runs:
    token: Tensor  # (..., R, size): which token stands in each slot; L in an empty slot
    group: Tensor  # (..., R): the group of each run
    number: Tensor  # (..., R): which run of its group it is: 0, 1, 2, ...
    slot: Tensor  # (..., L): where each token went, into the flattened (R * size)

    @property
    def filled(self) -> Tensor:
        return self.token < self.slot.shape[-1]


def gather_runs(group: Tensor, groups: int, size: int) -> Runs:
    """Lay tokens out in runs; `group` is (..., L) with values in [0, groups)."""
    L = group.shape[-1]
    ordered, order = torch.sort(group, dim=-1, stable=True)
    counts = torch.zeros(*group.shape[:-1], groups, dtype=torch.long, device=group.device)
    counts = counts.scatter_add(-1, group, torch.ones_like(group))
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
    group_of_run = torch.searchsorted(runs.cumsum(-1), index, right=True)  # `groups` for runs left empty at the end
    number = index - first_run.gather(-1, group_of_run.clamp(max=groups - 1))
    return Runs(torch.unflatten(token, -1, (n_runs, size)), group_of_run, number, slot)


def room_for(counts: Tensor, most: int) -> int:
    """The largest of `counts`; `most` where shapes must not depend on the data."""
    if counts.device.type != "cpu" or torch.compiler.is_compiling():
        return most
    return int(counts.max()) if counts.numel() else 0


def take_tokens(x: Tensor, token: Tensor) -> Tensor:
    """x (B, H, L, D) at token (B, H, ...) -> (B, H, ..., D), zeros where token is L."""
    return take_rows(F.pad(x, (0, 0, 0, 1)), token)


def take_rows(x: Tensor, at: Tensor) -> Tensor:
    """x (B, H, L, D) at (B, H, ...) -> (B, H, ..., D): whole rows, several times as fast as a gather on a CPU."""
    B, H, L, D = x.shape
    first = L * torch.arange(B * H, device=at.device).view(B, H, 1)
    return x.reshape(-1, D).index_select(0, (at.flatten(2) + first).flatten()).view(*at.shape, D)


def take_mask(mask: Tensor | None, token: Tensor, length: int) -> Tensor:
    """Validity of each slot: mask (B, L) at token (B, H, ...), False in empty slots."""
    filled = token < length
    if mask is None:
        return filled
    flat = token.clamp(max=length - 1).flatten(1)
    return mask.gather(1, flat).view_as(token) & filled
