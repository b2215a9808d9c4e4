"""How a kernel cuts its work into tiles, and tensors in the memory layout that kernels read. No Triton here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tiles:
    """How a kernel cuts its work."""

    queries: int  # per tile
    keys: int  # own keys or summaries, per tile
    warps: int
    stages: int  # loads in flight
    registers: int | None = None  # at most, per thread; None leaves it to the compiler

    def launch(self) -> dict[str, int | None]:
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


def strides(x: Tensor) -> tuple[int, int, int]:
    return x.stride(0), x.stride(1), x.stride(2)


def rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def empty_rows(x: Tensor) -> Tensor:
    """Memory for a tensor like x whose rows lie as the kernels write them."""
    return torch.empty_like(x) if x.stride(-1) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)


def for_operator(mask: Tensor | None) -> Tensor | None:
    """A mask to pass to an operator: a private copy when compiling, which works around an Inductor stride bug in torch
    2.11. Where others read the mask too, Inductor lays out rows over 1,024 for the operator and lets the others read
    them with the stride it would have padded them to."""
    return mask.to(torch.uint8) if mask is not None and torch.compiler.is_compiling() else mask


def as_flags(mask: Tensor) -> Tensor:
    """A byte per token, side by side."""
    return mask.contiguous().view(torch.uint8)


def precision(x: Tensor) -> str:
    """Float32 products as three tf32 ones, near float32's own accuracy; half precision has one way only."""
    return "tf32x3" if x.dtype == torch.float32 else "tf32"


def block_width(D: int) -> int:
    return max(16, next_power_of_two(D))


def next_power_of_two(x: int) -> int:
    return 1 << max(0, x - 1).bit_length()
