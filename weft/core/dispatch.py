"""Which backend runs a mechanism: `backend="auto" | "torch" | "triton"`.

"torch" is the plain version. "triton" is the kernel, or a ValueError that says why it cannot run. "auto" takes the
kernel where it was tested and is faster, the plain version everywhere else.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

BACKENDS = ("auto", "torch", "triton")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGEST_HEAD = 128
NEVER = 1 << 62  # a least length no sequence reaches: a kernel for those who ask for it by name
TESTED = (9, 0)  # the compute capability the kernels were tested and tuned on

_INSTALLED = importlib.util.find_spec("triton") is not None
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's own switch: kernels run on the CPU, for tests


def check_backend(backend: str) -> str:
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    return backend


def use_triton(backend: str, name: str, q: Tensor, v: Tensor, *, cannot: str = "", least_length: int = 1) -> bool:
    """Whether the kernel runs this call. `cannot`: what it lacks for the options in use; `least_length`: from where on
    it is the faster one."""
    if backend == "torch" or not q.shape[0]:  # an empty batch has nothing to launch
        return False
    reason = cannot or _cannot(q, v)
    if backend == "triton":
        if reason:
            raise ValueError(f"{name} cannot use backend='triton': {reason}; use backend='auto' or 'torch'")
        return True
    return not reason and q.shape[2] >= least_length and q.is_cuda and _capability(q.device.index or 0) == TESTED


def _cannot(q: Tensor, v: Tensor) -> str:
    """Why no kernel can run on these tensors; "" if one can."""
    if not _INSTALLED:
        return "Triton is not installed"
    if not q.is_cuda and not _INTERPRETED:
        return f"the kernels run on CUDA, and q is on {q.device.type}"
    if q.dtype not in DTYPES:
        return f"the kernels take float32, float16 or bfloat16, not {q.dtype}"
    if q.shape[3] > LARGEST_HEAD:
        return f"the kernels take heads up to {LARGEST_HEAD} wide, not {q.shape[3]}"
    if v.shape != q.shape:
        return f"the kernels take q and v of one shape, not {tuple(q.shape)} and {tuple(v.shape)}"
    return ""


def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


# What torch.compiler.assume_constant_result does, without importing the compiler, which takes seconds.
_capability._dynamo_marked_constant = True  # type: ignore[attr-defined]


@contextlib.contextmanager
def plain(attn: Any) -> Iterator[None]:
    """Within this block `attn` runs its plain version, whether it has another or not."""
    before = getattr(attn, "backend", None)
    if before is None:
        yield
        return
    attn.backend = "torch"
    try:
        yield
    finally:
        attn.backend = before
