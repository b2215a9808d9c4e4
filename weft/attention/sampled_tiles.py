"""Causal attention over sampled windows on the CPU, without most of the pairs that causality forbids.

A window's P targets and its P sources make P² pairs, of which about a third are illegal. Sources have no order of
their own: sorted by position, a tile of targets needs only those before its end,

    tile [a, b) of a window attends to  sorted(S)[: n],   n = #{s ∈ S : s < b}

so most of the illegal pairs are never computed. PyTorch's fused CPU kernel does each tile. It is called below autograd,
because slicing and joining tiles under autograd costs more than they save.
Equal to `sampled_attention(..., causal=True)`, which defines it. Every target must have a legal source.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .blocks import ceil_div

TILE = 256  # targets per tile: smaller wastes fewer pairs, larger runs each pair faster
ALIGN = 16  # sources per tile are rounded up to whole vectors

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def causal_tiles(q: Tensor, k: Tensor, v: Tensor, sources: Tensor) -> Tensor:
    """q, k, v (B, H, L, D) on the CPU; `sources` (W, L / W) as `sampled_attention` takes them."""
    q = q if q.stride(-1) == 1 else q.contiguous()  # the kernel reads rows
    return _CausalTiles.apply(q, k, v, sources.sort(-1).values)


@dataclass
class _Tile:
    targets: slice
    sources: slice  # of all windows' sorted sources, one after the other
    all_legal: int  # so many of its sources are legal for all of its targets
    ends_window: bool  # then it has all of the window's sources
    mask: slice  # where its mask lies in the one buffer of masks

    @property
    def shape(self) -> tuple[int, int]:
        return self.targets.stop - self.targets.start, self.sources.stop - self.sources.start


def _tiles(sources: Tensor) -> list[_Tile]:
    """The tiles of sorted sources (W, P); in each window the last one comes first."""
    W, P = sources.shape
    starts = torch.arange(0, P, TILE) + P * torch.arange(W)[:, None]
    ends = torch.minimum(starts + TILE, P * torch.arange(1, W + 1)[:, None])
    all_legal = torch.searchsorted(sources, starts, right=True).tolist()
    needed = torch.searchsorted(sources, ends).tolist()
    tiles, used = [], 0
    for w in range(W):
        for i in reversed(range(starts.shape[1])):
            start, end = int(starts[w, i]), int(ends[w, i])
            n = min(ceil_div(needed[w][i], ALIGN) * ALIGN, P)
            mask = slice(used, used := used + (end - start) * n)
            ends_window = i == starts.shape[1] - 1
            tiles.append(_Tile(slice(start, end), slice(w * P, w * P + n), all_legal[w][i], ends_window, mask))
    return tiles


class _CausalTiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sources: Tensor) -> Tensor:
        tiles, positions, targets = _tiles(sources), sources.flatten(), torch.arange(q.shape[2])
        k, v = k.index_select(2, positions), v.index_select(2, positions)
        out, normalisers = torch.empty_like(q), []
        masks = q.new_zeros(tiles[-1].mask.stop)  # shared by batch and heads, and kept for the backward pass
        for tile in tiles:
            t, s = tile.targets, tile.sources
            mask = masks[tile.mask].view(1, 1, *tile.shape)
            future = positions[s][tile.all_legal :] > targets[t, None]
            mask[..., tile.all_legal :].masked_fill_(future, float("-inf"))
            out[:, :, t], normaliser = _forward(q[:, :, t], k[:, :, s], v[:, :, s], attn_mask=mask)
            normalisers.append(normaliser)
        ctx.save_for_backward(q, k, v, out, positions, masks, *normalisers)
        ctx.tiles = tiles
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, positions, masks, *normalisers = ctx.saved_tensors
        grad = grad.contiguous()
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for tile, normaliser in zip(ctx.tiles, normalisers, strict=True):
            t, s = tile.targets, tile.sources
            mask = masks[tile.mask].view(1, 1, *tile.shape)
            rows = q[:, :, t], k[:, :, s], v[:, :, s], out[:, :, t]
            dq[:, :, t], dk_t, dv_t = _backward(grad[:, :, t], *rows, normaliser, 0.0, False, attn_mask=mask)
            if tile.ends_window:  # the first tile of its window here: it writes what the others add to
                dk[:, :, s], dv[:, :, s] = dk_t, dv_t
            else:
                dk[:, :, s] += dk_t
                dv[:, :, s] += dv_t
        dk, dv = (torch.zeros_like(d).index_add_(2, positions, d) for d in (dk, dv))
        return dq, dk, dv, None
