"""Backend selection: `backend="auto" | "torch" | "triton"`.

"torch" runs the plain version, `attend`. "triton" runs the fused kernel, or raises a ValueError with the reason.
"auto" runs the kernel on NVIDIA GPUs of compute capability 8.0 or newer from the length on where it is faster, and the
plain version otherwise. On GPUs and with versions of Triton where the kernels were never tested, and for kernels that
have changed since, "auto" first compares a small call of the kernel with the plain version, once per process
(`self_test.py`). A decoding step runs its kernel with "triton", and with "auto" on such a GPU. If there is no step
kernel, or it does not support the call, both run the plain version.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch.autograd import forward_ad

from .staging import transformed
from .tiles import FAR, far, near_rows

Function = TypeVar("Function", bound=Callable[..., Any])

BACKENDS = ("auto", "torch", "triton")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGEST_HEAD = 256
OLDEST = (8, 0)  # compute capability from which on "auto" uses the kernels
TESTED = (9, 0), "3.6"  # compute capability and version of Triton with which the kernels were tested and tuned

_DERIVATIVES = TransformType.Grad, TransformType.Jvp
_log = logging.getLogger("weft")
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
    cross: bool = False  # whether it supports Lq != Lk
    far: bool = False  # whether it indexes rows that span over 2**31 elements (`tiles.far`); else it gets copies
    grouped: Callable[[Any], bool] = lambda attn: False  # whether it reads k and v with fewer heads than q in place
    applies: Callable[[Any], bool] = lambda attn: True  # False: no fused version for these options, use `attend`
    auto: Callable[[Any], bool] = lambda attn: True  # False: "auto" does not use it, because it was not tested on a GPU
    tested: bool = True  # False: it has changed since it was tested on a GPU, so "auto" compares it first on every GPU
    # packed(attn, q, k, v, mask, documents): packed documents in place. Without it, or if it returns None, they are
    # gathered into rows.
    packed: Callable[..., Tensor | None] | None = None
    # step(attn, inner) returns a function (q, k, v, mask, i) -> output: one token of decoding at position i, a number
    # or a tensor, with the buffers of the state updated in place. Without it, or if it is None, `attend_next` runs.
    step: Callable[..., Callable[..., Tensor] | None] | None = None

    def near(self, *qkv: Tensor) -> list[Tensor] | None:
        """Copies of q, k and v that the kernel can index, or None if it can index these."""
        return None if self.far or not any(map(far, qkv)) else [near_rows(x) for x in qkv]


def without_dropout(attn: Any) -> bool:
    """For `Kernel.auto`: the kernel's dropout was tested in Triton's interpreter, but not yet on a GPU."""
    return not attn.dropout_now


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
    if attn.backend == "auto" and (
        (not q.is_cuda and q.device.type in ("cpu", "meta"))
        or k.shape[2] < kernel.least_length
        or not kernel.auto(attn)
    ):
        return False
    reason = kernel.lacks(attn, q, k, v) or _cannot(q, v, kernel.cross)
    if bias is not None and not kernel.bias(bias):
        reason = f"the kernel does not support a position bias of type {type(bias).__name__}"
    if attn.dropout_now and not kernel.dropout:
        reason = "the kernel does not support dropout"
    if attn.backend == "triton" and reason:
        raise refuse_triton(attn.name, reason)
    if reason or attn.backend == "triton":
        return not reason
    return _trusted(attn, q)


def step_kernel(attn: Any, q: Tensor, v: Tensor, inner: Any) -> Callable[..., Tensor] | None:
    """The kernel of a step that updates these buffers, or None if `attend_next` must run."""
    kernel: Kernel | None = attn.fused
    if kernel is None or kernel.step is None or attn.backend == "torch":
        return None
    if not q.shape[0] or (attn.backend == "auto" and q.device.type in ("cpu", "meta")):
        return None
    if not kernel.applies(attn) or kernel.lacks(attn) or _cannot(q, v):
        return None
    if attn.backend == "auto" and not (kernel.auto(attn) and _trusted(attn, q)):
        return None
    return kernel.step(attn, inner)


def _trusted(attn: Any, q: Tensor) -> bool:
    """Whether "auto" may use the kernels on this GPU."""
    index = max(0, q.get_device())
    if attn.fused.tested and _is_tested(index):
        return True
    options = tuple((attn.options or {}).items())
    return _passes(index, attn.name, q.shape[3], attn.causal, attn.max_length, options, q.dtype)


def _cannot(q: Tensor, v: Tensor, cross: bool = False) -> str:
    """Return why no kernel can run on these tensors, or "" if one can."""
    if not _INSTALLED:
        return "Triton is not installed"
    if derived():
        return "the kernels do not support derivatives by torch.func or in forward mode"
    if not q.is_cuda and not _INTERPRETED:
        return _not_nvidia(q.device.type)
    if torch.version.hip is not None:
        return _not_nvidia("hip")
    if q.dtype not in DTYPES:
        return f"the kernels support float32, float16 and bfloat16, got {q.dtype}"
    if q.shape[2] * q.shape[3] >= FAR:
        return f"the kernels support up to {(FAR - 1) // q.shape[3]} tokens, got {q.shape[2]}"
    if q.shape[3] > LARGEST_HEAD:
        return f"the kernels support head_dim up to {LARGEST_HEAD}, got {q.shape[3]}"
    if v.shape != q.shape and (v.shape[0], *v.shape[2 + cross :]) != (q.shape[0], *q.shape[2 + cross :]):
        return f"the kernels need q and v of the same shape, got {tuple(q.shape)} and {tuple(v.shape)}"
    return ""


def constant(function: Function) -> Function:
    """Same as torch.compiler.assume_constant_result, without importing the compiler, which takes seconds."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant
def derived() -> bool:
    """Whether torch.func or forward mode computes derivatives of this code. The kernels only have those of autograd."""
    if forward_ad._current_level >= 0:
        return True
    return transformed() and any(x.key() in _DERIVATIVES for x in torch._C._functorch.get_interpreter_stack() or ())


_gpus: dict[int, tuple[tuple[int, int], str]] = {}
_noted: set[str] = set()


@constant
def _is_tested(index: int) -> bool:
    return _gpu(index) == TESTED


def _gpu(index: int) -> tuple[tuple[int, int], str]:
    """Its compute capability, and the version of Triton without the patch level."""
    if index not in _gpus:
        import triton

        version = ".".join(triton.__version__.split(".")[:2])
        _gpus[index] = torch.cuda.get_device_capability(index), version
    return _gpus[index]


@constant
def _not_nvidia(device: str) -> str:
    if device != "cpu" and device not in _noted:
        _noted.add(device)
        _log.warning("weft's kernels need an NVIDIA GPU; on %s the plain PyTorch versions run instead", device)
    return f"the kernels run on NVIDIA GPUs (CUDA), but q is on {device}"


@constant
def _passes(
    index: int,
    name: str,
    head_dim: int,
    causal: bool,
    max_length: int | None,
    options: tuple[Any, ...],
    dtype: torch.dtype,
) -> bool:
    """Whether "auto" may use a kernel on a GPU or with a Triton where it was never tested."""
    from .self_test import passes

    if _gpu(index)[0] < OLDEST:
        return False
    return passes(name, head_dim, causal, max_length, options, dtype, index)
