"""Pool queries and keys along the lines of a grid: forward and backward as one PyTorch operator.

    qbar_i = pool_{j ∈ set(i)} q_j          kbar_i = pool_{j ∈ set(i)} k_j

for every cell i of a grid with rows of `width` tokens. set(i) is the real tokens "before", "after", "up_to" (including)
the cell on its row or column, or all "others". pool is max, mean or sum per channel, and zero for an empty set.
`combiner/summaries.py` is the reference, also for the gradients of ties. Tokens are read in place, and cells are
written in token order. Triton is imported only when a kernel runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.blocks import ceil_div
from ...core.dispatch import DTYPES, LARGEST_HEAD
from ...core.precision import autocast
from ...core.tiles import as_flags, empty_rows, for_operator, next_power_of_two, rows_contiguous, strides
from ..launch import launch
from ..lines.kernel import AXES, Axis, Lines, Rule
from ..operator import Operator

POOLS = ("max", "mean", "sum")
RULES: tuple[Rule, ...] = ("before", "after", "up_to", "others")
LONGEST_LINE = 1024  # the backward holds a group of √LONGEST_LINE rows in registers


def has_kernel(kind: str, axis: Axis, length: int, width: int) -> bool:
    """Return whether the kernel supports this summary on these lines."""
    return kind in POOLS and Lines.of(axis, ceil_div(length, width), width).cells <= LONGEST_LINE


def line_pool(
    q: Tensor, k: Tensor, mask: Tensor | None, axis: Axis, which: Rule, pool: str, *, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k (B, H, L, D) and mask (B, L) -> qbar, kbar (B, H, cells, D), and which cells have any token to pool,
    (B or 1, cells)."""
    q, k = autocast(q, k)
    return _operator(q, k, for_operator(mask), axis, which, pool, width)


def _forward(q, k, mask, axis, which, pool, width):
    from .forward import pool as kernel

    lines = _check(q, k, axis, which, pool, width)
    qbar, kbar, some = outputs = _outputs(q, k, mask, width)
    q, k = rows_contiguous(q), rows_contiguous(k)
    sizes, options = _common(q, lines, mask, some, which, pool)
    channels = 64
    launch(
        kernel, _programs(q, lines, channels),
        q, k, q if mask is None else as_flags(mask), qbar, kbar, some.view(torch.uint8),
        *strides(q), *strides(k), *strides(qbar), *strides(kbar), *sizes,
        BLOCK_D=channels, CHUNK=min(16, next_power_of_two(lines.cells)), **options, num_warps=1,
    )  # fmt: skip
    return outputs


def _outputs(q: Tensor, k: Tensor, mask: Tensor | None, width: int) -> tuple[Tensor, Tensor, Tensor]:
    B, H, L, D = q.shape
    cells = ceil_div(L, width) * width
    qbar, kbar = (x.new_empty(B, cells, H, D).transpose(1, 2) for x in (q, k))
    return qbar, kbar, q.new_empty(1 if mask is None else B, cells, dtype=torch.bool)


def _backward(dqbar, dkbar, q, k, mask, qbar, kbar, some, axis, which, pool, width):
    from .backward import pool_gradients

    lines = _check(q, k, axis, which, pool, width)
    dq, dk = empty_rows(q), empty_rows(k)
    dqbar, dkbar, q, k = (rows_contiguous(x) for x in (dqbar, dkbar, q, k))
    sizes, options = _common(q, lines, mask, some, which, pool)
    pooled = lines.cells if which == "up_to" else lines.cells - 1
    group = max(1, round(pooled**0.5))  # like `running_max` in combiner/summaries.py, for the same gradients of ties
    channels = 64 if group <= 16 else 32
    launch(
        pool_gradients, _programs(q, lines, channels),
        q, k, q if mask is None else as_flags(mask), qbar, kbar, some.view(torch.uint8), dqbar, dkbar, dq, dk,
        *strides(q), *strides(k), *strides(qbar), *strides(kbar), *sizes[:2],
        *strides(dqbar), *strides(dkbar), *strides(dq), *strides(dk), *sizes[2:],
        BLOCK_D=channels, CHUNK=group, LINE=next_power_of_two(lines.cells), **options, num_warps=1,
    )  # fmt: skip
    return dq, dk


_operator = Operator(
    "line_pool",
    "Tensor q, Tensor k, Tensor? mask, str axis, str which, str pool, int width",
    _forward,
    lambda q, k, mask, axis, which, pool, width: _outputs(q, k, mask, width),
    _backward,
    outputs=3,
    returned=3,
    differentiable=(0, 1),
    gradients=(0, 1),
)


def _common(q: Tensor, lines: Lines, mask: Tensor | None, some: Tensor, which: Rule, pool: str):
    B, H, L, D = q.shape
    per_batch = (0 if mask is None else mask.shape[1]), (0 if some.shape[0] == 1 else some.stride(0))
    sizes = (*per_batch, B * H, H, L, lines.cells, lines.line_step, lines.cell_step)
    return sizes, {"D": D, "RULE": which, "POOL": pool, "HAS_MASK": mask is not None}


def _programs(q: Tensor, lines: Lines, channels: int) -> tuple[int, int]:
    return lines.lines * q.shape[0] * q.shape[1] * ceil_div(q.shape[3], channels), 2


def _check(q: Tensor, k: Tensor, axis: Axis, which: Rule, pool: str, width: int) -> Lines:
    if axis not in AXES or which not in RULES or pool not in POOLS:
        raise ValueError(
            f"the kernel pools along a 'row' or 'column' by {', '.join(RULES)} with {', '.join(POOLS)}, "
            f"got {axis!r}, {which!r}, {pool!r}"
        )
    if q.shape != k.shape or q.dtype != k.dtype or q.dtype not in DTYPES or q.shape[3] > LARGEST_HEAD:
        raise ValueError(
            f"the kernel needs q and k of the same shape and dtype (float32, float16 or bfloat16) with head_dim up to "
            f"{LARGEST_HEAD}, got {tuple(q.shape)} {q.dtype} and {tuple(k.shape)} {k.dtype}"
        )
    lines = Lines.of(axis, ceil_div(q.shape[2], width), width)
    if lines.cells > LONGEST_LINE:
        raise ValueError(f"the kernel supports lines of up to {LONGEST_LINE} cells, got {lines.cells}")
    return lines
