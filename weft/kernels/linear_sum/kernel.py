"""Fused kernels for bidirectional attention with feature maps: forward and backward as one PyTorch operator.

    out_i = Σ_j p_ij v_j / (Σ_j p_ij + ε)          p_ij = φ(q_i)·φ(k_j)                         plain
                                                   p_ij = φ(q_i)·φ(k_j) e^{m_j - G} + rest_i    scaled

over the unmasked keys; zeros if there are none. The forms and features are those of `linear_scan`, except that G, the
scale of all keys, is one number per head: the last of `top`. Its gradient is Σ_i rest_i drest_i.

Every token is read twice: once for the sums over the sequence, in chunks that are then added in order, and once for
its own row. Triton is imported only when a kernel runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.blocks import ceil_div
from ...core.precision import autocast
from ...core.tiles import (
    block_width,
    empty_rows,
    flags_or,
    for_operator,
    precision,
    rows_contiguous,
    strides,
    tile_table,
    tiles_for,
)
from ..grouped import empty_by_head
from ..launch import launch
from ..linear_scan.kernel import check, numbers
from ..operator import Operator

# Bytes are those of a multiplied element (float16 is multiplied as tf32: 4). Rows, features.
TILES = tile_table(
    {
        "key sums": ((64, 64, 4, 3), (64, 64, 4, 2), (32, 64, 4, 2), (32, 32, 4, 1)),
        "outputs": ((64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 4, 1), (32, 32, 4, 1)),
        "query gradients": ((32, 64, 4, 2), (32, 64, 4, 2), (32, 32, 4, 1), (32, 32, 8, 1)),
        "key gradients": ((64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1), (32, 32, 8, 1)),
    }
)
SHORTEST, CHUNKS = 512, 32  # tokens per chunk, and about the largest number of chunks
COLUMNS = 512  # of the sums, per program of `collect`


def linear_sum(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    features: str,
    epsilon: float = 0.0,
    key_scale: Tensor | None = None,
    top: Tensor | None = None,
    rest: Tensor | None = None,
    table: Tensor | None = None,
) -> Tensor:
    """q and k (B, H, L, F), v (B, H, L, D), mask (B, L) -> (B, H, L, D). The scaled form needs `key_scale` (m),
    `top` (of which the last is G) and `rest`, all (B, H, L). k, v, `key_scale` and `top` may have fewer heads, each
    shared by a group of heads of q. Packed documents need the plain form and the `table` of their chunks of SHORTEST
    tokens."""
    q, k, v = autocast(q, k, v)
    return operator(q, k, v, for_operator(mask), key_scale, top, rest, table, features, epsilon)


def _forward(q, k, v, mask, key_scale, top, rest, table, features, epsilon):
    from .forward import key_sums, outputs

    check(q, k, v, key_scale, top, rest, features)
    scaled = rest is not None
    q, k, v = (rows_contiguous(x) for x in (q, k, v))
    out, weight, sums = _outputs(q, v, scaled, table)
    key_scale, top, rest = (numbers(x, weight) for x in (key_scale, top, rest))
    L, (BH, H, chunk, n), (key_BH, key_H, _, _) = q.shape[2], _sizes(q, table), _sizes(k, table)
    parts = weight.new_empty(key_BH, n, sums.shape[-1])
    listed = q if table is None else table
    grid, options = _launch("key sums", k, v, features, scaled, table, by_chunk=True)
    launch(
        key_sums, grid,
        k, v, flags_or(mask, q), listed, key_scale, top, parts, *strides(k), *strides(v), key_BH, key_H, L, n, chunk,
        HAS_MASK=mask is not None, **options,
    )  # fmt: skip
    total(parts, table, sums)
    grid, options = _launch("outputs", q, v, features, scaled, table)
    launch(
        outputs, grid,
        q, listed, rest, sums, out, weight, *strides(q), *strides(out), BH, H, L, n, epsilon, **options,
        GROUP=H // key_H,
    )  # fmt: skip
    return out, weight, sums


def _outputs(q: Tensor, v: Tensor, scaled: bool, table: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """out, 1 / denominators, and the sums S and z: of each head of k, or of each document at its first chunk."""
    B, H = v.shape[:2]
    weight = q.new_empty(q.shape[:3], dtype=torch.float32)
    size = part_size(q, v, scaled)
    return empty_by_head(v, q), weight, weight.new_empty(*((B, H) if table is None else (H, table.shape[0])), size)


def _sizes(q: Tensor, table: Tensor | None) -> tuple[int, int, int, int]:
    """Sequences of chunks, heads, tokens per chunk and chunks per sequence. Packed documents are one for each head."""
    B, H, L = q.shape[:3]
    return (B * H, H, *chunks(L)) if table is None else (H, H, SHORTEST, table.shape[0])


def _backward(dout, q, k, v, mask, key_scale, top, rest, table, out, weight, sums, features, epsilon):
    from .backward import key_gradients, query_gradients

    scaled = rest is not None
    dout, q, k, v = (rows_contiguous(x) for x in (dout, q, k, v))
    dq, dk, dv, dtop, drest = _gradients(q, k, v, scaled)
    key_scale, top, rest = (numbers(x, weight) for x in (key_scale, top, rest))
    L, (BH, H, chunk, n), (key_BH, key_H, _, _) = q.shape[2], _sizes(q, table), _sizes(k, table)
    parts = weight.new_empty(BH, n, sums.shape[-1])
    listed = q if table is None else table
    grid, options = _launch("query gradients", q, v, features, scaled, table, by_chunk=True)
    launch(
        query_gradients, grid,
        q, out, dout, listed, rest, weight, sums, dq, drest, parts,
        *strides(q), *strides(out), *strides(dout), *strides(dq), BH, H, L, n, chunk, **options,
        GROUP=H // key_H,
    )  # fmt: skip
    sent = torch.empty_like(sums)
    total(parts, table, sent, H // key_H)
    grid, options = _launch("key gradients", k, v, features, scaled, table)
    launch(
        key_gradients, grid,
        k, v, flags_or(mask, q), listed, key_scale, top, sent, dk, dv, dtop,
        *strides(k), *strides(v), *strides(dk), *strides(dv), key_BH, key_H, L, n,
        HAS_MASK=mask is not None, **options,
    )  # fmt: skip
    return dq, dk, dv, dtop, drest


def _gradients(q: Tensor, k: Tensor, v: Tensor, scaled: bool) -> tuple[Tensor, ...]:
    """Of q, k, v, top and rest; the last two are empty in the plain form."""
    L = q.shape[2] if scaled else 0
    rows = (x.new_empty(*x.shape[:2], L, dtype=torch.float32) for x in (k, q))
    return *(empty_rows(x) for x in (q, k, v)), *rows


def total(parts: Tensor, table: Tensor | None, sums: Tensor, group: int = 1) -> None:
    """Write the sums of parts (sequences, n, PART) to sums: of all n, or of each document; of a group of heads."""
    from .forward import collect

    BH, n, size = parts.shape[0] // group, *parts.shape[1:]
    grid = (ceil_div(size, COLUMNS) * BH * (1 if table is None else n),)
    options: dict[str, Any] = {"PART": size, "COLUMNS": COLUMNS, "PACKED": table is not None, "GROUP": group}
    launch(collect, grid, parts, parts if table is None else table, sums, BH, n, **options, num_warps=4)


def _launch(
    kernel: str, q: Tensor, v: Tensor, features: str, scaled: bool, table: Tensor | None, by_chunk: bool = False
) -> tuple[tuple[int], dict[str, Any]]:
    """Programs and options: one program per chunk and tile of features, or per tile of rows."""
    L, F = q.shape[2:]
    BH, _, _, n = _sizes(q, table)
    D, half = v.shape[3], q.dtype == torch.bfloat16
    t = tiles_for(TILES, kernel, D, 2 if half else 4)
    BF = min(t.keys, block_width(F))
    options: dict[str, Any] = {"F": F, "D": D, "BLOCK_D": block_width(D), "BF": BF, "ROWS": t.queries}
    options |= {"PART": part_size(q, v, scaled), "FEATURES": features, "SCALED": scaled, "BF16": half}
    if by_chunk:
        programs, packed = n * ceil_div(F, BF), int(table is not None)
    else:
        programs, packed = (ceil_div(L, t.queries), 0) if table is None else (n * SHORTEST // t.queries, SHORTEST)
    return (programs * BH,), {**options, "PRECISION": precision(q), "PACKED": packed, **t.launch()}


def chunks(L: int) -> tuple[int, int]:
    """Tokens per chunk and number of chunks. They depend only on the length, so that the result of a sequence does not
    depend on the rest of the batch."""
    chunk = max(SHORTEST, ceil_div(L, CHUNKS * 64) * 64)
    return chunk, ceil_div(L, chunk)


def part_size(q: Tensor, v: Tensor, scaled: bool) -> int:
    """The rows of S, then z, then the gradient of G. A multiple of 16 elements, for alignment."""
    return ceil_div((q.shape[3] + scaled) * (v.shape[3] + 1) + scaled, 16) * 16


operator = Operator(
    "linear_sum",
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? key_scale, Tensor? top, Tensor? rest, Tensor? table,"
    " str features, float epsilon",
    _forward,
    lambda q, k, v, mask, key_scale, top, rest, table, *options: _outputs(q, v, rest is not None, table),
    _backward,
    outputs=3,
    gradients=(0, 1, 2, 5, 6),
    fake_backward=lambda q, k, v, mask, key_scale, top, rest, *options: _gradients(q, k, v, rest is not None),
)
