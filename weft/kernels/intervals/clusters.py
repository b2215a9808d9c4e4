"""Clusters of `routing` in one operator: move the centroids, assign the keys, sort them, and sum each cluster.

PyTorch needs about 35 operators for this, which take longer to queue than the attention takes to run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.blocks import ceil_div
from ...core.precision import autocast
from ...core.tiles import Block, block_width, flags_or, next_power_of_two, rows_contiguous, strides
from ..launch import launch
from ..operator import InPlace
from .kernel import Orders, assign_groups, group_dtype

MOST_CLUSTERS = 256  # a tile compares each token with every cluster
TILE = 256  # tokens


def cluster_keys(
    k: Tensor, centroids: Tensor, drawn: Tensor, count: Tensor, mask: Tensor | None, decay: float, copy: Tensor | None
) -> Orders:
    """Sort keys (B, H or fewer, L, D) by their nearest centroid (H, C, D). With `copy`: first move the centroids by the
    sums in `drawn` (H, C, D) and `count` (H, C), and copy them; then replace the sums by those of these keys."""
    (k,) = autocast(k)
    block = _operator(k.detach(), centroids, drawn, count, copy, mask, decay)
    return Orders(*_tables(k, centroids).split(block))


def _tables(k: Tensor, centroids: Tensor) -> Block:
    (B, _, L, _), (H, C, _) = k.shape, centroids.shape
    slots, starts = ((1, B, H, L), torch.int32), ((1, B, H, C + 1), torch.int32)
    return Block((slots, slots, starts))


def _run(k, centroids, drawn, count, copy, mask, decay) -> tuple[Tensor]:
    from .assign import group_sums
    from .sort import count_groups, first_slots, move_centroids, place_tokens

    about = _tables(k, centroids)
    block = about.empty(k)
    token, ordered, start = about.split(block)
    k = rows_contiguous(k)
    (B, _, L, D), (H, C, _) = k.shape, centroids.shape
    tiles, chunk, width = ceil_div(L, TILE), min(32, next_power_of_two(C + 1)), block_width(D)
    if copy is not None:
        launch(move_centroids, (H * C,), centroids, drawn, count, copy, decay, D=D, BLOCK_D=width, num_warps=1)
    group = k.new_empty(1, B, H, L, dtype=group_dtype(C))
    assign_groups(k, centroids[None], flags_or(mask, k), mask is not None, group, group, C, False)
    counts = start.new_empty(B * H, tiles, C + 1)
    launch(
        count_groups, (tiles, B * H), group, counts, L, tiles, C, TILE=TILE, CHUNK=chunk, num_warps=4
    )  # fmt: skip
    launch(first_slots, (B * H,), counts, start, tiles, C, TILES=32, CHUNK=chunk, num_warps=4)
    launch(
        place_tokens, (tiles, B * H), group, counts, token, ordered, L, tiles, C, TILE=TILE, CHUNK=chunk, num_warps=4
    )  # fmt: skip
    if copy is not None:
        launch(
            group_sums, (C * H,), k, token, start, drawn, count, *strides(k), B, H, L, C,
            D=D, BLOCK_D=width, ROWS=64, HEADS=H // k.shape[1], num_warps=4,
        )  # fmt: skip
    return (block,)


_operator = InPlace(
    "cluster_keys",
    "Tensor k, Tensor(a!) centroids, Tensor(b!) drawn, Tensor(c!) count, Tensor(d!)? copy, Tensor? mask, float decay",
    _run,
    lambda k, centroids, drawn, count, copy, mask, decay: _tables(k, centroids).empty(k),
)
