"""Causal attention over sampled windows on the CPU, without most of the pairs that causality forbids.

A window's P targets and its P sources make P² pairs, of which about a third are illegal. Sources have no order of
their own: sorted by position, a tile of targets needs only those before its end,

    tile [a, b) of a window attends to  sorted(S)[: n],   n = #{s ∈ S : s < b}

so most of the illegal pairs are never computed. The first window always draws itself and is plain causal attention.
Equal to `sampled_attention(..., causal=True)`, which defines it. Every target must have a legal source.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...core.blocks import ceil_div

TILE = 256  # targets per tile: smaller wastes fewer pairs, larger runs each pair faster
ALIGN = 16  # sources per tile are rounded up to whole vectors


def causal_tiles(q: Tensor, k: Tensor, v: Tensor, sources: Tensor) -> Tensor:
    """q, k, v (B, H, L, D) on the CPU; `sources` (W, L / W) as `sampled_attention` takes them."""
    P = sources.shape[1]
    out = [scaled_dot_product_attention(q[:, :, :P], k[:, :, :P], v[:, :, :P], is_causal=True)]
    for w, chosen in enumerate(sources[1:].sort(-1).values, 1):
        k_w, v_w = k.index_select(2, chosen), v.index_select(2, chosen)
        for start in range(w * P, (w + 1) * P, TILE):
            end = min(start + TILE, (w + 1) * P)
            legal_for_all, n = torch.searchsorted(chosen, torch.tensor([start + 1, end])).tolist()
            n = min(ceil_div(n, ALIGN) * ALIGN, P)
            mask = torch.zeros(end - start, n, dtype=q.dtype)
            future = chosen[legal_for_all:n] > torch.arange(start, end)[:, None]
            mask[:, legal_for_all:].masked_fill_(future, float("-inf"))
            tile = q[:, :, start:end], k_w[:, :, :n], v_w[:, :, :n]
            out.append(scaled_dot_product_attention(*tile, attn_mask=mask))
    return torch.cat(out, 2)
