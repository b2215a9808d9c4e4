"""What the Combiners on a grid share: their options, and decoding.

While decoding, row r is open. When it is full, each of its cells is summarised for the queries to come: along its
column with all rows so far (vertical spans), and along its row (horizontal spans).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .axial import decoding_block
from .combiner import Combiner, Seen, join_seen, line_summaries
from .decoding import KeyValueState
from .softmax import softmax_attention


@dataclass
class GridState:
    """All keys and values, the queries of the open row, and the summaries of the rows that are full."""

    cache: KeyValueState = field(default_factory=KeyValueState.empty)
    row_queries: list[Tensor] = field(default_factory=list)
    query_features: Tensor | None = None  # (B, H, m, D): pooled down each column
    key_features: Tensor | None = None
    count: Tensor | None = None  # (B, m)
    above: Seen | None = None  # the vertical spans of the open row, one per column
    rows: Seen | None = None  # the horizontal spans (B, H, R, m, D): for every full row one per column

    @property
    def position(self) -> int:
        return self.cache.position


class GridCombiner(Combiner):
    columns_as_spans = False
    rows_as_spans: tuple[str, ...] = ()

    def __init__(self, *, block_size: int | None, summary: str, **contract: Any):
        super().__init__(summary=summary, **contract)
        if block_size is not None and block_size < 1:
            raise ValueError(f"block_size, the width of the grid, must be at least 1, got {block_size}")
        self.block_size = block_size

    def start(self, batch: int, *, device=None, dtype=None) -> GridState:
        decoding_block(self)  # refuses where there is none
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
        """The open row is full: summarise it."""
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
            down = (t.unflatten(2, (r + 1, m)).transpose(2, 3) for t in (keys, values))
            allowed = valid.unflatten(1, (r + 1, m)).transpose(1, 2)[:, None, :, None]
            vbar = softmax_attention(qbar, *down, allowed=allowed)[:, :, :, 0]
            state = replace(
                state,
                query_features=query_features,
                key_features=key_features,
                count=count,
                above=(kbar, vbar, count > 0),
            )
        return state
