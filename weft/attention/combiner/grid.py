"""Options, kernels and decoding shared by the Combiners on a grid.

While decoding, row r is open. When it is full, each of its cells is summarised for later queries: along its column with
all rows so far (vertical spans), and along its row (horizontal spans).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.blocks import ceil_div
from ...core.contract import PositionBias
from ...core.decoding_state import Place, tree_map
from ...core.dispatch import Kernel, without_dropout
from ...core.dropout import dropout_key
from ...core.heads import spread
from ...core.joint import Columns, Part, Rows, valid_in
from ...core.partitions import default_block
from ...core.softmax import softmax_attention
from ...core.state import KeyValues
from ...kernels.line_pool.combiner import GridPlan, grid_attention
from ...kernels.lines import kernel
from ...kernels.lines.kernel import Axis, LinePart, Rule
from ..axial import Grid, column_part, decoding_block, row_and_column, row_part
from .base import Combiner, Seen, join_seen, line_summaries


@dataclass
class GridState:
    """All keys and values, the queries of the open row, and the summaries of the full rows."""

    cache: KeyValues  # whole rows
    q: Tensor  # (B, H, m, D): the queries of the open row
    query_features: Tensor  # (B, H, m, D): pooled down each column, over the full rows
    key_features: Tensor
    above: KeyValues  # the vertical spans of the open row, one per column
    count: Tensor  # (B, m): tokens in them
    rows: list[
        tuple[Tensor, Tensor, Tensor]
    ]  # the horizontal spans (B, H, m, R, D) and (B, m, R): one per column for every full row


class GridCombiner(Combiner):
    """The own row and column directly, and the `spans` of each variant.

    The fused version attends with `weft/kernels/lines` and pools with `line_pool`. PyTorch pools learned and ReLU
    summaries, and lines longer than `line_pool.LONGEST_LINE` cells.
    """

    columns_as_spans = False
    columns_split = False  # bidirectional: two spans, above and below the query's row
    rows_as_spans: tuple[Rule, ...] = ()
    # `causal` and plan of the last new plan in eager mode; a compiled one would be compiled again if this changed
    _planned: tuple[bool, GridPlan] | None = None

    def __init__(self, *, block_size: int | None, summary: str, **contract: Any):
        super().__init__(summary=summary, **contract)
        if block_size is not None and block_size < 1:
            raise ValueError(f"block_size, the width of the grid, must be at least 1, got {block_size}")
        self.block_size = block_size

    def pattern_for(self, length: int) -> Hashable:
        return self.block_size or default_block(length, self.max_length)

    def parts(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> list[Part]:
        m = self.block_size or default_block(k.shape[2], self.max_length)
        grid = Grid.of(k, v, mask, m, self.causal)
        row, column = row_part(grid), column_part(grid)
        return [row, column, *self.spans(grid, Rows(m).arrange(q), row, column)]

    def spans(self, grid: Grid, q: Tensor, row: Part, column: Part) -> list[Part]:
        """Summaries of the other tokens, with the layout of `row` or `column`. q is (B, H, n, m, D)."""
        raise NotImplementedError

    @property
    def column_spans(self) -> tuple[Rule, ...]:
        """The set of other rows that each span of a column summarises."""
        if not self.columns_as_spans:
            return ()
        if self.causal:
            return ("before",)
        return ("before", "after") if self.columns_split else ("others",)

    def run_kernel(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: PositionBias | None) -> Tensor:
        dtype = q.dtype
        q, k, v = (self._widen(t) for t in (q, k, v))
        m = self.block_size or default_block(q.shape[2], self.max_length)
        plan, pool, (key, threshold) = self._plan(), self.summary.kind, dropout_key(self, q)
        if plan.has_kernel(pool, k.shape[2], m):
            out = grid_attention(q, k, v, mask, plan, pool=pool, width=m, key=key, threshold=threshold)
        else:
            k, v = spread(q, k, v)
            spans, parts = self.line_parts()
            parts = self.direct_parts() + parts
            summaries = tuple(self._line_spans(q, k, v, mask, m, *span) for span in spans)
            out = kernel.line_attention(q, k, v, mask, parts, width=m, spans=summaries, key=key, threshold=threshold)
        return out.to(dtype) if self.long_sums else out

    def _plan(self) -> GridPlan:
        if not torch.compiler.is_compiling() and self._planned is not None and self._planned[0] == self.causal:
            return self._planned[1]
        spans, parts = self.line_parts()
        plan = GridPlan.of(self.direct_parts() + parts, spans)
        if not torch.compiler.is_compiling():
            self._planned = self.causal, plan
        return plan

    def direct_parts(self) -> list[LinePart]:
        """The own row and column."""
        return [LinePart(0, "row", "up_to" if self.causal else "all"), LinePart(0, "column", self._other_rows)]

    def line_parts(self, before: int = 0) -> tuple[list[tuple[Axis, Rule]], list[LinePart]]:
        """The spans, and the parts that attend to them; `before`: spans of other Combiners, for the parts' sources."""
        columns: list[tuple[Axis, Rule]] = [("column", which) for which in self.column_spans]
        spans = columns + [("row", which) for which in self.rows_as_spans]
        parts = [
            LinePart(number, "row", "others") if axis == "column" else LinePart(number, "column", self._other_rows)
            for number, (axis, _) in enumerate(spans, before + 1)
        ]
        return spans, parts

    @property
    def _other_rows(self) -> Rule:
        return "before" if self.causal else "others"

    def _line_spans(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, m: int, axis: Axis, which: Rule
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`line_summaries` in cell order, (B, H, cells, D), pooled by PyTorch."""
        qbar, kbar, some = self._pooled(q, k, mask, m, axis, which)
        vbar = kernel.line_attention(qbar, k, v, mask, [LinePart(0, axis, which)], width=m)
        return kbar, vbar, some

    def _pooled(
        self, q: Tensor, k: Tensor, mask: Tensor | None, m: int, axis: Axis, which: Rule
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Same as `line_pool`, for the summaries and lines that it does not support."""
        s = self.summary
        layout = Rows(m) if axis == "row" else Columns(m)
        real = None if self.causal and mask is None else valid_in(layout, mask, k.shape[2], m, k.device)
        lines_q, lines_k = layout.arrange(q), layout.arrange(k)
        lines, T = lines_k.shape[2:4]
        tokens = torch.ones(1, 1, lines, T, device=k.device, dtype=torch.long) if real is None else real.long()
        up_to = tokens.cumsum(3)
        everything = up_to[..., -1:]
        count = {"before": up_to - tokens, "after": everything - up_to, "others": everything - tokens}[which]

        def pool(f: Tensor) -> Tensor:
            if which == "after":
                return s.before(f.flip(3)).flip(3)
            return s.before(f) if which == "before" else s.others(f)

        cells = lines * T
        qbar = layout.restore(s.finish(pool(s.lift_queries(lines_q, real)), count, q.dtype), cells)
        kbar = layout.restore(s.finish(pool(s.lift_keys(lines_k, real)), count, k.dtype), cells)
        return qbar, kbar, layout.restore((count > 0)[..., None], cells)[:, 0, :, 0]

    def empty_state(self, k: Tensor, capacity: int) -> GridState:
        k, m, (B, H, _, D) = self._widen(k), decoding_block(self), k.shape
        R = ceil_div(capacity, m)
        features = k.new_full((2, B, H, m, D), self.summary.neutral, dtype=self.summary.dtype(k.dtype))
        rows = [
            (k.new_zeros(B, H, m, R, D), k.new_zeros(B, H, m, R, D), k.new_zeros(B, m, R, dtype=torch.bool))
            for _ in self.rows_as_spans
        ]
        return GridState(
            KeyValues.empty(k, R * m),
            k.new_zeros(B, H, m, D),
            features[0].clone(),
            features[1].clone(),
            KeyValues.empty(k, m),
            k.new_zeros(B, m, dtype=torch.long),
            rows,
        )

    def summarised(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, capacity: int) -> GridState:
        s, m, L = self.summary, decoding_block(self), k.shape[2]
        state, closed = self.empty_state(k, capacity), L - L % m
        state.cache = KeyValues.of(k, v, mask, state.cache.slots)
        state.q = F.pad(q[:, :, closed:], (0, 0, 0, m - L % m)).contiguous()
        if not closed:
            return state
        n = closed // m
        q, k, v = (torch.unflatten(t[:, :, :closed], 2, (n, m)) for t in (q, k, v))
        real = torch.unflatten(state.cache.valid[:, :closed], 1, (n, m))[:, None]
        short = state.cache.slots // m - n
        for index, which in enumerate(self.rows_as_spans):
            kbar, vbar, some = line_summaries(s, q, k, v, real, which)
            keys, values = (F.pad(t.transpose(2, 3), (0, 0, 0, short)).contiguous() for t in (kbar, vbar))
            state.rows[index] = keys, values, F.pad(some[:, 0].mT, (0, short))
        if self.columns_as_spans:
            state.query_features = s.reduce(s.lift_queries(q, real), 2)
            state.key_features = s.reduce(s.lift_keys(k, real), 2)
            state.count = real[:, 0].sum(1)
            state.above = self._above(state, k, v, real, q.dtype)
        return state

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, real: Tensor, state: GridState, at: Place
    ) -> tuple[Seen, GridState]:
        m, i = decoding_block(self), at.i
        r, c = i // m, i % m
        cache = state.cache.put(at, k, v, real, i)
        state = replace(state, cache=cache, q=at.put(state.q, q, c))
        direct, allowed = row_and_column(at, m)
        direct = direct.minimum(at.tensor)
        keys, values = cache.k.index_select(2, direct), cache.v.index_select(2, direct)
        seen: list[Seen] = [(keys, values, cache.valid.index_select(1, direct) & allowed)]
        if self.columns_as_spans and (not at.known or r):
            above = state.above
            seen.append((above.k, above.v, above.valid & (at.first(m) != c)))
        n, some = at.filled(r, cache.slots // m)
        for spans in state.rows:
            kbar, vbar = (t[:, :, c] if at.known else t.index_select(2, c.view(1))[:, :, 0] for t in spans[:2])
            valid = (spans[2][:, c] if at.known else spans[2].index_select(1, c.view(1))[:, 0])[:, :n]
            seen.append((kbar[:, :, :n], vbar[:, :, :n], valid if some is None else valid & some))
        return join_seen(seen), self._close(state, at, m) if not at.known or c == m - 1 else state

    def _close(self, state: GridState, at: Place, m: int) -> GridState:
        """Summarise the open row, if it is full."""
        s, r, full = self.summary, at.i // m, (at.i + 1) % m == 0
        q, row = state.q, r * m + at.first(m)
        k, v, real = (
            t.index_select(d, row) for t, d in ((state.cache.k, 2), (state.cache.v, 2), (state.cache.valid, 1))
        )
        rows = []
        for which, spans in zip(self.rows_as_spans, state.rows, strict=True):
            line = q[:, :, None], k[:, :, None], v[:, :, None]
            kbar, vbar, some = line_summaries(s, *line, real[:, None, None], which)
            kbar, vbar = (at.put(t, new.transpose(2, 3), r, 3) for t, new in zip(spans[:2], (kbar, vbar), strict=True))
            rows.append((kbar, vbar, at.put(spans[2], some[:, 0].expand(-1, 1, m).mT, r, 2)))
        state = replace(state, rows=rows)
        if not self.columns_as_spans:
            return state
        query_features = s.join(state.query_features, s.lift_queries(q, real[:, None]))
        key_features = s.join(state.key_features, s.lift_keys(k, real[:, None]))
        # Where the position is a tensor this runs in every step, and its result is kept only if the row is full.
        joined = replace(state, query_features=query_features, key_features=key_features, count=state.count + real)
        n, exists = at.filled(r + 1, state.cache.slots // m)
        keys, values = (torch.unflatten(t[:, :, : n * m], 2, (n, m)) for t in (state.cache.k, state.cache.v))
        members = torch.unflatten(state.cache.valid[:, : n * m], 1, (n, m))[:, None]
        members = members if exists is None else members & exists[:, None]
        joined.above = self._above(joined, keys, values, members, q.dtype)
        return tree_map(lambda old, new: old if old is new else at.set(old, at.choose(full, new, old)), state, joined)

    def _above(self, state: GridState, k: Tensor, v: Tensor, real: Tensor, dtype: torch.dtype) -> KeyValues:
        """The summary of every column of k and v (B, H, n, m, D) with `real` (B, 1, n, m)."""
        s, count = self.summary, state.count[:, None]
        qbar = s.finish(state.query_features, count, dtype)[:, :, :, None]
        kbar = s.finish(state.key_features, count, dtype)
        allowed = real.transpose(2, 3)[:, :, :, None]
        vbar = softmax_attention(qbar, k.transpose(2, 3), v.transpose(2, 3), allowed=allowed)[:, :, :, 0]
        return KeyValues(kbar, vbar, state.count > 0)


KERNEL = Kernel(
    GridCombiner.run_kernel,
    least_length=kernel.LEAST_LENGTH,
    dropout=True,
    grouped=lambda attn: True,
    auto=without_dropout,
)
