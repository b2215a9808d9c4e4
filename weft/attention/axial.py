"""Axial attention: a token attends to its row and its column.

Ho et al., Axial Attention in Multidimensional Transformers, https://arxiv.org/abs/1912.12180. One softmax covers the
row and the column, as in Combiner, https://arxiv.org/abs/2107.05768. The axial Combiners add summaries of all other
tokens.

    i = r·m + c          Ω_i = {j : j//m = r} ∪ {j : j%m = c}          and j ≤ i if causal
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.blocks import both, ceil_div
from ..core.contract import Attention, PositionBias
from ..core.decoding_state import Place
from ..core.dense import dense_attention, positions
from ..core.dispatch import Kernel
from ..core.dropout import dropout_key
from ..core.joint import Columns, Layout, Part, Rows, joint_attention, token_positions, valid_in
from ..core.partitions import default_block, other_blocks, own_block
from ..core.registry import register
from ..core.state import KeepsAll, KeyValues, attend_to
from ..kernels.lines.kernel import LEAST_LENGTH, LinePart, line_attention


def naive(
    attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bias: PositionBias | None = None
) -> Tensor:
    """The paper attends along one axis after the other; here one softmax covers both, as in Combiner."""
    i, j = positions(q, k)
    m = attn.block_size or default_block(k.shape[2], attn.max_length)
    return dense_attention(attn, q, k, v, mask, bias, (i // m == j // m) | (i % m == j % m))


@dataclass
class Grid:
    """k and v on a grid with rows of m tokens, and which cells are real (None: all)."""

    k: Tensor  # (B, H, n, m, D)
    v: Tensor
    real: Tensor | None  # (B or 1, 1, n, m)
    causal: bool

    @property
    def n(self) -> int:
        return self.k.shape[2]

    @property
    def m(self) -> int:
        return self.k.shape[3]

    @classmethod
    def of(cls, k: Tensor, v: Tensor, mask: Tensor | None, m: int, causal: bool) -> Grid:
        rows = Rows(m)
        # Right padding is never in the past of a real token, so causal mechanisms can ignore it.
        real = None if causal and mask is None else valid_in(rows, mask, k.shape[2], m, k.device)
        return cls(rows.arrange(k), rows.arrange(v), real, causal)


def row_part(grid: Grid, bias: PositionBias | None = None, length: int = 0) -> Part:
    """A token's own row: {j : j//m = r}."""
    allowed = own_block(grid.m, grid.causal, grid.k.device).view(1, 1, 1, grid.m, grid.m) if grid.causal else None
    allowed = both(allowed, None if grid.real is None else grid.real[:, :, :, None, :])
    return Part(Rows(grid.m), grid.k, grid.v, allowed, _between(Rows(grid.m), bias, length, grid.k.device))


def column_part(grid: Grid, bias: PositionBias | None = None, length: int = 0) -> Part:
    """A token's own column without its own row: {j : j%m = c, j//m ≠ r}."""
    allowed = other_blocks(grid.n, grid.causal, grid.k.device).view(1, 1, 1, grid.n, grid.n)
    if grid.real is not None:
        allowed = allowed & grid.real.transpose(2, 3)[:, :, :, None, :]
    values = _between(Columns(grid.m), bias, length, grid.k.device)
    return Part(Columns(grid.m), grid.k.transpose(2, 3), grid.v.transpose(2, 3), allowed, values)


def _between(layout: Layout, bias: PositionBias | None, length: int, device: torch.device) -> Tensor | None:
    """Position bias between the tokens of each group of a layout."""
    if bias is None:
        return None
    at = token_positions(layout, length, device)
    return bias(at[..., :, None], at[..., None, :])


class AxialAttention(KeepsAll):
    """`block_size` is the width of the grid. The last row may be partial."""

    def __init__(self, *, block_size: int | None = None, **contract: Any):
        super().__init__(**contract)
        if block_size is not None and block_size < 1:
            raise ValueError(f"block_size, the width of the grid, must be at least 1, got {block_size}")
        self.block_size = block_size

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: PositionBias | None) -> Tensor:
        L = k.shape[2]
        grid = Grid.of(k, v, mask, self.block_size or default_block(L, self.max_length), self.causal)
        parts = [row_part(grid, bias, L), column_part(grid, bias, L)]
        return joint_attention(q, parts, dropout=self.dropout_now, may_be_empty=mask is not None)

    def pattern_for(self, length: int) -> Hashable:
        return self.block_size or default_block(length, self.max_length)

    def empty_state(self, k: Tensor, capacity: int) -> KeyValues:
        decoding_block(self)  # raises an error if the block size is unknown
        return super().empty_state(k, capacity)

    def attend_next(self, q, k, v, state: KeyValues, mask, bias, at: Place):
        state = state.put(at, k, v, mask, at.i)
        return attend_to(q, state, at, *row_and_column(at, decoding_block(self)), bias), state


def decoding_block(attn: Attention, levels: int = 2) -> int:
    """Block size for decoding, when the final length is unknown."""
    block_size = getattr(attn, "block_size", None)
    if block_size is None and attn.max_length is None:
        raise ValueError(
            f"{attn.name} derives its block size from the length, which is unknown while decoding; "
            "set block_size or max_length"
        )
    return block_size or default_block(0, attn.max_length, levels)


def row_and_column(at: Place, m: int) -> tuple[Tensor, Tensor]:
    """The earlier tokens of the newest token's column and of its row, and which of them exist."""
    row, c = at.i - at.i % m, at.i % m
    column = c + m * at.first(row // m if at.known else ceil_div(at.capacity, m))
    own = row + at.first(c + 1 if at.known else m)
    return torch.cat([column, own]), torch.cat([column < row, own <= at.i])


def run_kernel(attn: AxialAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: None) -> Tensor:
    L = k.shape[2]
    m = min(attn.block_size or default_block(L, attn.max_length), L)
    parts = [LinePart(0, "row", "up_to" if attn.causal else "all")]
    if m < L:
        parts.append(LinePart(0, "column", "before" if attn.causal else "others"))
    key, threshold = dropout_key(attn, q)
    return line_attention(q, k, v, mask, parts, width=m, key=key, threshold=threshold)


register(
    "axial",
    AxialAttention,
    naive=naive,
    paper="Ho et al. 2019, Axial Attention in Multidimensional Transformers (1912.12180)",
    cost="L*sqrt(L)",
    bias=True,
    length_dependent="without max_length the default block size depends on the length; set block_size to fix it",
    kernel=Kernel(run_kernel, least_length=LEAST_LENGTH, dropout=True, grouped=lambda attn: True),
)
