"""Dtypes under autocast, and sums over a whole sequence in at least single precision.

A sum of thousands of terms, rounded to the eight bits of bfloat16, no longer tells one sequence from another: what
differs between them is a small part of it.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


def autocasts(x: Tensor) -> bool:
    """Whether x is in an autocast region of its device."""
    # Not torch.amp.is_autocast_available, which the compiler of torch 2.11 cannot trace.
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def autocast(*tensors: Tensor) -> list[Tensor]:
    """The tensors in autocast's dtype, as a matrix product would get them; float64 and integers are left alone."""
    if not autocasts(tensors[0]):
        return list(tensors)
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors]


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager:
    return torch.autocast(x.device.type, enabled=False) if autocasts(x) else contextlib.nullcontext()


def precise(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
