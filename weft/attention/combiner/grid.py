"""Options, kernels and decoding shared by the Combiners on a grid.

While decoding, row r is open. When it is full, each of its cells is summarised for later queries: along its column with
all rows so far (vertical spans), and along its row (horizontal spans).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.contract import PositionBias
from ...core.dispatch import Kernel
from ...core.joint import Columns, Rows, valid_in
from ...core.partitions import default_block
from ...core.softmax import softmax_attention
from ...core.state import KeyValueState
from ...kernels.line_pool import kernel as line_pool
from ...kernels.lines import kernel
from ...kernels.lines.kernel import Axis, LinePart, Rule
from ..axial import decoding_block
from .base import Combiner, Seen, join_seen, line_summaries


@dataclass
class GridState:
    """All keys and values, the queries of the open row, and the summaries of the full rows."""

    cache: KeyValueState = field(default_factory=KeyValueState.empty)
    row_queries: list[Tensor] = field(default_factory=list)
    query_features: Tensor | None = None  # (B, H, m, D): pooled down each column
    key_features: Tensor | None = None
    count: Tensor | None = None  # (B, m)
    above: Seen | None = None  # the vertical spans of the open row, one per column
    rows: Seen | None = None  # the horizontal spans (B, H, R, m, D): one per column for every full row

    @property
    def position(self) -> int:
        return self.cache.position


class GridCombiner(Combiner):
    """Each variant defines its plain version in `parts`. The fused version attends with `weft/kernels/lines` and pools
    with `line_pool`. PyTorch pools learned and ReLU summaries, and lines longer than `line_pool.LONGEST_LINE` cells.
    """

    columns_as_spans = False
    columns_split = False  # bidirectional: two spans, above and below the query's row
    rows_as_spans: tuple[Rule, ...] = ()

    def __init__(self, *, block_size: int | None, summary: str, **contract: Any):
        super().__init__(summary=summary, **contract)
        if block_size is not None and block_size < 1:
            raise ValueError(f"block_size, the width of the grid, must be at least 1, got {block_size}")
        self.block_size = block_size

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
        others: Rule = "before" if self.causal else "others"
        parts = [LinePart(0, "row", "up_to" if self.causal else "all"), LinePart(0, "column", others)]
        spans = []
        for which in self.column_spans:
            spans.append(self._line_spans(q, k, v, mask, m, "column", which))
            parts.append(LinePart(len(spans), "row", "others"))
        for which in self.rows_as_spans:
            spans.append(self._line_spans(q, k, v, mask, m, "row", which))
            parts.append(LinePart(len(spans), "column", others))
        out = kernel.line_attention(q, k, v, mask, parts, width=m, spans=tuple(spans))
        return out.to(dtype) if self.long_sums else out

    def _line_spans(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, m: int, axis: Axis, which: Rule
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`line_summaries` in cell order, (B, H, cells, D), computed by the kernels."""
        if line_pool.has_kernel(self.summary.kind, axis, k.shape[2], m):
            qbar, kbar, some = line_pool.line_pool(q, k, mask, axis, which, self.summary.kind, width=m)
        else:
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

        def before(f: Tensor) -> Tensor:
            if T == 1:
                return torch.full_like(f, s.neutral)
            return F.pad(s.up_to(f[..., :-1, :]), (0, 0, 1, 0), value=s.neutral)

        def pool(f: Tensor) -> Tensor:
            if which == "after":
                return before(f.flip(3)).flip(3)
            return before(f) if which == "before" else s.others(f)

        cells = lines * T
        qbar = layout.restore(s.finish(pool(s.lift_queries(lines_q, real)), count, q.dtype), cells)
        kbar = layout.restore(s.finish(pool(s.lift_keys(lines_k, real)), count, k.dtype), cells)
        return qbar, kbar, layout.restore((count > 0)[..., None], cells)[:, 0, :, 0]

    def initial_state(self) -> GridState:
        decoding_block(self)  # raises an error if the block size is unknown
        return GridState()

    def advance(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor, state: GridState) -> tuple[Seen, GridState]:
        m, i = decoding_block(self), state.position
        r, c = divmod(i, m)
        state = replace(state, cache=state.cache.append(k, v, real), row_queries=[*state.row_queries, q])
        keys, values, valid, _ = state.cache.read()
        direct = torch.tensor([*range(c, r * m, m), *range(r * m, i + 1)], device=k.device)
        seen = [(keys[:, :, direct], values[:, :, direct], valid[:, direct])]
        if state.above is not None:
            others = torch.tensor([x for x in range(m) if x != c], dtype=torch.long, device=k.device)
            above = state.above
            seen.append((above[0][:, :, others], above[1][:, :, others], above[2][:, others]))
        if state.rows is not None:
            seen.append((state.rows[0][:, :, :, c], state.rows[1][:, :, :, c], state.rows[2][:, :, c]))
        return join_seen(seen), self._close(state, m, r) if c == m - 1 else state

    def _close(self, state: GridState, m: int, r: int) -> GridState:
        """Summarise the open row, which is full."""
        keys, values, valid, _ = state.cache.read()
        q = torch.cat(state.row_queries, 2)
        state = replace(state, row_queries=[])
        k, v, real = keys[:, :, -m:], values[:, :, -m:], valid[:, -m:]
        if self.rows_as_spans:
            rows = [] if state.rows is None else [state.rows]
            for which in self.rows_as_spans:
                line = q[:, :, None], k[:, :, None], v[:, :, None]
                kbar, vbar, some = line_summaries(self.summary, *line, real[:, None, None], which)
                rows.append((kbar, vbar, some[:, 0]))
            state = replace(state, rows=join_seen(rows))
        if self.columns_as_spans:
            s = self.summary
            query_features, key_features = s.lift_queries(q, real[:, None]), s.lift_keys(k, real[:, None])
            count = real.long()
            if state.query_features is not None and state.key_features is not None and state.count is not None:
                query_features = s.join(state.query_features, query_features)
                key_features = s.join(state.key_features, key_features)
                count = state.count + count
            qbar = s.finish(query_features, count[:, None], q.dtype)[:, :, :, None]
            kbar = s.finish(key_features, count[:, None], k.dtype)
            down = (torch.unflatten(t, 2, (r + 1, m)).transpose(2, 3) for t in (keys, values))
            allowed = torch.unflatten(valid, 1, (r + 1, m)).transpose(1, 2)[:, None, :, None]
            vbar = softmax_attention(qbar, *down, allowed=allowed)[:, :, :, 0]
            state = replace(
                state,
                query_features=query_features,
                key_features=key_features,
                count=count,
                above=(kbar, vbar, count > 0),
            )
        return state


KERNEL = Kernel(GridCombiner.run_kernel, least_length=kernel.LEAST_LENGTH)
