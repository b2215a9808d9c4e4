"""What every launch of a kernel needs: how the work is cut, and tensors as the kernels read them. No Triton here."""

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


def autocasts(x: Tensor) -> bool:
    # Not torch.amp.is_autocast_available, which the compiler of torch 2.11 cannot trace.
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def autocast(*tensors: Tensor) -> list[Tensor]:
    """What a product would be given here: the dtype of the autocast region, if this is one. It leaves float64 alone."""
    if not autocasts(tensors[0]):
        return list(tensors)
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors]


def for_operator(mask: Tensor | None) -> Tensor | None:
    """A mask to hand to an operator. Compiled it is a tensor that nothing else reads: of one that others read too,
    Inductor of torch 2.11 lays out rows over 1,024 as the operator wants them and lets the others read them with the
    stride it would have padded them to."""
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


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
