"""Dtypes under autocast, and float32 for sums over a whole sequence.

Sequences differ only in a small part of a sum of thousands of terms; rounding it to the 8 bits of bfloat16 loses that
difference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def autocasts(x: Tensor) -> bool:
    """Return whether autocast is enabled for the device of x."""
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
        return False
    # Not torch.amp.is_autocast_available, which the compiler of torch 2.11 cannot trace.
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def autocast(*tensors: Tensor) -> list[Tensor]:
    """Cast tensors to the autocast dtype, as for a matrix product. float64 and integers are unchanged."""
    if not autocasts(tensors[0]):
        return list(tensors)
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors]


def dtype_after(x: Tensor) -> torch.dtype:
    """The dtype of x after `autocast`."""
    if x.dtype == torch.float64 or not autocasts(x):
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)


def settled(x: Tensor) -> bool:
    """Return whether autocast would leave x as it is."""
    if not torch._C._is_any_autocast_enabled():
        return True
    return not autocasts(x) or x.dtype in (torch.float64, torch.get_autocast_dtype(x.device.type))


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    if not autocasts(x):
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False) if torch.compiler.is_compiling() else _Off(x.device.type)


class _Off(contextlib.AbstractContextManager[None]):
    """`torch.autocast(device, enabled=False)` inside autocast, in a hundredth of its time."""

    def __init__(self, device: str):
        self.device = device

    def __enter__(self) -> None:
        torch.set_autocast_enabled(self.device, False)

    def __exit__(self, *error: Any) -> None:
        torch.set_autocast_enabled(self.device, True)


def precise(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def gathered(x: Tensor, pick: Callable[[Tensor], Tensor]) -> Tensor:
    """pick(x), with gradients summed in float32. In half precision, a token that is picked by hundreds of rows would
    lose most of its gradient."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return pick(x)
    return pick(x.float()).to(x.dtype)
