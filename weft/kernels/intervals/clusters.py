"""Clusters of `routing` in one operator: move the centroids, assign the keys, sort them, and sum each cluster.

PyTorch needs about 35 operators for this, which take longer to queue than the attention takes to run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.precision import autocast
from ...core.tiles import block_width, flags_or, rows_contiguous, strides
from ..launch import launch
from ..operator import InPlace
from .kernel import Orders, assign_groups, empty_tables, group_dtype, sort_by_group, sum_groups

PARTS = 8  # of a sequence, in `content_of`


def cluster_keys(
    k: Tensor,
    centroids: Tensor,
    drawn: Tensor,
    count: Tensor,
    mask: Tensor | None,
    decay: float,
    copy: Tensor | None = None,
    content: Tensor | None = None,
) -> Orders:
    """Sort keys (B, H or fewer, L, D) by their nearest centroid (H, C, D). With `copy` and `content`: first move the
    centroids by the sums in `drawn` (H, C, D) and `count` (H, C), and copy them; then replace the sums by those of
    these keys, and write their content, of `empty_content`."""
    (k,) = autocast(k)
    tables = _operator(k, centroids, drawn, count, copy, content, mask, decay)
    return Orders(tables, centroids.shape[1])


def empty_content(k: Tensor) -> Tensor:
    """Memory for sums over the tokens of k (B, heads, L, D), by which to recognise k."""
    B, H, _, D = k.shape
    return k.new_empty(B, H, PARTS, D, dtype=torch.int32)


def content_of(k: Tensor) -> Tensor:
    (k,) = autocast(k)
    content = empty_content(k)
    _sum_tokens(rows_contiguous(k), content)
    return content


def _sum_tokens(k: Tensor, content: Tensor) -> None:
    from .sort import sum_tokens

    B, H, L, D = k.shape
    launch(
        sum_tokens, (B * H, PARTS), k, content, *strides(k), H, L, D=D, BLOCK_D=block_width(D), ROWS=64, num_warps=4
    )  # fmt: skip


def _run(k, centroids, drawn, count, copy, content, mask, decay) -> tuple[Tensor]:
    from .sort import move_centroids

    tables, k = _tables(k, centroids), rows_contiguous(k)
    (B, _, L, D), (H, C, _) = k.shape, centroids.shape
    if copy is not None:
        launch(
            move_centroids, (H * C,), centroids, drawn, count, copy, decay, D=D, BLOCK_D=block_width(D), num_warps=1
        )  # fmt: skip
    group = k.new_empty(1, B, H, L, dtype=group_dtype(C))
    assign_groups(k, centroids[None], flags_or(mask, k), mask is not None, group, group, C, False)
    sort_by_group(group, tables, C)
    if copy is not None:
        sum_groups(k, tables, H, C, drawn, count, 64)
        _sum_tokens(k, content)
    return (tables,)


def _tables(k: Tensor, centroids: Tensor) -> Tensor:
    return empty_tables(k, 1, *centroids.shape[:2])


_operator = InPlace(
    "cluster_keys",
    "Tensor k, Tensor(a!) centroids, Tensor(b!) drawn, Tensor(c!) count, Tensor(d!)? copy, Tensor(e!)? content,"
    " Tensor? mask, float decay",
    _run,
    lambda k, centroids, *rest: _tables(k, centroids),
)
