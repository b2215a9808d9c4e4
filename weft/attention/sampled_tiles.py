"""Causal attention over sampled windows on the CPU, without the pairs that causality forbids.

A window's P targets and its P sources make P² pairs, of which about a third are illegal. Sources have no order of
their own: sorted by position, a tile of targets needs only those before its end,

    tile [a, b) of window w attends to  sorted(S_w)[: n],   n = #{s ∈ S_w : s < b}

so most of the illegal pairs are never computed. PyTorch's fused CPU kernel does each tile. It is called below
autograd, because slicing and joining tiles under autograd costs more than it saves.
Equal to `sampled_attention(..., causal=True)`, which defines it. Every target must have a legal source.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE = 256  # targets per tile: smaller wastes fewer pairs, larger runs each pair faster

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def causal_tiles(q: Tensor, k: Tensor, v: Tensor, sources: Tensor) -> Tensor:
    """q, k, v (B, H, L, D) on the CPU; `sources` (W, L / W) as `sampled_attention` takes them."""
    q = q if q.stride(-1) == 1 else q.contiguous()  # the kernel reads rows
    return _CausalTiles.apply(q, k, v, sources.sort(-1).values)


def _tiles(sources: Tensor) -> Iterator[tuple[slice, slice, int]]:
    """Targets and sorted sources of each tile, and how many of these are legal for all of its targets.

    The last tile of a window comes first: it alone has all the window's sources.
    """
    W, P = sources.shape
    for w in range(W):
        for start in reversed(range(0, P, TILE)):
            first, end = w * P + start, w * P + min(start + TILE, P)
            free, n = torch.searchsorted(sources[w], torch.tensor([first + 1, end])).tolist()
            yield slice(first, end), slice(w * P, w * P + n), free


def _future(positions: Tensor, targets: slice, sources: slice, free: int, like: Tensor) -> Tensor:
    """-inf where a source lies after the target, zero elsewhere."""
    t = torch.arange(targets.start, targets.stop)[:, None]
    mask = like.new_zeros(1, 1, len(t), sources.stop - sources.start)
    mask[..., free:].masked_fill_(positions[sources][free:] > t, float("-inf"))
    return mask


class _CausalTiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sources: Tensor) -> Tensor:
        positions = sources.flatten()
        k, v = k.index_select(2, positions), v.index_select(2, positions)
        out = torch.empty_like(q)
        normalisers = []
        for targets, chosen, free in _tiles(sources):
            mask = _future(positions, targets, chosen, free, q)
            out[:, :, targets], normaliser = _forward(
                q[:, :, targets], k[:, :, chosen], v[:, :, chosen], attn_mask=mask
            )
            normalisers.append(normaliser)
        ctx.save_for_backward(q, k, v, out, sources, *normalisers)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sources, *normalisers = ctx.saved_tensors
        positions, grad = sources.flatten(), grad.contiguous()
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for (targets, chosen, free), normaliser in zip(_tiles(sources), normalisers, strict=True):
            mask = _future(positions, targets, chosen, free, q)
            rows = q[:, :, targets], k[:, :, chosen], v[:, :, chosen], out[:, :, targets]
            dq[:, :, targets], *tile = _backward(grad[:, :, targets], *rows, normaliser, 0.0, False, attn_mask=mask)
            for whole, part in zip((dk, dv), tile, strict=True):
                if targets.stop == chosen.start + sources.shape[1]:  # the window's last tile
                    whole[:, :, chosen] = part
                else:
                    whole[:, :, chosen] += part
        dk, dv = (torch.zeros_like(d).index_add_(2, positions, d) for d in (dk, dv))
        return dq, dk, dv, None
