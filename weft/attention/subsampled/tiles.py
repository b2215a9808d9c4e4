"""Causal attention over sampled windows on the CPU, without computing most of the masked pairs.

A window has P targets and P sources, so P² pairs; about a third are not allowed. The order of the sources does not
matter. If they are sorted by position, a tile of targets needs only the sources before its end:

    tile [a, b) of a window attends to  sorted(S)[: n],   n = #{s ∈ S : s < b}

So most of the pairs that are not allowed are never computed. The first window always samples itself and is plain causal
attention. The reference is `sampled_attention(..., causal=True)`. Every target must have an allowed source.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...core.blocks import ceil_div

TILE = 256  # targets per tile: smaller tiles waste fewer pairs, larger tiles are faster per pair
ALIGN = 16  # sources per tile are rounded up to whole vectors


def causal_tiles(q: Tensor, k: Tensor, v: Tensor, sources: Tensor) -> Tensor:
    """q, k, v (B, H, L, D) on the CPU; `sources` (W, L / W) as in `sampled_attention`."""
    P = sources.shape[1]
    out = [scaled_dot_product_attention(q[:, :, :P], k[:, :, :P], v[:, :, :P], is_causal=True)]
    for w, chosen in enumerate(sources[1:].sort(-1).values, 1):
        k_w, v_w = k.index_select(2, chosen), v.index_select(2, chosen)
        for start in range(w * P, (w + 1) * P, TILE):
            end = min(start + TILE, (w + 1) * P)
            legal_for_all, n = torch.searchsorted(chosen, chosen.new_tensor([start + 1, end])).tolist()
            n = min(ceil_div(n, ALIGN) * ALIGN, P)
            mask = q.new_zeros(end - start, n)
            future = chosen[legal_for_all:n] > torch.arange(start, end, device=q.device)[:, None]
            mask[:, legal_for_all:].masked_fill_(future, float("-inf"))
            tile = q[:, :, start:end], k_w[:, :, :n], v_w[:, :, :n]
            out.append(scaled_dot_product_attention(*tile, attn_mask=mask))
    return torch.cat(out, 2)
