"""Sums over a whole sequence in at least single precision, also where autocast would take them in half.

A sum of thousands of terms, rounded to the eight bits of bfloat16, no longer tells one sequence from another: what
differs between them is a small part of it.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


def precise(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def as_autocast(*tensors: Tensor) -> list[Tensor]:
    """What a product would get in this region: in autocast's dtype, where it is on."""
    kind = tensors[0].device.type
    if not autocasts(kind):
        return list(tensors)
    return [x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(kind)) for x in tensors]


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager:
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if autocasts(kind) else contextlib.nullcontext()


def autocasts(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
