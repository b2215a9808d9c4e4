"""Fused kernels of `sinkhorn` without Sinkhorn iterations: forward and backward as one PyTorch operator.

    s_n = Σ_{j in block n} k_j        R = softmax(s sort)        k~_n = Σ_{n'} R_{n n'} k_{n'}        v~ likewise
    out_n = softmax(q_n k_nᵀ / √D) v_n + softmax(q_n k~_nᵀ / √D) v~_n

The mixtures read the tokens in place, both of keys and of values in one pass over R. A block fits into one tile, so its
softmax is recomputed in the backward instead of stored. The plain version in `weft/attention/sinkhorn.py` is the
reference. Triton is imported only when a kernel runs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...core import dispatch
from ...core.blocks import ceil_div
from ...core.tiles import (
    Block,
    block_width,
    empty_rows,
    flags_or,
    for_operator,
    near_rows,
    next_power_of_two,
    precision,
    rows_contiguous,
    strides,
)
from ..band.kernel import check
from ..grouped import gradients, sum_to_groups
from ..launch import launch
from ..lines.kernel import scales
from ..operator import Operator

INTERPRETED = dispatch._INTERPRETED
PARTS = 32  # sums of the gradient of `sort`


def longest_block(head_dim: int, size: int) -> int:
    """The most tokens of a block for this head_dim and bytes per element: what fits into a tile."""
    if head_dim > 128 or size > 2 and not INTERPRETED:  # Triton 3.6 cannot compile `sum_gradients` in float32
        return 0
    return 64 if size == 2 else 32 if head_dim <= 64 else 16


def sorted_blocks(
    q: Tensor, k: Tensor, v: Tensor, sort: Tensor, mask: Tensor | None, sources: Tensor | None, slots: Tensor | None,
    *, block_size: int, key: Tensor | None = None, threshold: int = 0,
) -> Tensor:  # fmt: skip
    """q (B, H, L, D), k and v, which may have fewer heads, sort (D, blocks or more), mask (B, L); `sources` (B,
    blocks): which blocks may be mixed, `slots` (B, block_size): which places of a mixture have any token. Masked keys
    and values must be zero. `key` and `threshold` of `dropout_key`."""
    flags = for_operator(mask), for_operator(sources), for_operator(slots)
    return _operator(q, k, v, sort, *flags, key, block_size, threshold)


def _kept(k: Tensor, m: int) -> Block:
    """The sums of the blocks, R, and the mixtures of keys and values."""
    B, H, L, D = k.shape
    n = ceil_div(L, m)
    mixture = (B, n * m, H, D), k.dtype
    return Block((((B * H, n, D), torch.float32), ((B * H, n, _width(n)), k.dtype), mixture, mixture))


def _width(n: int) -> int:
    return ceil_div(n, 16) * 16


def _split(k: Tensor, m: int, block: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sums, R, sorted_k, sorted_v = _kept(k, m).split(block)
    return sums, R, sorted_k.transpose(1, 2), sorted_v.transpose(1, 2)


def _outputs(q: Tensor, k: Tensor, m: int) -> tuple[Tensor, Tensor]:
    return empty_rows(q), _kept(k, m).empty(q)


def _forward(q, k, v, sort, mask, sources, slots, key, m, threshold):
    from .forward import attend, mix_blocks, place_blocks, sum_blocks

    check(q, k, v)
    out, block = outputs = _outputs(q, k, m)
    sums, R, sorted_k, sorted_v = _split(k, m, block)
    q, k, v, sort = *(near_rows(x) for x in (q, k, v)), rows_contiguous(sort)
    B, H, L, D = k.shape
    n, BH = ceil_div(L, m), B * H
    shape = {"D": D, "BLOCK_D": block_width(D)}
    launch(sum_blocks, (ceil_div(n, 32) * BH,), k, sums, *strides(k), BH, H, L, n, m, **shape, ROWS=32, num_warps=4)
    launch(
        place_blocks, (ceil_div(n, 32) * BH,),
        sums, sort, flags_or(sources, q), R, sort.stride(0), BH, H, n, _width(n), math.log2(math.e),
        **shape, ROWS=32, COLUMNS=64 if D <= 64 else 32, HAS_SOURCES=sources is not None, PRECISION="tf32x3",
        num_warps=4, num_stages=2,
    )  # fmt: skip
    mixing = _mixing(q, n)
    launch(
        mix_blocks, (ceil_div(n, mixing["ROWS"]) * m * BH,),
        R, k, v, sorted_k, sorted_v, sums, *strides(k), *strides(v), *strides(sorted_k), *strides(sorted_v),
        H, n, _width(n), m, L, n * m, **shape, **mixing, BACK=False,
    )  # fmt: skip
    programs, options = _tiles(q, k, m, mask, slots, key)
    launch(
        attend, programs,
        q, k, v, sorted_k, sorted_v, flags_or(mask, q), flags_or(slots, q), q if key is None else key, out,
        *strides(q), *strides(k), *strides(v), *strides(sorted_k), *strides(out),
        B * q.shape[1], q.shape[1], L, n, m, threshold, scales(q)[0], **shape, **options,
    )  # fmt: skip
    return outputs


def _backward(dout, q, k, v, sort, mask, sources, slots, key, out, block, m, threshold):
    from .backward import block_gradients, collect_sort, mixture_gradients, sort_gradients, sum_gradients
    from .forward import mix_blocks

    dq, dsort, (dk, by_head_k), (dv, by_head_v) = empty_rows(q), empty_rows(sort), gradients(k, q), gradients(v, q)
    sums, R, sorted_k, sorted_v = _split(k, m, block)
    dout, q, k, v, sort = *(near_rows(x) for x in (dout, q, k, v)), rows_contiguous(sort)
    B, H, L, D = k.shape
    n, BH = ceil_div(L, m), B * H
    dsorted_k, dsorted_v = by_head_sorted = torch.empty_like(sorted_k), torch.empty_like(sorted_v)
    if H < q.shape[1]:
        each = q.new_empty(2, B, n * m, q.shape[1], D).transpose(2, 3)
        by_head_sorted = each[0], each[1]
    dR = torch.empty_like(R, dtype=torch.float32 if q.dtype == torch.float16 else None)  # too small for float16
    dsums = torch.empty_like(sums)
    shape = {"D": D, "BLOCK_D": block_width(D)}
    programs, options = _tiles(q, k, m, mask, slots, key)
    launch(
        block_gradients, programs,
        q, k, v, sorted_k, sorted_v, flags_or(mask, q), flags_or(slots, q), q if key is None else key,
        dout, dq, by_head_k, by_head_v, *by_head_sorted,
        *strides(q), *strides(k), *strides(v), *strides(sorted_k), *strides(dout),
        *strides(dq), *strides(by_head_k), *strides(by_head_v), *strides(by_head_sorted[0]),
        B * q.shape[1], q.shape[1], L, n, m, threshold, *scales(q), **shape, **options,
    )  # fmt: skip
    for x, dx in zip((by_head_k, by_head_v, *by_head_sorted), (dk, dv, dsorted_k, dsorted_v), strict=True):
        sum_to_groups(x, dx)
    most = max(16, next_power_of_two(n))
    rows, columns = (min(most, 128 if q.element_size() == 2 else 64),) * 2
    launch(
        mixture_gradients, (ceil_div(n, rows) * ceil_div(n, columns) * BH,),
        dsorted_k, dsorted_v, k, v, dR, *strides(dsorted_k), *strides(k), *strides(v),
        H, L, n, _width(n), m, **shape, ROWS=rows, COLUMNS=columns, PRECISION=precision(q),
        num_warps=8 if rows == 128 else 4, num_stages=2,
    )  # fmt: skip
    small: dict[str, Any] = {"ROWS": 32, "COLUMNS": 32, "PRECISION": precision(q), "num_warps": 4, "num_stages": 2}
    launch(
        sum_gradients, (ceil_div(n, 32) * BH,),
        R, dR, sort, dsums, sort.stride(0), BH, n, _width(n), **shape, **small,
    )  # fmt: skip
    heads = ceil_div(BH, PARTS)
    parts = sums.new_empty(ceil_div(BH, heads), n, D)
    launch(sort_gradients, (ceil_div(n, 32), len(parts)), dR, sums, parts, BH, n, _width(n), heads, **shape, **small)
    launch(
        collect_sort, (ceil_div(sort.shape[1], 32),),
        parts, dsort, dsort.stride(0), len(parts), n, sort.shape[1], **shape, COLUMNS=32, num_warps=4,
    )  # fmt: skip
    mixing = _mixing(q, n)
    launch(
        mix_blocks, (ceil_div(n, mixing["ROWS"]) * m * BH,),
        R, dsorted_k, dsorted_v, dk, dv, dsums, *strides(dsorted_k), *strides(dsorted_v), *strides(dk), *strides(dv),
        H, n, _width(n), m, n * m, L, **shape, **mixing, BACK=True,
    )  # fmt: skip
    return dq, dk, dv, dsort


def _mixing(q: Tensor, n: int) -> dict[str, Any]:
    half, most = q.element_size() == 2, max(16, next_power_of_two(n))
    rows, blocks, warps, stages = (
        (64, 32, 4, 2) if not half else (64, 64, 4, 4) if q.shape[3] <= 64 else (128, 64, 8, 3)
    )
    options: dict[str, Any] = {"ROWS": min(rows, most), "BLOCKS": min(blocks, most), "PRECISION": precision(q)}
    return {**options, "num_warps": warps, "num_stages": stages}


def _tiles(
    q: Tensor, k: Tensor, m: int, mask: Tensor | None, slots: Tensor | None, key: Tensor | None
) -> tuple[tuple[int], dict[str, Any]]:
    B, H, L, D = q.shape
    rows = longest_block(D, q.element_size())
    options: dict[str, Any] = {"ROWS": rows, "PRECISION": precision(q), "GROUP": H // k.shape[1]}
    options |= {"HAS_MASK": mask is not None, "HAS_SLOTS": slots is not None, "DROPOUT": key is not None}
    programs = (ceil_div(ceil_div(L, m), rows // m) * B * H,)
    return programs, options | {"num_warps": 8 if D > 64 or rows < 64 else 4, "num_stages": 1}


_operator = Operator(
    "sorted_blocks",
    "Tensor q, Tensor k, Tensor v, Tensor sort, Tensor? mask, Tensor? sources, Tensor? slots, Tensor? key,"
    " int block_size, int threshold",
    _forward,
    lambda q, k, v, sort, mask, sources, slots, key, m, threshold: _outputs(q, k, m),
    _backward,
    outputs=2,
    gradients=(0, 1, 2, 3),
)
