"""Causal attention over sampled windows on the CPU, without the pairs that causality forbids.

A window's P targets and its P sources make P² pairs, of which about a third are illegal. Sources have no order of
their own: sorted by position, a tile of targets needs only those before its end,

    tile [a, b) of window w attends to  sorted(S_w)[: n],   n = #{s ∈ S_w : s < b}

so most of the illegal pairs are never computed. PyTorch's fused CPU kernel does each tile. It is called below
autograd, because slicing and joining tiles under autograd costs more than it saves.
Equal to `sampled_attention(..., causal=True)`, which defines it. Every target must have a legal source.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE = 256  # targets per tile: smaller wastes fewer pairs, larger runs each pair faster
ALIGN = 16  # sources per tile are rounded up to whole vectors

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def causal_tiles(q: Tensor, k: Tensor, v: Tensor, sources: Tensor) -> Tensor:
    """q, k, v (B, H, L, D) on the CPU; `sources` (W, L / W) as `sampled_attention` takes them."""
    q = q if q.stride(-1) == 1 else q.contiguous()  # the kernel reads rows
    return _CausalTiles.apply(q, k, v, sources.sort(-1).values)


def _tiles(sources: Tensor) -> list[tuple[slice, slice]]:
    """Targets and sorted sources of each tile."""
    W, P = sources.shape
    tiles = []
    for w in range(W):
        for start in range(0, P, TILE):
            stop = min(start + TILE, P)
            n = int(torch.searchsorted(sources[w], w * P + stop))
            n = min(-(-n // ALIGN) * ALIGN, P)
            tiles.append((slice(w * P + start, w * P + stop), slice(w * P, w * P + n)))
    return tiles


def _future(positions: Tensor, targets: slice, sources: slice, like: Tensor) -> Tensor:
    """-inf where a source lies after the target, zero elsewhere."""
    t = torch.arange(targets.start, targets.stop)[:, None]
    zero = like.new_zeros(())
    return torch.where(positions[sources] <= t, zero, float("-inf"))[None, None]


class _CausalTiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sources: Tensor) -> Tensor:
        positions = sources.flatten()
        k, v = k.index_select(2, positions), v.index_select(2, positions)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        normalisers = []
        for targets, chosen in _tiles(sources):
            out[:, :, targets], normaliser = _forward(
                q[:, :, targets], k[:, :, chosen], v[:, :, chosen], attn_mask=_future(positions, targets, chosen, q)
            )
            normalisers.append(normaliser)
        ctx.save_for_backward(q, k, v, out, sources, *normalisers)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sources, *normalisers = ctx.saved_tensors
        positions, grad = sources.flatten(), grad.contiguous()
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for (targets, chosen), normaliser in zip(_tiles(sources), normalisers, strict=True):
            dq[:, :, targets], dk_tile, dv_tile = _backward(
                grad[:, :, targets],
                q[:, :, targets],
                k[:, :, chosen],
                v[:, :, chosen],
                out[:, :, targets],
                normaliser,
                0.0,
                False,
                attn_mask=_future(positions, targets, chosen, q),
            )
            dk[:, :, chosen] += dk_tile
            dv[:, :, chosen] += dv_tile
        dk, dv = (torch.zeros_like(d).index_add_(2, positions, d) for d in (dk, dv))
        return dq, dk, dv, None
