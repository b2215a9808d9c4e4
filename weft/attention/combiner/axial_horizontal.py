"""Combiner-Axial, horizontal: a token's own row and column directly, every other row as one span.

Combiner, https://arxiv.org/abs/2107.05768, section 4.3. On a grid with rows of m tokens, i = r·m + c:

    causal           direct {j : j//m = r, j ≤ i} ∪ {j : j%m = c, j//m < r}     spans {j : j//m = r', j%m ≠ c}, r' < r
    bidirectional    direct {j : j//m = r} ∪ {j : j%m = c}                      spans {j : j//m = r', j%m ≠ c}, r' ≠ r

`split` makes two spans of each row, left and right of the token's column, as the published code does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.blocks import ceil_div
from ...core.contract import PositionBias
from ...core.dense import positions
from ...core.joint import Layout, Part
from ...core.partitions import default_block, other_blocks
from ...core.registry import register
from ..axial import Grid
from .base import combiner_naive, line_summaries
from .grid import KERNEL, GridCombiner
from .summaries import Summary


def naive(
    attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bias: PositionBias | None = None
) -> Tensor:
    i, j = positions(q, k)
    m = attn.block_size or default_block(k.shape[2], attn.max_length)
    direct = (i // m == j // m) | (i % m == j % m)
    i, r = i[:, None], torch.arange(ceil_div(k.shape[2], m), device=q.device)[:, None]
    row, left, right = (j // m == r) & (r != i // m), j % m < i % m, j % m > i % m
    spans = torch.cat([row & left, row & right], 1) if attn.split else row & (left | right)
    return combiner_naive(attn, q, k, v, mask, direct, spans)


class CombinerAxialHorizontal(GridCombiner):
    """`block_size` is the width of the grid. `split` summarises the tokens before and after a column separately."""

    def __init__(
        self,
        *,
        block_size: int | None = None,
        summary: str = "max",
        split: bool = False,
        **contract: Any,
    ):
        super().__init__(block_size=block_size, summary=summary, **contract)
        self.rows_as_spans = ("before", "after") if split else ("others",)

    @property
    def split(self) -> bool:
        """Read-only: kernels are planned for it."""
        return len(self.rows_as_spans) == 2

    def spans(self, grid: Grid, q: Tensor, row: Part, column: Part) -> list[Part]:
        return [row_spans(column.layout, grid, q, self.summary, which) for which in self.rows_as_spans]


def row_spans(layout: Layout, grid: Grid, q: Tensor, summary: Summary, which: str) -> Part:
    """For every column (`layout`) and every other row: the summary of the row's tokens before, after or outside it."""
    kbar, vbar, some = line_summaries(summary, q, grid.k, grid.v, grid.real, which)
    allowed = other_blocks(grid.n, grid.causal, q.device) & some.transpose(2, 3)[:, :, :, None]
    return Part(layout, kbar.transpose(2, 3), vbar.transpose(2, 3), allowed)


register(
    "combiner-axial-horizontal",
    CombinerAxialHorizontal,
    naive=naive,
    paper="Ren et al. 2021, Combiner: Full Attention Transformer with Sparse Computation Cost (2107.05768)",
    cost="L*sqrt(L)",
    length_dependent="without max_length the default block size depends on the length; set block_size to fix it",
    kernel=KERNEL,
)
