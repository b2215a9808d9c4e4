"""Sparse Transformer attention, fixed and strided.

Child et al., Generating Long Sequences with Sparse Transformers, https://arxiv.org/abs/1904.10509. One softmax covers
both sets of a pattern:

    fixed      {j : j//l = i//l} ∪ {j : j%l ≥ l - c}          own block, and the last c tokens of every block
    strided    {j : |i - j| ≤ l} ∪ {j : (i - j)%l = 0}        the neighbourhood, and every l-th token

and j ≤ i if causal. Combiner-fixed replaces the last c tokens of a block by a summary of the whole block. The study of
wide attention (https://arxiv.org/abs/2210.00640) changes the fixed pattern in three ways, each an option:
`leading_column` adds the first token of every block; with `cls`, token 0 attends to all tokens, all attend to it, and
the others are indexed without it; `one_way` restricts even bidirectional encoders to j ≤ i.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.blocks import ceil_div, power_of_two
from ...core.contract import PositionBias
from ...core.decoding_state import Place
from ...core.dense import dense_attention, positions
from ...core.dispatch import Kernel
from ...core.dropout import dropout_key
from ...core.joint import Columns, Part, Rows, join_allowed, joint_attention, token_positions, valid_in
from ...core.partitions import fixed_columns, other_blocks, own_block
from ...core.registry import register
from ...core.softmax import softmax_attention
from ...core.state import KeepsAll, KeyValues, attend_to
from ...core.tiles import near_rows
from ...kernels.band import kernel as band
from ..axial import decoding_block
from . import kernel as strided_kernel


def naive(
    attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bias: PositionBias | None = None
) -> Tensor:
    """The paper also has forms with separate heads or layers for the two sets; here one softmax covers both."""
    i, j = (x - int(attn.cls) for x in positions(q, k))  # with cls, token 0 gets index -1
    m = attn._block(k.shape[2])
    if attn.pattern == "strided":
        allowed = ((i - j).abs() <= m) | ((i - j) % m == 0)
    else:
        allowed = (i // m == j // m) | (j % m >= m - attn.columns) | (j % m == 0) & attn.leading_column
    if attn.one_way:
        allowed = allowed & (j <= i)
    return dense_attention(attn, q, k, v, mask, bias, allowed | (i < 0) | (j < 0))


class SparseAttention(KeepsAll):
    """`block_size` is l. The default is 50, or the power of two nearest to √L if that is larger."""

    def __init__(
        self,
        *,
        pattern: str = "fixed",
        block_size: int | None = None,
        columns: int = 10,
        leading_column: bool = False,
        cls: bool = False,
        one_way: bool = False,
        **contract: Any,
    ):
        super().__init__(**contract)
        if pattern not in ("fixed", "strided"):
            raise ValueError(f"pattern must be 'fixed' or 'strided', got {pattern!r}")
        if block_size is not None and block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        if columns < 0:
            raise ValueError(f"columns must be at least 0, got {columns}")
        if pattern == "strided" and leading_column:
            raise ValueError("leading_column=True requires pattern='fixed', got pattern='strided'")
        if cls and self.causal:
            raise ValueError(
                "with cls=True token 0 attends to the whole sequence, which causal=True does not allow; "
                "use causal=False with one_way=True to make the other tokens causal"
            )
        self.pattern, self.block_size, self.columns = pattern, block_size, columns
        self.leading_column, self.cls, self.one_way = leading_column, cls, one_way
        self.first_sees_all = cls

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: PositionBias | None) -> Tensor:
        if not self.cls:
            return self._pattern(q, k, v, mask, bias, None)
        first = self._first(q, k, v, mask, bias)
        if k.shape[2] == 1:
            return first
        rest = mask if mask is None else mask[:, 1:]
        shifted = None if bias is None else lambda i, j: bias(i + 1, j + 1)
        open_to_all = (k[:, :, :1], v[:, :, :1], None if mask is None else mask[:, :1])
        rest_out = self._pattern(q[:, :, 1:], k[:, :, 1:], v[:, :, 1:], rest, shifted, open_to_all)
        return torch.cat([first, rest_out], 2)

    def _first(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: PositionBias | None) -> Tensor:
        """Token 0, which attends to all tokens."""
        j = torch.arange(k.shape[2], device=k.device).view(1, 1, 1, -1)
        allowed = None if mask is None else mask[:, None, None]
        values = None if bias is None else bias(torch.zeros_like(j[..., :1]), j)
        return softmax_attention(q[:, :, :1], k, v, allowed=allowed, bias=values, dropout=self.dropout_now)

    def _pattern(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        bias: PositionBias | None,
        open_to_all: tuple[Tensor, Tensor, Tensor | None] | None,
    ) -> Tensor:
        parts = (self._fixed if self.pattern == "fixed" else self._strided)(k, v, mask, bias)
        if open_to_all is not None:
            parts[0] = _with_first(parts[0], *open_to_all, bias, q.shape[2])
        return joint_attention(q, parts, dropout=self.dropout_now, may_be_empty=mask is not None)

    def _fixed(self, k: Tensor, v: Tensor, mask: Tensor | None, bias: PositionBias | None) -> list[Part]:
        L, device = k.shape[2], k.device
        m = self._block(L)
        layout, causal = Rows(m), self.causal or self.one_way
        blocks_k, blocks_v = layout.arrange(k), layout.arrange(v)
        n = blocks_k.shape[2]
        real = valid_in(layout, mask, L, m, device)
        own = own_block(m, causal, device).view(1, 1, 1, m, m)
        seen = self._columns(m, device)
        c = len(seen)
        others = other_blocks(n, causal, device).repeat_interleave(c, 1).view(1, 1, n, 1, n * c)
        if real is not None:
            own = own & real[:, :, :, None]
            others = others & real[..., seen].flatten(2)[:, :, None, None]
        each = [t[..., seen, :].flatten(2, 3)[:, :, None].expand(-1, -1, n, -1, -1) for t in (blocks_k, blocks_v)]
        front = torch.broadcast_shapes(own.shape[:-1], others.shape[:-1], (1, 1, n, m))
        allowed = torch.cat([own.expand(*front, m), others.expand(*front, n * c)], -1)
        part = Part(layout, torch.cat([blocks_k, each[0]], 3), torch.cat([blocks_v, each[1]], 3), allowed)
        if bias is not None:
            at = token_positions(layout, L, device)
            columns_at = at[..., seen].flatten(2)[:, :, None].expand(-1, -1, n, -1)
            part.bias = bias(at[..., None], torch.cat([at, columns_at], -1)[:, :, :, None])
        return [part]

    def _strided(self, k: Tensor, v: Tensor, mask: Tensor | None, bias: PositionBias | None) -> list[Part]:
        L, device = k.shape[2], k.device
        m = self._block(L)
        causal = self.causal or self.one_way
        real = torch.ones(1, L, dtype=torch.bool, device=device) if mask is None else mask
        parts = []
        for layout in (Rows(m), Columns(m)):
            keys, values = layout.arrange(k), layout.arrange(v)
            valid = layout.arrange(real[:, None, :, None])[..., 0]
            i = token_positions(layout, L, device)
            j = i
            if isinstance(layout, Rows):  # the neighbourhood includes the previous and the next block
                keys, values = (_neighbours(t, causal) for t in (keys, values))
                valid, j = _neighbours(valid, causal), _neighbours(i, causal)
            i, j = i[..., :, None], j[..., None, :]
            near = (i - j).abs() <= m
            allowed = valid[..., None, :] & (near if isinstance(layout, Rows) else ~near)
            if causal:
                allowed = allowed & (j <= i)
            parts.append(Part(layout, keys, values, allowed, None if bias is None else bias(i, j)))
        return parts

    def _columns(self, m: int, device: torch.device) -> Tensor:
        """`fixed_columns`, computed on the device: a copy from the CPU would block and break CUDA graphs."""
        columns = torch.arange(max(m - self.columns, 0), m, device=device)
        return F.pad(columns, (1, 0)) if self.leading_column and self.columns < m else columns

    def _block(self, length: int) -> int:
        return self.block_size or max(50, power_of_two((self.max_length or length) ** 0.5))

    def pattern_for(self, length: int) -> Hashable:
        return self._block(length)

    def empty_state(self, k: Tensor, capacity: int) -> KeyValues:
        decoding_block(self)  # raises an error if the block size is unknown
        return super().empty_state(k, capacity)

    def attend_next(self, q, k, v, state: KeyValues, mask, bias, at: Place):
        state, m, i = state.put(at, k, v, mask, at.i), self._block(0), at.i
        blocks = at.first(i // m if at.known else ceil_div(at.capacity, m))
        if self.pattern == "fixed":
            row = i - i % m
            columns = self._columns(m, q.device)
            far, near = (m * blocks[:, None] + columns).flatten(), row + at.first(m)
            exists = far < row
        else:
            far, near = i % m + m * blocks, i - m + at.first(m + 1)
            exists = far < i - m
        seen, allowed = torch.cat([far, near]), torch.cat([exists, (near >= 0) & (near <= i)])
        return attend_to(q, state, at, seen, allowed, bias), state


def _neighbours(x: Tensor, causal: bool) -> Tensor:
    """Join each block (.., n, m, ..) with the previous and, unless causal, the next one: (.., n, 2m or 3m, ..)."""
    ends = [0, 0] * (x.dim() - 3)
    before = F.pad(x, (*ends, 1, 0))[:, :, :-1]
    after = [] if causal else [F.pad(x, (*ends, 0, 1))[:, :, 1:]]
    return torch.cat([before, x, *after], 3)


def _with_first(part: Part, k: Tensor, v: Tensor, valid: Tensor | None, bias: PositionBias | None, length: int) -> Part:
    """Add one key (B, H, 1, D) that all tokens attend to, at position -1 relative to the other tokens."""
    G, K = part.k.shape[2:4]
    keys, values = (torch.cat([x[:, :, None].expand(-1, -1, G, -1, -1), y], 3) for x, y in ((k, part.k), (v, part.v)))
    seen = None if valid is None else valid[:, None, None, None]
    part = Part(part.layout, keys, values, join_allowed((seen, 1), (part.allowed, K), device=k.device), part.bias)
    if bias is not None and part.bias is not None:
        i = token_positions(part.layout, length, k.device)[..., None]
        part.bias = torch.cat([bias(i, torch.full_like(i, -1)), part.bias], -1)
    return part


def run_kernel(attn: SparseAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: None) -> Tensor:
    m, causal = attn._block(k.shape[2] - attn.cls), attn.causal or attn.one_way
    key, threshold = dropout_key(attn, q)
    if attn.pattern == "strided":
        return strided_kernel.strided(q, k, v, mask, block_size=m, causal=causal, key=key, threshold=threshold)
    columns = fixed_columns(m, attn.columns, attn.leading_column)
    options: dict[str, Any] = {"block_size": m, "columns": columns, "causal": causal, "key": key}
    if not attn.cls:
        return band.block_and_columns(q, k, v, mask, **options, threshold=threshold)
    first = attn._first(q, k, v, mask, None)
    if k.shape[2] == 1:
        return first
    # Token 0 ends a block of hidden tokens: there it is in a column, which all others see.
    q, k, v = (near_rows(F.pad(x.transpose(1, 2), (0, 0, 0, 0, m - 1, 0)).transpose(1, 2)) for x in (q, k, v))
    real = torch.ones(k.shape[0], k.shape[2] - m + 1, dtype=torch.bool, device=k.device) if mask is None else mask
    rest = band.block_and_columns(q, k, v, F.pad(real, (m - 1, 0)), **options, threshold=threshold)
    return torch.cat([first.transpose(1, 2), rest[:, :, m:].transpose(1, 2)], 1).transpose(1, 2)


def lacks(attn: SparseAttention, *qkv: Tensor) -> str:
    if attn.cls and (attn.pattern == "strided" or not attn.columns):
        return "with cls=True, the kernel supports only pattern='fixed' with at least one of `columns`"
    return ""


register(
    "sparse",
    SparseAttention,
    naive=naive,
    paper="Child et al. 2019, Generating Long Sequences with Sparse Transformers (1904.10509)",
    cost="L*sqrt(L)",
    bias=True,
    length_dependent="without max_length the default block size depends on the length; set block_size to fix it",
    kernel=Kernel(
        run_kernel,
        lacks,
        band.LEAST_LENGTH,
        dropout=True,
        grouped=lambda attn: not attn.cls,
    ),
)
