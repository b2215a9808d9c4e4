"""Attention in clusters of keys as one operator: move the centroids, assign the keys, sort them, sum each cluster, and
attend.

PyTorch needs about 35 operators for the clusters, which take longer to queue than the attention takes to run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...core.precision import autocast
from ...core.tiles import block_width, flags_or, near_rows, strides
from ..launch import launch
from ..operator import Operator
from .kernel import assign_groups, empty_tables, group_dtype, sort_by_group, sum_groups
from .kernel import operator as interval_attention

PARTS = 16  # of a sequence, in `content_of`


def content_of(k: Tensor) -> Tensor:
    """Sums over the tokens of k (B, heads, L, D), by which to recognise k."""
    (k,) = autocast(k)
    content = _empty_content(k)
    _sum_tokens(near_rows(k), content)
    return content


def _empty_content(k: Tensor) -> Tensor:
    B, H, _, D = k.shape
    return k.new_empty(B, H, PARTS, D, dtype=torch.int32)


def _sum_tokens(k: Tensor, content: Tensor) -> None:
    from .sort import sum_tokens

    B, H, L, D = k.shape
    launch(
        sum_tokens, (B * H, PARTS), k, content, *strides(k), H, L, D=D, BLOCK_D=block_width(D), ROWS=128, num_warps=4
    )  # fmt: skip


def _cluster(k, centroids, drawn, count, mask, decay, copy, content) -> Tensor:
    """The tables of keys (B, H or fewer, L, D) sorted by their nearest centroid (H, C, D). With `copy` and `content`:
    first move the centroids by the sums in `drawn` (H, C, D) and `count` (H, C), and copy them; then replace the sums
    by those of these keys, and write the content of k."""
    from .sort import move_centroids

    tables, k = empty_tables(k, 1, *centroids.shape[:2]), near_rows(k)
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
    return tables


def clustered(name: str, options: str, run: Callable[..., Any], run_backward: Callable[..., Any]) -> Operator:
    """An operator that returns out, the centroids of this call and the content of k. It changes the sums and, unless
    they are given again (`learning` is False), the centroids, so it is only for a `plain_call`.

        run(q, k, v, tables, key, groups, *options) -> out, kept
        run_backward(dout, q, k, v, tables, key, out, kept, groups, *options) -> dq, dk, dv

    `key` is that of `dropout_key`.
    """

    def forward(q, k, v, centroids, drawn, count, mask, key, groups, decay, learning, *options):
        copy = torch.empty_like(centroids) if learning else centroids.new_empty(0)
        content = _empty_content(k) if learning else centroids.new_empty(0)
        tables = _cluster(k, centroids, drawn, count, mask, decay, *((copy, content) if learning else (None, None)))
        out, kept = run(q, k, v, tables, key, groups, *options)
        return out, copy, content, tables, kept

    def backward(dout, q, k, v, *rest):
        key, out, _, _, tables, kept, groups, _, _, *options = rest[4:]
        return run_backward(dout, q, k, v, tables, key, out, kept, groups, *options)

    return Operator(
        name,
        "Tensor q, Tensor k, Tensor v, Tensor? centroids, Tensor? drawn, Tensor? count, Tensor? mask, Tensor? key,"
        f" int groups, float decay, bool learning, {options}",
        forward,
        _no_shapes,
        backward,
        outputs=5,
        returned=3,
        unsaved=(3, 4, 5, 6, 9, 10),  # all but q, k, v, key, out, the tables and `kept`
    )


def _no_shapes(*arguments: Any) -> Any:
    raise NotImplementedError("this operator is only for plain eager calls")


routed_attention = clustered(
    "routed_attention",
    "int size, bool causal, int threshold",
    lambda q, k, v, tables, key, groups, size, causal, threshold: interval_attention.run(
        q, k, v, None, tables, key, groups, size, causal, False, False, threshold
    ),
    lambda dout, q, k, v, tables, key, out, lse, groups, size, causal, threshold: interval_attention.run_backward(
        dout, q, k, v, None, tables, key, out, lse, groups, size, causal, False, False, threshold
    ),
)
