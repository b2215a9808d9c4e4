"""What the CPU makes and a GPU needs: copied without waiting.

A copy from ordinary memory stops the CPU until the GPU has come to it, and a CUDA graph refuses it. One from
page-locked memory does neither.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Tensor])

# What a CUDA graph copies at every replay must outlive it.
_captured: list[Tensor] = []


def operator(name: str, schema: str, fake: Callable[..., Tensor]) -> Callable[[Function], Function]:
    """Makes a function of a tensor, and of arguments by position, one that a compiled graph can call without looking
    into it. Outside of a graph it is called as it is: calling an operator can take longer than what it does."""

    def decorate(function: Function) -> Function:
        traceable = torch.library.custom_op(name, function, mutates_args=(), schema=schema)
        traceable.register_fake(fake)

        @wraps(function)
        def call(x: Tensor, *arguments: Any) -> Tensor:
            traced = torch.compiler.is_compiling() or type(x) is not Tensor
            return (traceable if traced else function)(x, *arguments)

        return call  # type: ignore[return-value]

    return decorate


def send(x: Tensor, device: torch.device) -> Tensor:
    """x on the device; x itself where it is there already."""
    return x if x.device == device else _copy(x, device)


@operator(
    "weft::send",
    "(Tensor x, Device device) -> Tensor",
    lambda x, device: torch.empty_like(x, device=device),
)
def _copy(x: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda" or x.is_cuda:
        return x.to(device, copy=True)
    if not x.is_pinned():
        x = x.pin_memory()
    if torch.cuda.is_current_stream_capturing():
        _captured.append(x)
    return x.to(device, non_blocking=True)
