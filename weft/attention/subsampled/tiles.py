"""Causal attention over sampled windows on the CPU, without most of the pairs that causality forbids.

A window's P targets and its P sources make P² pairs, of which about a third are illegal. Sources have no order of
their own: sorted by position, a tile of targets needs only those before its end,

    tile [a, b) of a window attends to  sorted(S)[: n],   n = #{s ∈ S : s < b}

so most of the illegal pairs are never computed. The first window always draws itself and is plain causal attention.
PyTorch's fused CPU kernel does each tile. It is called below autograd, because slicing and joining tiles under autograd
costs more than they save.
Equal to `sampled_attention(..., causal=True)`, which defines it. Every target must have a legal source.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...core.blocks import ceil_div

TILE = 256  # targets per tile: smaller wastes fewer pairs, larger runs each pair faster
ALIGN = 16  # sources per tile are rounded up to whole vectors

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def causal_tiles(q: Tensor, k: Tensor, v: Tensor, sources: Tensor) -> Tensor:
    """q, k, v (B, H, L, D) on the CPU; `sources` (W, L / W) as `sampled_attention` takes them."""
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))  # the kernel reads rows
    return _CausalTiles.apply(q, k, v, sources.sort(-1).values)


def _tiles(chosen: Tensor, first: int, dtype: torch.dtype) -> Iterator[tuple[slice, int, Tensor]]:
    """The tiles of the window that starts at `first`: targets, number of sources, and -inf where these lie after them.

    The last tile comes first: it alone has all of the window's sources.
    """
    P = len(chosen)
    for start in reversed(range(first, first + P, TILE)):
        end = min(start + TILE, first + P)
        legal_for_all, n = torch.searchsorted(chosen, torch.tensor([start + 1, end])).tolist()
        n = min(ceil_div(n, ALIGN) * ALIGN, P)
        mask = torch.zeros(1, 1, end - start, n, dtype=dtype)
        future = chosen[legal_for_all:n] > torch.arange(start, end)[:, None]
        mask[..., legal_for_all:].masked_fill_(future, float("-inf"))
        yield slice(start, end), n, mask


class _CausalTiles(torch.autograd.Function):
    """One window at a time, forward and backward: of the gathered sources only one window's are ever held."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sources: Tensor) -> Tensor:
        out, own = torch.empty_like(q), slice(0, sources.shape[1])
        out[:, :, own], normaliser = _forward(q[:, :, own], k[:, :, own], v[:, :, own], is_causal=True)
        normalisers = [normaliser]
        for w, chosen in enumerate(sources[1:], 1):
            k_w, v_w = k.index_select(2, chosen), v.index_select(2, chosen)
            for t, n, mask in _tiles(chosen, w * len(chosen), q.dtype):
                out[:, :, t], normaliser = _forward(q[:, :, t], k_w[:, :, :n], v_w[:, :, :n], attn_mask=mask)
                normalisers.append(normaliser)
        ctx.save_for_backward(q, k, v, out, sources, *normalisers)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sources, *normalisers = ctx.saved_tensors
        grad = grad.contiguous()
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        normaliser, own = iter(normalisers), slice(0, sources.shape[1])
        rows = q[:, :, own], k[:, :, own], v[:, :, own], out[:, :, own]
        dq[:, :, own], dk[:, :, own], dv[:, :, own] = _backward(grad[:, :, own], *rows, next(normaliser), 0.0, True)
        for w, chosen in enumerate(sources[1:], 1):
            k_w, v_w = k.index_select(2, chosen), v.index_select(2, chosen)
            for t, n, mask in _tiles(chosen, w * len(chosen), q.dtype):
                rows = q[:, :, t], k_w[:, :, :n], v_w[:, :, :n], out[:, :, t]
                dq[:, :, t], dk_t, dv_t = _backward(grad[:, :, t], *rows, next(normaliser), 0.0, False, attn_mask=mask)
                if t.stop == (w + 1) * len(chosen):
                    dk_w, dv_w = dk_t, dv_t
                else:
                    dk_w[:, :, :n] += dk_t
                    dv_w[:, :, :n] += dv_t
            dk.index_add_(2, chosen, dk_w)
            dv.index_add_(2, chosen, dv_w)
        return dq, dk, dv, None
