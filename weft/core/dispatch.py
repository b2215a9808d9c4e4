"""Backend selection: `backend="auto" | "torch" | "triton"`.

"torch" runs the plain version, `attend`. "triton" runs the fused kernel, or raises a ValueError with the reason.
"auto" runs the kernel where it has been tested and is faster, and the plain version otherwise. Decoding always runs
the plain version.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BACKENDS = ("auto", "torch", "triton")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGEST_HEAD = 128
TESTED = (9, 0)  # compute capability on which the kernels were tested and tuned

_INSTALLED = importlib.util.find_spec("triton") is not None
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's own switch: kernels run on the CPU, for tests


@dataclass(frozen=True)
class Kernel:
    """The fused version of a mechanism. Its outputs and gradients must equal those of `attend`."""

    run: Callable[..., Tensor]  # run(attn, q, k, v, mask, bias)
    lacks: Callable[..., str] = lambda attn, *qkv: ""  # lacks(attn) or lacks(attn, q, k, v): a reason, or ""
    least_length: int = 256  # "auto" uses the kernel from this length on; the shortest measured: docs/kernels.md
    bias: Callable[[Any], bool] = lambda bias: False  # whether it supports this position bias
    dropout: bool = False  # whether it supports dropout
    applies: Callable[[Any], bool] = lambda attn: True  # False: no fused version for these options, use `attend`


def check_backend(backend: str) -> str:
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    return backend


def refuse_triton(name: str, reason: str) -> ValueError:
    return ValueError(f"{name} cannot use backend='triton': {reason}; use backend='auto' or 'torch'")


def use_kernel(attn: Any, q: Tensor, k: Tensor, v: Tensor, bias: Any) -> bool:
    """Return whether the mechanism's kernel runs this call."""
    kernel: Kernel | None = attn.fused
    if kernel is None or attn.backend == "torch" or not kernel.applies(attn):
        return False
    if not q.shape[0]:  # an empty batch has nothing to launch
        return False
    if attn.backend == "auto" and not (q.is_cuda and q.shape[2] >= kernel.least_length):
        return False
    reason = kernel.lacks(attn, q, k, v) or _cannot(q, v)
    if bias is not None and not kernel.bias(bias):
        reason = f"the kernel does not support a position bias of type {type(bias).__name__}"
    if attn.dropout and attn.training and not kernel.dropout:
        reason = "the kernel does not support dropout"
    if attn.backend == "triton" and reason:
        raise refuse_triton(attn.name, reason)
    return not reason and (attn.backend == "triton" or _capability(q.device.index or 0) == TESTED)


def _cannot(q: Tensor, v: Tensor) -> str:
    """Return why no kernel can run on these tensors, or "" if one can."""
    if not _INSTALLED:
        return "Triton is not installed"
    if not q.is_cuda and not _INTERPRETED:
        return f"the kernels run on CUDA, but q is on {q.device.type}"
    if q.dtype not in DTYPES:
        return f"the kernels support float32, float16 and bfloat16, got {q.dtype}"
    if q.shape[3] > LARGEST_HEAD:
        return f"the kernels support head_dim up to {LARGEST_HEAD}, got {q.shape[3]}"
    if v.shape != q.shape:
        return f"the kernels need q and v of the same shape, got {tuple(q.shape)} and {tuple(v.shape)}"
    return ""


def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


# Same as torch.compiler.assume_constant_result, without importing the compiler, which takes seconds.
_capability._dynamo_marked_constant = True  # type: ignore[attr-defined]


@contextlib.contextmanager
def plain(attn: Any) -> Iterator[None]:
    """Within this block, `attn` runs its plain version."""
    before, attn.backend = attn.backend, "torch"
    try:
        yield
    finally:
        attn.backend = before
