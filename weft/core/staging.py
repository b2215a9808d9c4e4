"""Tensors made on the CPU for a GPU: `send` copies them without a wait, `operator` lets compiled graphs make them.

A copy from ordinary memory blocks the CPU until the GPU reaches it, and a CUDA graph refuses it. A copy from
page-locked memory does neither.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Tensor])
Any_function = TypeVar("Any_function", bound=Callable[..., Any])

# What a CUDA graph copies at every replay must outlive it.
_captured: list[Tensor] = []


def outside_graphs(reason: str) -> Callable[[Any_function], Any_function]:
    """Decorate a function that compiled models run outside their graphs: torch.compiler.disable, without importing the
    compiler, which takes seconds."""

    def decorate(function: Any_function) -> Any_function:
        disabled: list[Callable[..., Any]] = []

        def call(*args: Any, **kwargs: Any) -> Any:
            if "torch._dynamo" in sys.modules and not disabled:
                disabled.append(torch.compiler.disable(function))
            return (disabled[0] if disabled else function)(*args, **kwargs)

        call.__code__ = call.__code__.replace(co_name=function.__name__)  # recompilations are counted by code object
        call._torchdynamo_disable = True  # type: ignore[attr-defined]
        call._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return wraps(function)(call)  # type: ignore[return-value]

    return decorate


def eagerly() -> contextlib.AbstractContextManager[Any]:
    """Within this, compiled models run without their graphs, in which hooks that were added later do not run."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


def operator(
    name: str, schema: str, fake: Callable[..., Tensor], tags: tuple[torch.Tag, ...] = ()
) -> Callable[[Function], Function]:
    """Decorate a function of a tensor and positional arguments: compiled graphs and torch.func call it as an opaque
    operator, eager code calls it directly, because calling an operator can take longer than the function itself."""

    def decorate(function: Function) -> Function:
        traceable = torch.library.custom_op(name, function, mutates_args=(), schema=schema, tags=tags)
        traceable.register_fake(fake)

        @wraps(function)
        def call(x: Tensor, *arguments: Any) -> Tensor:
            traced = torch.compiler.is_compiling() or type(x) is not Tensor or transformed()
            return (traceable if traced else function)(x, *arguments)

        return call  # type: ignore[return-value]

    return decorate


def refuse_trace(what: str) -> RuntimeError:
    """For code under torch.jit.trace, which keeps numbers and Python's choices as they are for one input."""
    return RuntimeError(
        f"torch.jit.trace cannot record {what}; use torch.export, torch.onnx.export(dynamo=True) or torch.compile"
    )


def transformed() -> bool:
    """Whether torch.func transforms this code, whose tensors then have no memory that NumPy could read."""
    return torch._C._functorch.peek_interpreter_stack() is not None


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
