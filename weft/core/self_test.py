"""Compare a kernel with the plain version on a GPU where it was never tested, before `backend="auto"` uses it.

Each mechanism is compared once per process, dtype and head size: output and gradients of a small random call, with and
without padding, and a few steps of decoding. If they differ, or the kernel does not compile, "auto" uses the plain
version and logs why. Set WEFT_SELF_TEST=0 to skip the comparison and use the kernels.
"""

from __future__ import annotations

import copy
import logging
import os
from typing import Any

import torch
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
    if key not in _results:
        reason = _compare(name, head_dim, causal, max_length, dict(options), dtype, device)
        if reason:
            _log.warning("%s uses its plain PyTorch version on this GPU: %s", name, reason)
        _results[key] = not reason
    return _results[key]


def _compare(
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
    devices = [] if device == "cpu" else [device]
    try:
        with torch.random.fork_rng(devices), torch.enable_grad(), torch.autocast("cuda", enabled=False):
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
    return out, *torch.autograd.grad(out, qkv, dout)


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
