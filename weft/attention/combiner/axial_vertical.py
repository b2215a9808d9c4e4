"""Combiner-Axial, vertical: a token's own row and column directly, every other column as one span.

Combiner, https://arxiv.org/abs/2107.05768, section 4.3. On a grid with rows of m tokens, i = r·m + c:

    causal           direct {j : j//m = r, j ≤ i} ∪ {j : j%m = c, j//m < r}     spans {j : j%m = c', j//m < r}, c' ≠ c
    bidirectional    direct {j : j//m = r} ∪ {j : j%m = c}                      spans {j : j%m = c', j//m ≠ r}, c' ≠ c

The sparse parent, `axial`, attends only to the direct set.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.contract import PositionBias
from ...core.dense import positions
from ...core.joint import Layout, Part
from ...core.partitions import default_block
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
    i, c = i[:, None], torch.arange(m, device=q.device)[:, None]
    return combiner_naive(attn, q, k, v, mask, direct, (j % m == c) & (c != i % m) & (j // m != i // m))


class CombinerAxialVertical(GridCombiner):
    """`block_size` is the width of the grid."""

    columns_as_spans = True

    def __init__(self, *, block_size: int | None = None, summary: str = "max", **contract: Any):
        super().__init__(block_size=block_size, summary=summary, **contract)

    def spans(self, grid: Grid, q: Tensor, row: Part, column: Part) -> list[Part]:
        return [column_spans(row.layout, grid, q, self.summary, which) for which in self.column_spans if grid.n > 1]


def column_spans(layout: Layout, grid: Grid, q: Tensor, summary: Summary, which: str) -> Part:
    """For every row (`layout`) and every other column: the summary of the column's tokens before, after or outside
    this row."""
    real = None if grid.real is None else grid.real.transpose(2, 3)
    q, k, v = q.transpose(2, 3), grid.k.transpose(2, 3), grid.v.transpose(2, 3)
    first = 0
    if which == "before":  # row r uses the summary up to row r - 1; the first row has none
        first, which = 1, "up_to"
        q, k, v = (t[..., :-1, :] for t in (q, k, v))
        real = None if real is None else real[..., :-1]
    kbar, vbar, some = line_summaries(summary, q, k, v, real, which)
    c = torch.arange(grid.m, device=q.device)
    allowed = (c[:, None] != c) & some.transpose(2, 3)[:, :, :, None]
    return Part(layout, kbar.transpose(2, 3), vbar.transpose(2, 3), allowed, first=first)


register(
    "combiner-axial-vertical",
    CombinerAxialVertical,
    naive=naive,
    paper="Ren et al. 2021, Combiner: Full Attention Transformer with Sparse Computation Cost (2107.05768)",
    cost="L*sqrt(L)",
    length_dependent="without max_length the default block size depends on the length; set block_size to fix it",
    kernel=KERNEL,
)
