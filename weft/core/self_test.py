"""Compare a kernel with the plain version where it was never tested, before `backend="auto"` uses it.

Each mechanism is compared once per process, dtype and head size: output and gradients of a small random call, with and
without padding, and a few steps of decoding. If they differ, or the kernel does not compile, "auto" uses the plain
version and logs why. Set WEFT_SELF_TEST=0 to skip the comparison and use the kernels.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Largest ‖kernel - plain‖ / ‖plain‖. Rounding explains a third of it at most; a wrong index gives far more.
TOLERANCE = {torch.float32: 5e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
HEADS, LENGTH = 2, 300  # of the call; more tokens if "auto" starts at more

_log = logging.getLogger("weft")
_results: dict[tuple[Any, ...], bool] = {}


def passes(
    name: str,
    head_dim: int,
    causal: bool,
    max_length: int | None,
    options: tuple[tuple[str, Any], ...],
    dtype: torch.dtype,
    device: int | str,
) -> bool:
    if os.environ.get("WEFT_SELF_TEST") == "0":
        return True
    key = name, head_dim, causal, repr(options), dtype, device
    what = f"{name} uses its plain PyTorch version on this GPU:"
    return _agrees(key, what, device, compare, name, head_dim, causal, max_length, dict(options), dtype, device)


def variable_lengths_pass(device: torch.device) -> bool:
    """Whether PyTorch's flash attention for variable lengths, an undocumented operator, may be used."""
    if os.environ.get("WEFT_SELF_TEST") == "0":
        return True
    what = "packed documents are gathered, because PyTorch's attention for variable lengths"
    return _agrees(("variable lengths", device), what, device, _compare_documents, device)


def _agrees(key: tuple[Any, ...], what: str, device: Any, comparison: Callable[..., str], *arguments: Any) -> bool:
    """Whether this comparison finds no difference. It cannot run while a CUDA graph is captured."""
    if key not in _results:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return False

        def there() -> str:
            with torch.cuda.device(-1 if str(device) == "cpu" else device):
                return comparison(*arguments)

        with ThreadPoolExecutor(1) as thread:  # where inference mode, autocast, tracing and vmap of the caller are off
            reason = thread.submit(there).result()
        if reason:
            _log.warning("%s %s", what, reason)
        _results[key] = not reason
    return _results[key]


def _compare_documents(device: torch.device) -> str:
    from .segments import Segments
    from .softmax import fused_packed

    documents = Segments.from_lengths([100, 37, 9], device=device, fillers=1)
    keys = [slice(0, 100), slice(100, 137), slice(137, 146)]
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            q, k, v, dout = torch.randn(4, 1, 146, HEADS, 64, device=device).bfloat16().transpose(2, 3)
            for queries, of in ((q, keys), (q[:, :, :2], [slice(0, 1), slice(1, 2)])):  # all, and one of each document
                inputs = [x.detach().requires_grad_() for x in (queries, k, v)]
                found = fused_packed(inputs[0], inputs[1], inputs[2], documents, causal=False, dropout=0.0)
                exact = [x.detach().float().requires_grad_() for x in inputs]
                parts = [
                    F.scaled_dot_product_attention(exact[0][:, :, i], exact[1][:, :, j], exact[2][:, :, j])
                    for i, j in zip(of, keys, strict=False)
                ]
                grad = dout[:, :, : queries.shape[2]]
                mine = [found, *torch.autograd.grad(found, inputs, grad)]
                theirs = [out := torch.cat(parts, 2), *torch.autograd.grad(out, exact, grad.float())]
                for a, b in zip(mine, theirs, strict=True):
                    error = ((a.float() - b).norm() / b.norm()).item()
                    if not error <= TOLERANCE[torch.bfloat16]:
                        return f"has an error of {error:.1e}"
    except Exception as error:  # use what is known to work
        return f"fails: {error}"
    return ""


def compare(
    name: str,
    head_dim: int,
    causal: bool,
    max_length: int | None,
    options: dict[str, Any],
    dtype: torch.dtype,
    device: Any,
) -> str:
    """Why the kernel must not be used, or ""."""
    from .registry import attention_info, make_attention

    kernel = attention_info(name).kernel
    assert kernel is not None
    length = max(LENGTH, kernel.least_length)
    if max_length is not None:
        length = min(length, max_length)
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            attn = make_attention(
                name, heads=HEADS, head_dim=head_dim, causal=causal, max_length=max_length, backend="triton", **options
            ).to(device)
            inputs = torch.randn(4, 2, length, HEADS, head_dim, device=device).transpose(2, 3)
            padded = torch.arange(length, device=device) < torch.tensor([[length], [length - 37]], device=device)
            for mask in (None, padded):
                plain = copy.deepcopy(attn)
                plain.backend = "torch"
                found = _run(attn, inputs.to(dtype), mask)
                wanted = _run(plain, inputs.to(dtype).float(), mask)
                if kernel.step is not None and causal and mask is None and length >= 66:
                    found += _steps(attn, inputs.to(dtype))
                    wanted += _steps(plain, inputs.to(dtype).float())
                for mine, truth in zip(found, wanted, strict=True):
                    error = ((mine.float() - truth).norm() / truth.norm().clamp(min=1e-6)).item()
                    if not error < TOLERANCE[dtype]:
                        return f"its kernel differs by {error:.1e} (relative), over {TOLERANCE[dtype]:.0e}"
    except Exception as error:
        return f"its kernel fails with {type(error).__name__}: {error}"
    return ""


def _run(attn: torch.nn.Module, inputs: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    """Output and gradients of one call. A mechanism that samples draws the same sample for the same seed."""
    torch.manual_seed(0)
    *qkv, dout = inputs.unbind()
    qkv = [x.detach().requires_grad_() for x in qkv]
    out = attn(*qkv, mask)
    gradients = torch.autograd.grad(out, qkv, dout, allow_unused=True)
    return out, *(x for x in gradients if x is not None)  # reformer does not read k


@torch.no_grad()
def _steps(attn: Any, inputs: Tensor) -> tuple[Tensor, ...]:
    """The outputs of a few steps of decoding, across the end of a default block."""
    try:
        state = attn.start(inputs.shape[1])
    except ValueError:  # its block size depends on the length
        return ()
    tokens = inputs[:3, :, :, :66].split([62, 1, 1, 1, 1], 3)
    _, state = attn.prefill(*tokens[0], state=state)
    outs = []
    for token in tokens[1:]:
        out, state = attn.step(*token, state)
        outs.append(out)
    return tuple(outs)
