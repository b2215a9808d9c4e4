"""Fused kernels of Performer: random features of queries and keys, then `linear_scan` or `linear_sum`, forward and
backward as one PyTorch operator.

    t = x / D^{1/4},   u_m = p_m·t - largest,   largest = max_m p_m·t

    queries   φ_m ∝ e^{u_m - |t|²/2} + ε, the largest of them 1          rest = ε Σ_m φ_m
    keys      φ_m = e^{u_m}, with the rest of its scale apart:           key_scale = largest - |t|²/2
              top_i = max_{j ≤ i} largest_j over the unmasked keys, 0 before the first

The scale of a query cancels in the quotient. The plain version in `__init__.py` is the reference. As there, gradients
go through the maxima only via ε; everything else cancels. The directions p get no gradient. Triton is imported only
when a kernel runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.blocks import ceil_div
from ...core.precision import autocast
from ...core.tiles import (
    Block,
    Tiles,
    block_width,
    empty_rows,
    flags_or,
    for_operator,
    next_power_of_two,
    rows_contiguous,
    strides,
    tile_table,
    tiles_for,
)
from ...kernels.launch import launch
from ...kernels.linear_scan import kernel as linear_scan
from ...kernels.linear_sum import kernel as linear_sum
from ...kernels.operator import Operator

LEAST_LENGTH = 256  # the shortest length measured; the kernels are faster from here on: docs/kernels.md

# Bytes are those of a multiplied element. Rows, features per tile. Tuned: 2 bytes, head_dim 64.
TILES = tile_table(
    {
        "features": ((128, 32, 4, 3), (64, 32, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1)),
        "feature gradients": ((64, 32, 4, 3), (64, 32, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1)),
    }
)
WORD = 16  # φ is zero-padded to a multiple of this width, so that rows are aligned
SPAN = 4096  # maximum number of tokens per step of `running_top`


def random_feature_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, projection: Tensor, epsilon: float, *, causal: bool
) -> Tensor:
    """q, k and v (B, H, L, D), mask (B, L), projection (M, D) -> (B, H, L, D). k and v may have fewer heads than q."""
    q, k, v = autocast(q, k, v)
    return _operators[causal](q, k, v, for_operator(mask), projection, epsilon)


def _features(q, k, mask, projection, epsilon):
    """φ(q), φ(k), and a block of what else the attention and the backward read."""
    from .forward import features, running_top, split

    a, b, block = outputs = _empty_features(q, k, projection)
    key_scale, top, rest, q_largest, k_largest, directions = _kept(q, k, projection).split(block)
    B, _, L, D = q.shape
    M = projection.shape[0]
    launch(
        split, (ceil_div(M * D, 1024),),
        projection.contiguous(), directions, M * D, D**-0.25, COLUMNS=1024, BF16=q.dtype == torch.bfloat16, num_warps=4
    )  # fmt: skip
    t = tiles("features", q)
    for queries, x, phi, largest, number in ((True, q, a, q_largest, rest), (False, k, b, k_largest, key_scale)):
        flags, x, H = None if queries else mask, rows_contiguous(x), x.shape[1]
        launch(
            features, (ceil_div(L, t.queries) * B * H,),
            x, flags_or(flags, x), directions, phi, largest, number, *strides(x), B * H, H, L, epsilon,
            QUERIES=queries, **_options(q, M, t, flags), **t.launch(),
        )  # fmt: skip
    launch(running_top, (B * k.shape[1],), k_largest, top, L, SPAN=min(SPAN, next_power_of_two(L)), num_warps=8)
    return outputs


def _empty_features(q: Tensor, k: Tensor, projection: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    a, b = (x.new_empty(*x.shape[:3], width(projection.shape[0])) for x in (q, k))
    return a, b, _kept(q, k, projection).empty(q)


def _kept(q: Tensor, k: Tensor, projection: Tensor) -> Block:
    """key_scale, top, rest, the largest products of the queries and of the keys, and the directions from `split`."""
    half, of_queries, of_keys = q.dtype == torch.bfloat16, *((tuple(x.shape[:3]), torch.float32) for x in (q, k))
    directions = (1 + half, *projection.shape), torch.bfloat16 if half else torch.float32
    return Block((of_keys, of_keys, of_queries, of_queries, of_keys, directions))


def _feature_gradients(da, db, dtop, drest, q, k, mask, projection, block, epsilon):
    from .backward import feature_gradients, top_gradients

    _, top, _, q_largest, k_largest, directions = _kept(q, k, projection).split(block)
    B, _, L, _ = q.shape
    dq, dk = empty_rows(q), empty_rows(k)
    t = tiles("feature gradients", q)
    through = torch.empty_like(k_largest)
    span = min(SPAN, next_power_of_two(L))
    launch(top_gradients, (B * k.shape[1],), k_largest, top, dtop, through, L, SPAN=span, num_warps=8)
    for queries, x, dphi, largest, dnumber, dx in (
        (True, q, da, q_largest, drest, dq),
        (False, k, db, k_largest, through, dk),
    ):
        flags, x, H = None if queries else mask, rows_contiguous(x), x.shape[1]
        launch(
            feature_gradients, (ceil_div(L, t.queries) * B * H,),
            x, flags_or(flags, x), directions, largest, dphi, dnumber, dx, *strides(x), *strides(dphi), *strides(dx),
            B * H, H, L, epsilon,
            QUERIES=queries, **_options(q, directions.shape[1], t, flags), **t.launch(),
        )  # fmt: skip
    return dq, dk


def _operator(name: str, attention: Operator, kept: int) -> Operator:
    """The features and `attention`, which keeps that many tensors for its backward."""

    def given(q, k, v, mask, projection, a, b, block):
        key_scale, top, rest, *_ = _kept(q, k, projection).split(block)
        return a, b, v, mask, key_scale, top, rest, None

    def forward(q, k, v, mask, projection, epsilon):
        features = _features(q, k, mask, projection, epsilon)
        out, *more = attention.run(*given(q, k, v, mask, projection, *features), "given", 0.0)
        return out, *features, *more

    def fake(q, k, v, mask, projection, epsilon):
        features = _empty_features(q, k, projection)
        out, *more = attention.fake(*given(q, k, v, mask, projection, *features), "given", 0.0)
        return out, *features, *more

    def backward(dout, q, k, v, mask, projection, out, a, b, block, *rest):
        *more, epsilon = rest
        arguments = given(q, k, v, mask, projection, a, b, block)
        da, db, dv, dtop, drest = attention.run_backward(dout, *arguments, out, *more, "given", 0.0)
        return *_feature_gradients(da, db, dtop, drest, q, k, mask, projection, block, epsilon), dv

    arguments = "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor projection, float epsilon"
    return Operator(name, arguments, forward, fake, backward, outputs=4 + kept)


def _options(q: Tensor, M: int, t: Tiles, mask: Tensor | None) -> dict[str, Any]:
    D = q.shape[3]
    options = {"M": M, "WIDTH": width(M), "D": D, "BLOCK_D": block_width(D), "ROWS": t.queries, "BF": t.keys}
    return options | {"HAS_MASK": mask is not None, "BF16": q.dtype == torch.bfloat16}


def width(M: int) -> int:
    return ceil_div(M, WORD) * WORD


def tiles(kernel: str, q: Tensor) -> Tiles:
    return tiles_for(TILES, kernel, q.shape[3], 2 if q.dtype == torch.bfloat16 else 4)


_operators = {
    True: _operator("causal_performer", linear_scan.operator, 1),
    False: _operator("performer", linear_sum.operator, 2),
}
