"""Combiner-Axial, row-major: a token's own row directly, every other row as a span that depends on the token's column.

Combiner, https://arxiv.org/abs/2107.05768, section 4.3; the authors' experiments call this Combiner-Axial. On a grid
with rows of m tokens, i = r·m + c, column c attends to row s through the token (s, c):

    o_{s,c} = Σ_t softmax_t(q_{s,c} · k_{s,t} / √D) v_{s,t}          the value of the span
    w_{s,c} = Σ_t softmax_t(q_{s,c} · k_{s,t} / √D) k_{s,t}
    its key:  none k_{s,c};  wsum w_{s,c};  proj W_2 LN(W_1 o_{s,c} + x_{s,c});  wsum_proj the same with w instead of o

    causal           direct {j : j//m = r, j ≤ i}        spans: row s for every s < r
    bidirectional    direct {j : j//m = r}               spans: row s for every s ≠ r

If (s, c) is not a real token, the mean of the row's tokens represents the row. The `proj` kinds read x, the layer's
input of width `input_dim`: `attn(q, k, v, mask, x=x)`. weft.MultiheadAttention passes it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....core import sharding
from ....core.blocks import ceil_div
from ....core.contract import Attention, PositionBias, hide
from ....core.decoding_state import Place
from ....core.dense import dense_softmax, legal, positions, real_tokens
from ....core.dispatch import Kernel
from ....core.dropout import dropout_key
from ....core.heads import spread
from ....core.joint import Columns, Part, Rows, joint_attention
from ....core.linear import through
from ....core.packing import packed_weights
from ....core.partitions import default_block, other_blocks
from ....core.precision import precise, without_autocast
from ....core.registry import register
from ....core.segments import Segments
from ....core.softmax import softmax_attention
from ....core.state import KeyValues
from ....kernels.steps.kernel import Step, slots_step
from ...axial import Grid, decoding_block, row_part
from ..base import Seen, dense_combiner, join_seen
from . import kernel

KEY_SUMMARIES = ("none", "wsum", "proj", "wsum_proj")


def naive(
    attn: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    bias: PositionBias | None = None,
    x: Tensor | None = None,
) -> Tensor:
    (i, j), L, D, real = positions(q, k), k.shape[2], q.shape[-1], real_tokens(k, mask)
    m = attn.block_size or default_block(L, attn.max_length)
    s = torch.arange(ceil_div(L, m), device=q.device)
    cell = s * m + i % m  # (L, rows): the token of row s in the column of i
    there = (cell < L) & real[:, cell.clamp(max=L - 1)]

    def at_cell(x: Tensor) -> Tensor:
        return torch.where(there.view(-1, *[1] * (x.dim() - 3), L, len(s), 1), x[..., cell.clamp(max=L - 1), :], 0)

    row = (j // m == s[:, None]) & real[:, None, None, None]
    within = dense_softmax(at_cell(q) @ k.mT[:, :, None] / D**0.5, row)  # the mean if the cell has no token
    kbar = within @ (v if attn.key_summary == "proj" else k)[:, :, None]
    if attn.key_summary == "none":
        kbar = torch.where(there[:, None, ..., None], at_cell(k), kbar)
    elif x is not None:
        up = attn.up(kbar.movedim(1, 3).flatten(3)) + at_cell(x)
        kbar = attn.down(attn.norm(up)).unflatten(-1, (attn.heads, D)).movedim(3, 1)
    sees = s < i // m if attn.causal else (s != i // m) | attn.own_span
    direct = (i // m == j // m) & legal(attn, q, k, mask)
    return dense_combiner(q, k, v, direct, sees & row.any(-1), kbar, within)


class CombinerAxial(Attention):
    """`own_span` (bidirectional only) also keeps a token's own row as a span, like the published code, which counts it
    twice."""

    def __init__(
        self,
        *,
        block_size: int | None = None,
        key_summary: str = "wsum",
        own_span: bool = False,
        input_dim: int | None = None,
        eps: float = 1e-6,
        **contract: Any,
    ):
        super().__init__(**contract)
        if block_size is not None and block_size < 1:
            raise ValueError(f"block_size, the width of the grid, must be at least 1, got {block_size}")
        if key_summary not in KEY_SUMMARIES:
            raise ValueError(f"unknown key_summary {key_summary!r}; choose from {', '.join(KEY_SUMMARIES)}")
        if own_span and self.causal:
            raise ValueError("own_span=True reproduces the published bidirectional code; it requires causal=False")
        self.block_size, self.key_summary, self.own_span = block_size, key_summary, own_span
        self.needs_input = key_summary.endswith("proj")
        if self.needs_input and input_dim is None:
            raise ValueError(f"key_summary={key_summary!r} projects to the width of the layer's input; set input_dim")
        if input_dim is not None and not self.needs_input:
            raise ValueError(f"key_summary={key_summary!r} has no projection; remove input_dim={input_dim}")
        if input_dim is not None:
            self.up = nn.Linear(self.heads * self.head_dim, input_dim)
            self.norm = nn.LayerNorm(input_dim, eps=eps)
            self.down = nn.Linear(input_dim, self.heads * self.head_dim)
            for linear in (self.up, self.down):
                nn.init.xavier_uniform_(linear.weight)
                nn.init.zeros_(linear.bias)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        bias: PositionBias | None,
        x: Tensor | None = None,
    ) -> Tensor:
        return self._attend(q, k, v, mask, self._input(x, q, mask), v)

    @torch.no_grad()
    def weights(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        bias: PositionBias | None = None,
        segments: Tensor | Segments | None = None,
        x: Tensor | None = None,
    ) -> Tensor:
        """The keys of `proj` spans depend on v, so they are computed from v before the identity replaces v."""
        sharding.refuse("weights")
        k, v = spread(q, k, v)
        if segments is not None:
            return packed_weights(self, q, k, v, mask, bias, segments, {} if x is None else {"x": x})
        self.check(q, k, v, mask, bias)
        q, k, v = self.clean(q, k, v, mask)
        B, H, L, _ = k.shape
        identity = hide(torch.eye(L, dtype=v.dtype, device=v.device).expand(B, H, L, L), mask)
        with without_autocast(q):
            return self._attend(q, k, v, mask, self._input(x, q, mask), identity)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, x: Tensor | None, values: Tensor) -> Tensor:
        L = k.shape[2]
        m = self.block_size or default_block(L, self.max_length)
        rows = Rows(m)
        grid = Grid.of(k, values, mask, m, self.causal)
        x_rows = None if x is None else rows.arrange(x[:, None])[:, 0]
        kbar, vbar = self._summarise(rows.arrange(q), grid.k, rows.arrange(v), grid.real, x_rows, grid.v)
        seen = other_blocks(grid.n, self.causal, k.device).view(1, 1, 1, grid.n, grid.n)
        if self.own_span:
            seen = torch.ones_like(seen)
        if grid.real is not None:
            seen = seen & grid.real.any(-1)[:, :, None, None]
        spans = Part(Columns(m), kbar.transpose(2, 3), vbar.transpose(2, 3), seen)
        return joint_attention(q, [row_part(grid), spans], dropout=self.dropout_now, may_be_empty=mask is not None)

    def _summarise(
        self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, x: Tensor | None, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Key and value of every row for every column, (B, H, n, m, D)."""
        allowed = None if real is None else real[:, :, :, None]
        out = softmax_attention(q, k, values, allowed=allowed)
        if self.key_summary == "none":
            if real is None:
                return k, out
            mean = precise(k).sum(3, keepdim=True) / real.sum(-1).clamp(min=1)[..., None, None]
            return torch.where(real[..., None], k, mean.to(k.dtype)), out
        of = k if self.key_summary.startswith("wsum") else v
        mixed = out if of is values else softmax_attention(q, k, of, allowed=allowed)
        if x is None:
            return mixed, out
        heads = through(self.up, mixed.permute(0, 2, 3, 1, 4).flatten(3))
        joined = F.dropout(heads, self.dropout, self.training) + x.to(heads.dtype)
        scale, shift = (p.to(joined.dtype) for p in (self.norm.weight, self.norm.bias))
        key = through(self.down, F.layer_norm(joined, joined.shape[-1:], scale, shift, self.norm.eps))
        return torch.unflatten(key, -1, (self.heads, self.head_dim)).permute(0, 3, 1, 2, 4), out

    def _input(self, x: Tensor | None, q: Tensor, mask: Tensor | None) -> Tensor | None:
        if not self.needs_input:
            if x is not None:
                raise TypeError(f"key_summary={self.key_summary!r} does not read x, the layer's input; remove x=")
            return None
        B, L, dim = q.shape[0], q.shape[2], self.norm.normalized_shape[0]
        if x is None or x.shape != (B, L, dim):
            got = None if x is None else tuple(x.shape)
            raise ValueError(
                f"key_summary={self.key_summary!r} reads the layer's input; pass x= of shape ({B}, {L}, {dim}), "
                f"got {got}; 'wsum' does not need it"
            )
        return x if mask is None else x.masked_fill(~mask[..., None], 0)

    def pattern_for(self, length: int) -> Hashable:
        return self.block_size or default_block(length, self.max_length)

    # Decoding: the tokens of the open row, and the spans of the full rows.

    def empty_state(self, k: Tensor, capacity: int) -> RowState:
        m, (B, H, _, D) = decoding_block(self), k.shape
        width, R = min(m, capacity), ceil_div(capacity, m)
        x = k.new_zeros(B, width, self.norm.normalized_shape[0]) if self.needs_input else None
        spans = KeyValues(k.new_zeros(B, H, m, R, D), k.new_zeros(B, H, m, R, D), k.new_zeros(B, R, dtype=torch.bool))
        return RowState(k.new_zeros(B, H, width, D), KeyValues.empty(k, width), spans, x)

    def state_after(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, capacity: int, x: Tensor | None = None
    ) -> RowState:
        m, L, x = decoding_block(self), k.shape[2], self._input(x, q, mask)
        state, closed = self.empty_state(k, capacity), L - L % m
        room = state.row.slots - (L - closed)
        rest = None if mask is None else mask[:, closed:]
        state.row = KeyValues.of(k[:, :, closed:], v[:, :, closed:], rest, state.row.slots)
        state.q = F.pad(q[:, :, closed:], (0, 0, 0, room)).contiguous()
        if x is not None:
            state.x = F.pad(x[:, closed:], (0, 0, 0, room)).to(k.dtype).contiguous()
        if closed:
            rows, short = Rows(m), state.spans.valid.shape[1] - closed // m
            queries, keys, values = (rows.arrange(t[:, :, :closed]) for t in (q, k, v))
            real = None if mask is None else torch.unflatten(mask[:, None, :closed], 2, (-1, m))
            x_rows = None if x is None else rows.arrange(x[:, None, :closed])[:, 0]
            spans = self._summarise(queries, keys, values, real, x_rows, values)
            kbar, vbar = (F.pad(t.transpose(2, 3), (0, 0, 0, short)).contiguous() for t in spans)
            some = k.new_ones(k.shape[0], closed // m, dtype=torch.bool) if real is None else real[:, 0].any(-1)
            state.spans = KeyValues(kbar, vbar, F.pad(some, (0, short)))
        return state

    def attend_next(self, q, k, v, state: RowState, mask, bias, at: Place, x=None):
        if mask is None:
            mask = torch.ones(q.shape[0], dtype=torch.bool, device=q.device)
        x = self._input(x, q, mask[:, None])
        m, spans = decoding_block(self), state.spans
        r, c = at.i // m, at.i % m
        queries, row = at.put(state.q, q, c), state.row.put(at, k, v, mask, c)
        inputs = None if x is None or state.x is None else at.put(state.x, x, c, 1)
        n, some = at.filled(r, spans.valid.shape[1])
        earlier = at.allowed(spans.valid[:, :n], some)
        column = (t[:, :, c] if at.known else t.index_select(2, c.view(1))[:, :, 0] for t in (spans.k, spans.v))
        seen: Seen = (*(t[:, :, :n] for t in column), earlier)  # type: ignore[assignment]
        k_seen, v_seen, valid = join_seen([row.read(at, c + 1), seen])
        out = softmax_attention(q, k_seen, v_seen, allowed=None if valid is None else valid[:, None, None])
        # If the position is a tensor, every step summarises the open row; the summary is read once the row is full.
        if not at.known or c == m - 1:
            line = queries[:, :, None], row.k[:, :, None], row.v[:, :, None]
            x_row = None if inputs is None else inputs[:, None]
            kbar, vbar = self._summarise(*line, row.valid[:, None, None], x_row, line[2])
            width = m - row.slots  # a row that never becomes full
            kbar, vbar = (F.pad(t.transpose(2, 3), (0, 0, 0, 0, 0, width)) for t in (kbar, vbar))
            real = row.valid.any(-1, keepdim=True)
            spans = KeyValues(at.put(spans.k, kbar, r, 3), at.put(spans.v, vbar, r, 3), at.put(spans.valid, real, r, 1))
        return out, RowState(queries, row, spans, inputs)


@dataclass
class RowState:
    q: Tensor  # (B, H, m, D): the queries of the open row
    row: KeyValues
    spans: KeyValues  # (B, H, m, R, D): for every column, the spans of the full rows; valid (B, R)
    x: Tensor | None  # (B, m, input_dim): the layer's input


def run_kernel(attn: CombinerAxial, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: None) -> Tensor:
    m = attn.block_size or default_block(q.shape[2], attn.max_length)
    key, threshold = dropout_key(attn, q)
    return kernel.combiner_axial(q, k, v, mask, block_size=m, causal=attn.causal, key=key, threshold=threshold)


def step_of(attn: CombinerAxial, state: RowState) -> Step | None:
    return slots_step(state.row, "axial", decoding_block(attn), far=state.spans, queries=state.q)


def lacks(attn: CombinerAxial, *qkv: Tensor) -> str:
    if attn.key_summary != "wsum":
        return f"the kernel supports only key_summary='wsum', got {attn.key_summary!r}"
    return "the kernel does not support own_span=True" if attn.own_span else ""


register(
    "combiner-axial",
    CombinerAxial,
    naive=naive,
    paper="Ren et al. 2021, Combiner: Full Attention Transformer with Sparse Computation Cost (2107.05768)",
    cost="L*sqrt(L)",
    length_dependent="without max_length the default block size depends on the length; set block_size to fix it",
    kernel=Kernel(
        run_kernel,
        lacks,
        kernel.LEAST_LENGTH,
        dropout=True,
        grouped=lambda attn: True,
        step=step_of,
    ),
)
