"""Softmax attention over the allowed keys, shared by most mechanisms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .precision import autocasts
from .segments import Segments
from .self_test import variable_lengths_pass


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    allowed: Tensor | None = None,
    bias: Tensor | None = None,
    dropout: float = 0.0,
    may_be_empty: bool = True,
    scale: float | None = None,
) -> Tensor:
    """softmax(scale q kᵀ + bias) v over the keys where `allowed` is True; zeros for a query without keys. The default
    scale is 1 / √D.

    q, k and v are (B, H, L, D), or (B, H, n, L, D) for n blocks. `allowed` (boolean) and `bias` broadcast against the
    logits. This calls PyTorch's fused attention. `may_be_empty=False` asserts that without a bias every query has a
    key, which skips the check.
    """
    if q.dim() == 5:  # the fused kernels need four dimensions: use the head dimension for blocks, without a copy
        B, H = q.shape[:2]
        out = softmax_attention(
            *(t.flatten(0, 1) for t in (q, k, v)),
            allowed=_merge(allowed, B, H),
            bias=_merge(bias, B, H),
            dropout=dropout,
            may_be_empty=may_be_empty,
            scale=scale,
        )
        return torch.unflatten(out, 0, (B, H))
    if allowed is None and bias is None:
        return fused(q, k, v, dropout_p=dropout, scale=scale)
    # A query without keys attends to all of them and is zeroed afterwards: no NaN forward, no gradient backward.
    alive = None
    if bias is None:
        assert allowed is not None
        mask = allowed
        if may_be_empty:
            alive = allowed.any(-1, keepdim=True)
            mask = allowed | ~alive
    else:
        mask = bias.to(q.dtype)
        if allowed is not None:
            mask = mask.masked_fill(~allowed, float("-inf"))
        alive = mask.detach().amax(-1, keepdim=True) != float("-inf")  # a bias of -inf also forbids a pair
        mask = mask.masked_fill(~alive, 0)
    out = fused(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
    return out if alive is None else out.masked_fill(~alive, 0)


def attend_one(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, bias: Tensor | None) -> Tensor:
    """`softmax_attention` of one query (B, H, 1, D), as matrix products. On a GPU, PyTorch's fused attention with a
    mask reads all keys of a head in one program; matrix products split them."""
    (B, H, _, D), half = q.shape, q.dtype in (torch.float16, torch.bfloat16)
    exact = {"out_dtype": torch.float32} if half and q.is_cuda else {}
    logits = D**-0.5 * torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT, **exact).view(B, H, 1, -1)  # type: ignore
    logits = (logits if bias is None else logits + bias).masked_fill(~allowed, float("-inf"))
    top = logits.amax(-1, keepdim=True)
    p = (logits - top.masked_fill(top == float("-inf"), 0)).exp()
    out = torch.bmm(p.flatten(0, 1).to(v.dtype), v.flatten(0, 1), **exact).view(B, H, 1, -1)  # type: ignore
    return (out / p.sum(-1, keepdim=True).clamp(min=1e-30)).to(q.dtype)


def fused(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """PyTorch's fused attention for any batch size and memory layout.

    On CUDA, torch 2.11 returns None for an empty batch in half precision and fails on unaligned rows. The backward of
    its cuDNN gives NaN for 128 n + 64 keys with a mask if the logits are below -89 (pytorch issue 196678).
    """
    if not q.shape[0]:
        return q @ k.mT @ v
    if q.is_cuda and not torch.compiler.is_compiling():
        q, k, v = aligned(q), aligned(k), aligned(v)
    masked = options.get("attn_mask") is not None
    # An exported graph must serve any length, so it must not depend on this one. Inside Dynamo, torch 2.11 always says
    # that it exports.
    exports = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
    # `torch.backends.cuda.cudnn_sdp_enabled` breaks graphs.
    if masked and not exports and k.shape[-2] % 128 == 64 and torch._C._get_cudnn_sdp_enabled():
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            return F.scaled_dot_product_attention(q, k, v, **options)
    return F.scaled_dot_product_attention(q, k, v, **options)


def fused_packed(
    q: Tensor, k: Tensor, v: Tensor, documents: Segments, *, causal: bool, dropout: float, scale: float | None = None
) -> Tensor:
    """Softmax attention of packed documents where they are, by PyTorch's flash attention for variable lengths. q, k and
    v are (B, H, L, D) of the same width; what it computes at padding has no meaning. q may also have one query for each
    document that is read, (1, H, documents, D), if there is no padding."""
    longest, most, edges = documents.longest, documents.longest, documents.edges
    own, read = edges, q.shape[2]
    if read != k.shape[2]:  # fillers get a query too: without one, their keys would have undefined gradients
        own, most = torch.arange(len(edges), dtype=torch.int32, device=q.device), 1
        q = F.pad(q, (0, 0, 0, len(edges) - 1 - read))
    rows = (aligned(x.transpose(1, 2).flatten(0, 1)) for x in (q, k, v))
    flash = torch.ops.aten._flash_attention_forward
    out = flash(*rows, own, edges, most, longest, dropout, causal, False, scale=scale)[0]
    return torch.unflatten(out, 0, (q.shape[0], q.shape[2])).transpose(1, 2)[:, :, :read]


def flash_runs(x: Tensor, width: int) -> bool:
    """Whether `fused_packed` supports heads of this width on the device of x, and in its dtype under autocast."""
    dtype = torch.get_autocast_dtype("cuda") if autocasts(x) else x.dtype
    return (
        x.is_cuda
        and torch.version.hip is None
        and dtype in (torch.bfloat16, torch.float16)
        and width % 8 == 0
        and width <= 256
        and torch.backends.cuda.flash_sdp_enabled()
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
        and variable_lengths_pass(x.device)
    )


@contextmanager
def without_cudnn(x: Tensor) -> Iterator[None]:
    """Within this block, fused attention does not use cuDNN, which prepares a plan for every new shape."""
    if not x.is_cuda or torch.compiler.is_compiling() or not torch.backends.cuda.cudnn_sdp_enabled():
        yield
        return
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def aligned(x: Tensor) -> Tensor:
    """Return x, or a copy if its rows are not contiguous or not aligned. Strides of size-1 dimensions count too."""
    odd = x.stride(-1) != 1 or x.storage_offset() % 8 or any(s % 8 for s in x.stride()[:-1])
    return x.clone(memory_format=torch.contiguous_format) if odd else x


def _merge(t: Tensor | None, B: int, H: int) -> Tensor | None:
    """(b, h, n, Lq, Lk), b, h, n of full size or 1 -> (B*H, n, Lq, Lk), or (1, n, Lq, Lk) if b = h = 1."""
    if t is None:
        return None
    if t.shape[0] == 1 and t.shape[1] == 1:
        return t[0]
    return t.expand(B, H, *t.shape[2:]).flatten(0, 1)
