"""Pool queries and keys along the lines of a grid.

    qbar_i = pool_{j ∈ set(i)} q_j          kbar_i = pool_{j ∈ set(i)} k_j

for every cell i of a grid with rows of `width` tokens: q and k (B, H, L, D) -> qbar and kbar (B, H, cells, D). set(i)
is the real tokens "before", "after", "up_to" (including) the cell on its row or column, or all "others". pool is max,
mean or sum per channel, and zero for an empty set; `some` (B or 1, cells) tells which sets have any token.
`combiner/summaries.py` is the reference, also for the gradients of ties. Tokens are read in place, and cells are
written in token order. Triton is imported only when a kernel runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.blocks import ceil_div
from ...core.tiles import as_flags, next_power_of_two, strides
from ..launch import launch
from ..lines.kernel import Axis, Lines, Rule

POOLS = ("max", "mean", "sum")
LONGEST_LINE = 1024  # the backward holds a group of √LONGEST_LINE rows in registers


def has_kernel(kind: str, axis: Axis, length: int, width: int) -> bool:
    """Return whether the kernel supports this summary on these lines."""
    return kind in POOLS and Lines.of(axis, ceil_div(length, width), width).cells <= LONGEST_LINE


def pool_lines(
    q: Tensor, k: Tensor, mask: Tensor | None, qbar: Tensor, kbar: Tensor, some: Tensor, axis: Axis, which: Rule,
    pool: str, width: int,
) -> None:  # fmt: skip
    """Write qbar, kbar and some."""
    from .forward import pool as kernel

    lines = Lines.of(axis, ceil_div(q.shape[2], width), width)
    sizes, options = _common(q, k, lines, mask, some, which, pool)
    channels = 64
    launch(
        kernel, _programs(q, lines, channels),
        q, k, q if mask is None else as_flags(mask), qbar, kbar, some.view(torch.uint8),
        *strides(q), *strides(k), *strides(qbar), *strides(kbar), *sizes,
        BLOCK_D=channels, CHUNK=min(16, next_power_of_two(lines.cells)), **options, num_warps=1,
    )  # fmt: skip


def line_pool_gradients(
    dqbar: Tensor, dkbar: Tensor, q: Tensor, k: Tensor, mask: Tensor | None, qbar: Tensor, kbar: Tensor, some: Tensor,
    dq: Tensor, dk: Tensor, axis: Axis, which: Rule, pool: str, width: int, *, more: bool,
) -> None:  # fmt: skip
    """Write dq and dk; with `more`, add to them."""
    from .backward import pool_gradients

    lines = Lines.of(axis, ceil_div(q.shape[2], width), width)
    sizes, options = _common(q, k, lines, mask, some, which, pool)
    pooled = lines.cells if which == "up_to" else lines.cells - 1
    group = max(1, round(pooled**0.5))  # like `running_max` in combiner/summaries.py, for the same gradients of ties
    channels = 64 if group <= 16 else 32
    launch(
        pool_gradients, _programs(q, lines, channels),
        q, k, q if mask is None else as_flags(mask), qbar, kbar, some.view(torch.uint8), dqbar, dkbar, dq, dk,
        *strides(q), *strides(k), *strides(qbar), *strides(kbar), *sizes[:2],
        *strides(dqbar), *strides(dkbar), *strides(dq), *strides(dk), *sizes[2:],
        BLOCK_D=channels, CHUNK=group, LINE=next_power_of_two(lines.cells), MORE=more, **options, num_warps=1,
    )  # fmt: skip


def _common(q: Tensor, k: Tensor, lines: Lines, mask: Tensor | None, some: Tensor, which: Rule, pool: str):
    B, H, L, D = q.shape
    per_batch = (0 if mask is None else mask.shape[1]), (0 if some.shape[0] == 1 else some.stride(0))
    sizes = (*per_batch, B * H, H, L, lines.cells, lines.line_step, lines.cell_step)
    options = {"D": D, "RULE": which, "POOL": pool, "HAS_MASK": mask is not None, "GROUP": H // k.shape[1]}
    return sizes, options


def _programs(q: Tensor, lines: Lines, channels: int) -> tuple[int, int]:
    return lines.lines * q.shape[0] * q.shape[1] * ceil_div(q.shape[3], channels), 2
