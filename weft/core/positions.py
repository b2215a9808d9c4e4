"""Position biases, rotary embeddings and sinusoids.

A position bias is a callable on two integer tensors that broadcast against each other. Their first two dimensions are
batch and head, of size 1 if nothing differs. It returns one value per head:

    bias(query_positions, key_positions) -> (B or 1, H, ...)

Mechanisms that sort, gather or sample keys pass the original positions, so the bias stays exact. A bias that returns
one value for all heads sets `shared_heads = True`. If a bias has the attributes `heads` or `max_length`, they are
checked against the mechanism and the sequence length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .contract import exporting
from .staging import operator


class ALiBi(nn.Module):
    """Press et al., Train Short, Test Long, https://arxiv.org/abs/2108.12409

    bias_ij = -slope_h |i - j|, slope_h = 2^(-8 (h + 1) / H); for H not a power of two the authors' interleaving.
    """

    def __init__(self, heads: int):
        super().__init__()
        _at_least_one(heads=heads)
        self.heads = heads

    def forward(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        distance = (query_positions - key_positions).abs()
        # Not a buffer: casting the model to half precision would round the slopes.
        slopes = alibi_slopes(self.heads, distance.device).view(1, -1, *[1] * (distance.dim() - 2))
        return -slopes * distance


def alibi_slopes(heads: int, device: torch.device | None = None) -> Tensor:
    power = 2 ** math.floor(math.log2(heads))
    h = torch.arange(heads, device=device, dtype=torch.float64)
    return torch.where(h < power, torch.exp2(-8 * (h + 1) / power), torch.exp2(-4 * (2 * (h - power) + 1) / power))


class RelativeBias(nn.Module):
    """A learned value per head for every distance i - j, clipped at ±`max_distance` (Shaw et al., 1803.02155)."""

    def __init__(self, heads: int, max_distance: int):
        super().__init__()
        _at_least_one(heads=heads)
        if max_distance < 0:
            raise ValueError(f"max_distance must be at least 0, got {max_distance}")
        self.heads, self.max_distance = heads, max_distance
        self.table = nn.Parameter(torch.empty(heads, 2 * max_distance + 1))
        nn.init.trunc_normal_(self.table, std=0.02)

    def forward(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        offset = (query_positions - key_positions).clamp(-self.max_distance, self.max_distance) + self.max_distance
        return _per_head(self.table, offset)


class RelativeBias2d(nn.Module):
    """A learned value per head for every offset on an image of `height` x `width` cells in row-major order.

    The first `prefix` tokens (for example a CLS token) are not part of the image. All pairs with such a token share one
    value. With `channels` c, each cell is c consecutive tokens, such as the colours of a pixel, and every pair of
    channels has its own values. Sequences longer than `max_length` = prefix + height · width · channels raise an error.
    """

    def __init__(self, heads: int, height: int, width: int, prefix: int = 0, channels: int = 1):
        super().__init__()
        _at_least_one(heads=heads, height=height, width=width, channels=channels)
        if prefix < 0:
            raise ValueError(f"prefix must be at least 0, got {prefix}")
        self.heads, self.height, self.width, self.prefix = heads, height, width, prefix
        self.channels = channels
        self.max_length = prefix + height * width * channels
        offsets = (2 * height - 1) * (2 * width - 1) * channels**2
        self.table = nn.Parameter(torch.empty(heads, offsets + bool(prefix)))
        nn.init.trunc_normal_(self.table, std=0.02)

    def forward(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        last, c = self.height * self.width * self.channels - 1, self.channels
        i, j = ((p - self.prefix).clamp(0, last) for p in (query_positions, key_positions))
        pair = i % c * c + j % c
        i, j = i // c, j // c
        dy = i // self.width - j // self.width + self.height - 1
        dx = i % self.width - j % self.width + self.width - 1
        offset = (dy * (2 * self.width - 1) + dx) * c * c + pair
        if self.prefix:
            outside = (query_positions < self.prefix) | (key_positions < self.prefix)
            offset = offset.masked_fill(outside, self.table.shape[1] - 1)
        return _per_head(self.table, offset)


def _at_least_one(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")


def _per_head(table: Tensor, index: Tensor) -> Tensor:
    """table (H, n) read at index (B or 1, H or 1, ...) -> (B or 1, H, ...)."""
    head = torch.arange(table.shape[0], device=table.device).view(1, -1, *[1] * (index.dim() - 2))
    return table[head, index]


class Rotary(nn.Module):
    """Su et al., RoFormer, https://arxiv.org/abs/2104.09864: rotate (x_c, x_{c + D/2}) by position · base^(-2c/D)."""

    def __init__(self, head_dim: int, base: float = 10000.0):
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"rotary embeddings rotate pairs of channels: head_dim must be even, got {head_dim}")
        self.head_dim, self.base = head_dim, base

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (B, H, L, D) at integer positions (L,) or (B, L)."""
        return rotated(x.transpose(1, 2), self.table(positions, x.dtype)).transpose(1, 2)

    def table(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """For `rotated`: cosines and sines (2, L, 1, D / 2), or (2, B, L, 1, D / 2)."""
        # An exported program must not need an operator of ours.
        make = rotary_table.__wrapped__ if exporting() else rotary_table  # type: ignore[attr-defined]
        return make(positions, self.head_dim, self.base, dtype).unsqueeze(-2)


# An operator, because Inductor would compute the cosines again for every head, in float64.
@operator(
    "weft::rotary_table",
    "(Tensor positions, int head_dim, float base, ScalarType dtype) -> Tensor",
    lambda positions, head_dim, base, dtype: positions.new_empty(2, *positions.shape, head_dim // 2, dtype=dtype),
)
def rotary_table(positions: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> Tensor:
    # Not a buffer: half precision would round the frequencies, and to_empty() would not initialise them.
    channels = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device)
    angle = positions.double()[..., None] * base ** (-channels / head_dim)
    return torch.stack([angle.cos(), angle.sin()]).to(dtype)


def rotated(x: Tensor, table: Tensor) -> Tensor:
    """x (B, L, H, D) with the `table` of a `Rotary`."""
    (cos, sin), (a, b) = table, x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Constant(nn.Module):
    """A tensor that moves with the model but is not saved. It is recomputed after each move, so it is correct in models
    created on the meta device, after `to_empty`."""

    values: Tensor

    def __init__(self, make: Callable[[], Tensor], device: Any = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.make = make
        self.register_buffer("values", self._made(device, dtype), persistent=False)

    def forward(self, device: torch.device) -> Tensor:
        if self.values.is_meta and device.type != "meta":  # load_state_dict(assign=True) leaves it on meta
            self.values = self._made(device, self.values.dtype)
        return self.values

    def _made(self, device: Any, dtype: torch.dtype | None) -> Tensor:
        with torch.device("cpu"):
            values = self.make()
        return values.to(device=torch.get_default_device() if device is None else device, dtype=dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> Constant:
        super()._apply(fn, recurse)
        if not self.values.is_meta:
            self.values = self._made(self.values.device, self.values.dtype)
        return self


def sinusoids(length: int, dim: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """PE[p, 2c] = sin(p · 10000^(-2c/dim)), PE[p, 2c + 1] = cos(same), as (length, dim)."""
    p = torch.arange(length, device=device, dtype=torch.float64)[:, None]
    frequency = 10000.0 ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float64) / dim)
    table = torch.stack([(p * frequency).sin(), (p * frequency).cos()], -1).flatten(1)[:, :dim]
    return table.to(dtype or torch.get_default_dtype())
