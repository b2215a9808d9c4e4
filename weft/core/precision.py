"""Sums over a whole sequence in at least single precision, also where autocast would take them in half.

A sum of thousands of terms, rounded to the eight bits of bfloat16, no longer tells one sequence from another: what
differs between them is a small part of it.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from .launch import autocasts


def precise(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager:
    return torch.autocast(x.device.type, enabled=False) if autocasts(x) else contextlib.nullcontext()
