"""Tile sizes and memory layouts for the kernels. This file does not import Triton."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .blocks import ceil_div


@dataclass(frozen=True)
class Tiles:
    """Tile sizes and launch options of a kernel."""

    queries: int  # per tile
    keys: int  # own keys or summaries, per tile
    warps: int
    stages: int  # pipeline stages: loads in flight
    registers: int | None = None  # limit per thread; None: the compiler decides

    def launch(self) -> dict[str, int | None]:
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


FAR = 2**31
TileTable = dict[tuple[str, int, int], Tiles]  # by kernel, maximum head_dim, bytes per element


def tile_table(rows: Mapping[str, Sequence[tuple[int, ...]]]) -> TileTable:
    """A table with four entries per kernel: head_dim 64 and 128 with 2 bytes per element, then with 4 bytes."""
    keys = (64, 2), (128, 2), (64, 4), (128, 4)
    return {(kernel, *key): Tiles(*sizes) for kernel, row in rows.items() for key, sizes in zip(keys, row, strict=True)}


def tiles_for(table: TileTable, kernel: str, head_dim: int, size: int, most: int | None = None) -> Tiles:
    """Entry of a table. Heads wider than 128, where nothing was measured, get half the tile of 128 and one pipeline
    stage. Tiles are limited to the tokens of a block (`most`), and at least 16, the minimum of a matrix unit."""
    width = max(64, block_width(head_dim))
    t = table[kernel, min(width, 128), size]
    if width > 128:
        t = Tiles(max(16, t.queries // 2), max(16, t.keys // 2), 8, 1)
    if most is None:
        return t
    most = max(16, next_power_of_two(most))
    return replace(t, queries=min(t.queries, most), keys=min(t.keys, most))


@dataclass(frozen=True)
class Block:
    """Shapes and dtypes of tensors that share a block of memory: one allocation, and one tensor to save."""

    parts: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    def empty(self, x: Tensor) -> Tensor:
        """The block, in bytes, on the device of x."""
        return x.new_empty(sum(self._room()), dtype=torch.uint8)

    def split(self, block: Tensor) -> list[Tensor]:
        found, at = [], 0
        for (shape, dtype), room in zip(self.parts, self._room(), strict=True):
            found.append(block[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape))
            at += room
        return found

    def _room(self) -> list[int]:
        # 16 bytes: the alignment that kernels are compiled for. Larger gaps would leave more bytes that nothing writes.
        return [ceil_div(math.prod(shape) * dtype.itemsize, 16) * 16 for shape, dtype in self.parts]


def strides(x: Tensor) -> tuple[int, int, int]:
    return x.stride(0), x.stride(1), x.stride(2)


def rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def far(x: Tensor) -> bool:
    """Whether the rows of x (B, H, L, D) span more elements than 32 bits count, such as those of a joint projection of
    q, k and v of a million tokens. Most kernels index the rows of a head with 32 bits."""
    return x.shape[2] * x.stride(2) >= FAR


def near_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 and not far(x) else x.contiguous()


def empty_rows(x: Tensor) -> Tensor:
    """An empty tensor like x with contiguous rows, as the kernels write them."""
    return torch.empty_like(x) if x.stride(-1) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)


def for_operator(mask: Tensor | None) -> Tensor | None:
    """A mask to pass to an operator. When compiling, this is a private copy; it works around an Inductor stride bug in
    torch 2.11: if others also read the mask, Inductor lays out rows over 1,024 for the operator, but the others read
    them with the padded stride."""
    return mask.to(torch.uint8) if mask is not None and torch.compiler.is_compiling() else mask


def as_flags(mask: Tensor) -> Tensor:
    """One byte per token, contiguous."""
    return mask.contiguous().view(torch.uint8)


def flags_or(mask: Tensor | None, stand_in: Tensor) -> Tensor:
    """The mask for a kernel; without one, a tensor that the kernel does not read."""
    return stand_in if mask is None else as_flags(mask)


def precision(x: Tensor) -> str:
    """Compute float32 products as three tf32 products, close to float32 accuracy. No effect in half precision."""
    return "tf32x3" if x.dtype == torch.float32 else "tf32"


def block_width(D: int) -> int:
    return max(16, next_power_of_two(D))


def next_power_of_two(x: int) -> int:
    return 1 << max(0, x - 1).bit_length()
