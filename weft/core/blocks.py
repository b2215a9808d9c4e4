"""Split sequences of any length into blocks. Padding is added and masked internally."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(x: float, *, least: int = 1) -> int:
    """Return the power of two nearest to x (in ratio), but at least `least`."""
    p = 1
    while p * 2**0.5 < x:
        p *= 2
    return max(p, least)


def pad_length(x: Tensor, length: int) -> Tensor:
    """Pad (B, H, L, D) on the right with zeros to `length` tokens."""
    return F.pad(x, (0, 0, 0, length - x.shape[2])) if length > x.shape[2] else x


def to_blocks(x: Tensor, size: int) -> Tensor:
    """(B, H, L, D) -> (B, H, n, size, D), padded on the right with zeros."""
    n = ceil_div(x.shape[2], size)
    # Not Tensor.unflatten (here and in other files): torch 2.11 cannot compile the method if a default device is set.
    return torch.unflatten(pad_length(x, n * size), 2, (n, size))


def from_blocks(x: Tensor, length: int) -> Tensor:
    """(B, H, n, size, D) -> (B, H, length, D)."""
    return x.flatten(2, 3)[:, :, :length]


def valid_keys(mask: Tensor | None, length: int, padded: int, device: torch.device) -> Tensor | None:
    """Boolean (B or 1, padded), True for real tokens; None if all are real."""
    if mask is None:
        return None if padded == length else (torch.arange(padded, device=device) < length)[None]
    return F.pad(mask, (0, padded - length))  # pads with False


def both(*conditions: Tensor | None) -> Tensor | None:
    """Boolean AND of the conditions that are not None."""
    result = None
    for c in conditions:
        if c is not None:
            result = c if result is None else result & c
    return result


def check_boolean(mask: Any) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask must be boolean, True for real tokens, got {kind}; use mask.bool()")


def check_mask(mask: Any, shape: tuple[int, ...]) -> None:
    check_boolean(mask)
    if mask.shape != shape:
        raise ValueError(
            f"mask must be (B, Lk) = {tuple(shape)}, got {tuple(mask.shape)}; for a causal mask, use causal=True"
        )
