"""Fused kernels for attention of query blocks to lists of key blocks: `bigbird`.

    out_i = Σ_j softmax_j(q_i · k_j / √D) v_j          over the unmasked j in the blocks listed for the block of i

`tables` makes the lists, and the transposed lists for the gradients of keys and values. The plain versions in
`weft/attention/` are the reference. Triton is imported only when a kernel runs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.blocks import ceil_div
from ...core.precision import autocast
from ...core.tiles import (
    block_width,
    empty_rows,
    flags_or,
    for_operator,
    near_rows,
    precision,
    strides,
    tile_table,
    tiles_for,
)
from ..band.kernel import check, empty_outputs
from ..grouped import gradients, sum_to_groups
from ..launch import launch
from ..lines.kernel import scales
from ..operator import Operator

LEAST_LENGTH = 256

TILES = tile_table(
    {
        "attend": ((64, 64, 4, 3), (64, 32, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1)),
        "query gradients": ((64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 1)),
        "key gradients": ((32, 64, 4, 3), (32, 64, 4, 2), (32, 32, 4, 1), (32, 32, 4, 1)),
    }
)


def tables(pairs: list[np.ndarray], n: int, room: int) -> Tensor:
    """(2, heads, n + 1 + room) integers: for each head, n + 1 offsets into the lists of key blocks, and the lists; then
    the same for the query blocks that attend to each key block. `pairs` has one array (P, 2) of query and key blocks
    per head, P ≤ room."""
    table = np.zeros((2, len(pairs), n + 1 + room), np.int32)
    for h, both in enumerate(pairs):
        for way, (row, column) in enumerate((both.T, both.T[::-1])):
            table[way, h, : n + 1] = np.searchsorted(np.sort(row), np.arange(n + 1))
            table[way, h, n + 1 : n + 1 + len(both)] = column[np.lexsort((column, row))]
    return torch.from_numpy(table)


def block_list_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, table: Tensor, *, block_size: int,
    key: Tensor | None = None, threshold: int = 0,
) -> Tensor:  # fmt: skip
    """q, k and v (B, H, L, D), mask (B, L), table from `tables`, dropout from `dropout_key` -> (B, H, L, D)."""
    q, k, v = autocast(q, k, v)
    return _operator(q, k, v, for_operator(mask), table, key, block_size, threshold)


def _forward(q, k, v, mask, table, key, block_size, threshold):
    from .forward import attend

    check(q, k, v)
    out, lse = empty_outputs(q)
    q, k, v = (near_rows(x) for x in (q, k, v))
    programs, sizes, options = _launch("attend", q, k, mask, table, key, block_size, threshold)
    launch(
        attend, programs,
        q, k, v, flags_or(mask, q), table[0], q if key is None else key, out, lse,
        *strides(q), *strides(k), *strides(v), *strides(out), *sizes, scales(q)[0], **options,
    )  # fmt: skip
    return out, lse


def _backward(dout, q, k, v, mask, table, key, out, lse, block_size, threshold):
    from .backward import key_gradients, query_gradients

    dq, (dk, by_head_k), (dv, by_head_v) = empty_rows(q), gradients(k, q), gradients(v, q)
    delta = torch.empty_like(lse)
    dout, q, k, v, out = (near_rows(x) for x in (dout, q, k, v, out))
    given, flags = (*strides(q), *strides(k), *strides(v)), flags_or(mask, q)
    given_key = q if key is None else key
    programs, sizes, options = _launch("query gradients", q, k, mask, table, key, block_size, threshold)
    launch(
        query_gradients, programs,
        q, k, v, flags, table[0], given_key, out, dout, lse, delta, dq,
        *given, *strides(out), *strides(dout), *strides(dq), *sizes, *scales(q), **options,
    )  # fmt: skip
    programs, sizes, options = _launch("key gradients", q, k, mask, table, key, block_size, threshold)
    launch(
        key_gradients, programs,
        q, k, v, flags, table[1], given_key, dout, lse, delta, by_head_k, by_head_v, *given,
        *strides(dout), *strides(by_head_k), *strides(by_head_v),
        *sizes, *scales(q), **options,
    )  # fmt: skip
    sum_to_groups(by_head_k, dk)
    sum_to_groups(by_head_v, dv)
    return dq, dk, dv


def _launch(
    kernel: str, q: Tensor, k: Tensor, mask: Tensor | None, table: Tensor, key: Tensor | None, block_size: int,
    threshold: int,
) -> tuple[tuple[int], tuple[int, ...], dict[str, Any]]:  # fmt: skip
    """Number of programs, sizes and options of a kernel."""
    B, H, L, D = q.shape
    m = min(block_size, L)
    n = ceil_div(L, m)
    t = tiles_for(TILES, kernel, D, q.element_size(), m)
    rows = t.keys if kernel == "key gradients" else t.queries
    options = {"D": D, "BLOCK_D": block_width(D), "BQ": t.queries, "BK": t.keys, "PRECISION": precision(q)}
    options |= {"GROUP": H // k.shape[1], "DROPOUT": key is not None}
    sizes = (B * H, H, L, n, m, table.shape[2], threshold)
    return (n * ceil_div(m, rows) * B * H,), sizes, {**options, "HAS_MASK": mask is not None, **t.launch()}


_operator = Operator(
    "block_lists",
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor table, Tensor? key, int block_size, int threshold",
    _forward,
    empty_outputs,
    _backward,
    outputs=2,
)
