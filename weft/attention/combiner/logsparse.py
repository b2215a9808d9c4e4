"""Combiner-Logsparse: the token itself directly, all earlier tokens in log L spans.

Combiner, https://arxiv.org/abs/2107.05768, section 4.2

    causal           direct {i}; for every set bit b of i the span [a, a + 2^b), a = (i >> (b+1)) << (b+1)
    bidirectional    also the mirror image: the spans of L-1-i, counted from the end

A span of one token is attended to directly. The sparse parent, `logsparse`, attends to the last token of every span
instead of its summary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.contract import PositionBias
from ...core.decoding_state import Place
from ...core.dense import positions
from ...core.dispatch import Kernel
from ...core.dropout import dropout_key
from ...core.joint import BackwardRows, Layout, Part, Rows, valid_in
from ...core.partitions import LogSpans, log_spans
from ...core.precision import gathered
from ...core.registry import register
from ...core.softmax import softmax_attention
from ...core.staging import send
from ...core.state import KeyValues
from ...kernels.log_spans import combiner as kernel
from ..logsparse import log_allowed
from .base import Combiner, Seen, combiner_naive, join_seen
from .summaries import Summary

BLOCK = 64  # tokens processed together; the result does not depend on it


def naive(
    attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bias: PositionBias | None = None
) -> Tensor:
    (i, j), L = positions(q, k), k.shape[2]
    b = torch.arange(L.bit_length(), device=q.device)[:, None]

    def before(i: Tensor, j: Tensor) -> Tensor:  # (L, bits, L)
        i, a = i[:, None], i[:, None] >> (b + 1) << (b + 1)
        return (i >> b & 1 == 1) & (a <= j) & (j < a + (1 << b))

    spans = torch.cat([before(i, j), before(L - 1 - i, L - 1 - j)], 1)  # if causal, the mirror image is removed
    one = spans.sum(-1, keepdim=True) == 1
    return combiner_naive(attn, q, k, v, mask, (i == j) | (spans & one).any(1), spans & ~one)


class CombinerLogsparse(Combiner):
    def __init__(self, *, summary: str = "max", **contract: Any):
        super().__init__(summary=summary, **contract)

    def parts(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> list[Part]:
        parts = [spans_before(Rows(BLOCK), q, k, v, mask, self.summary, own=True)]
        if not self.causal:
            parts.append(spans_before(BackwardRows(BLOCK), q, k, v, mask, self.summary, own=False))
        return parts

    def pattern_for(self, length: int) -> Hashable:
        return None if self.causal else length

    # Decoding is a binary counter: the nodes after i tokens are the spans of token i.

    def empty_state(self, k: Tensor, capacity: int) -> LogState:
        k, (B, H, _, D), bits = self._widen(k), k.shape, capacity.bit_length()
        features = k.new_full((2, B, H, bits, D), self.summary.neutral, dtype=self.summary.dtype(k.dtype))
        return LogState(
            KeyValues.empty(k, capacity), KeyValues.empty(k, bits), features[0].clone(), features[1].clone()
        )

    def summarised(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, capacity: int) -> LogState:
        s, L, state = self.summary, k.shape[2], self.empty_state(k, capacity)
        cache = KeyValues.of(k, v, mask, capacity)
        buffers = state.nodes.k, state.nodes.v, state.nodes.valid, state.query_features, state.key_features
        columns = [list(t.unbind(2 if t.dim() == 4 else 1)) for t in buffers]
        for a, size in log_spans(L):
            b, span = size.bit_length() - 1, slice(a, a + size)
            real = cache.valid[:, span]
            features = s.lift_queries(q[:, :, span], real[:, None]), s.lift_keys(k[:, :, span], real[:, None])
            pooled = [s.reduce(f, 2) for f in features]
            node = self._node(pooled[0], pooled[1], k[:, :, span], v[:, :, span], real)
            for column, new in zip(columns, (*node, *pooled), strict=True):
                column[b] = new
        made = [torch.stack(c, 2 if c[0].dim() == 3 else 1) for c in columns]
        return LogState(cache, KeyValues(*made[:3]), *made[3:])

    def _node(self, query: Tensor, key: Tensor, k: Tensor, v: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Key, value and whether it has any token, of the span with these pooled features and tokens."""
        if k.shape[2] == 1:
            return k[:, :, 0], v[:, :, 0], real[:, 0]
        s, count = self.summary, real.sum(1)[:, None]
        vbar = softmax_attention(s.finish(query, count, k.dtype)[:, :, None], k, v, allowed=real[:, None, None])
        return s.finish(key, count, k.dtype), vbar[:, :, 0], count[:, 0] > 0

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, real: Tensor, state: LogState, at: Place
    ) -> tuple[Seen, LogState]:
        s, i, flag, nodes = self.summary, at.tensor, real[:, None], state.nodes
        b = at.first(nodes.slots)
        ones = (i >> b) & 1 == 1
        seen = join_seen([(k, v, flag), (nodes.k, nodes.v, nodes.valid & ones)])
        cache = state.cache.put(at, k, v, real, at.i)
        # The token and the nodes of all trailing ones become the node of the next bit.
        features = [s.lift_queries(q, flag[:, None]), s.lift_keys(k, flag[:, None])]
        merged = ones.long().cumprod(0).bool()
        if at.known:
            bit = ((at.i + 1) & -(at.i + 1)).bit_length() - 1
            first = at.i + 1 - (1 << bit)
            tokens = (
                cache.k[:, :, first : at.i + 1],
                cache.v[:, :, first : at.i + 1],
                cache.valid[:, first : at.i + 1],
            )
        else:
            bit = merged.sum()
            j = at.first(cache.slots)
            tokens = cache.k, cache.v, cache.valid & (j <= i) & (j > i - (1 << bit))
        for index, old in enumerate((state.query_features, state.key_features)):
            below = torch.where(merged[:, None], old, s.neutral)
            features[index] = s.join(features[index], s.reduce(below, 2)[:, :, None])
        kbar, vbar, some = self._node(features[0][:, :, 0], features[1][:, :, 0], *tokens)
        if not at.known:  # a single token is its own node
            one = bit == 0
            kbar, vbar = torch.where(one, k[:, :, 0], kbar), torch.where(one, v[:, :, 0], vbar)
        return seen, LogState(
            cache,
            nodes.put(at, kbar[:, :, None], vbar[:, :, None], some, bit),
            at.put(state.query_features, features[0], bit),
            at.put(state.key_features, features[1], bit),
        )


@dataclass
class LogState:
    """All keys and values, needed for later, longer spans, and for every bit the latest span of that size."""

    cache: KeyValues
    nodes: KeyValues
    query_features: Tensor  # (B, H, bits, D)
    key_features: Tensor


def spans_before(
    layout: Layout, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, summary: Summary, *, own: bool
) -> Part:
    """Summaries of all spans before each token, in the order of the layout; `own` adds the token itself."""
    q, k, v = layout.arrange(q), layout.arrange(k), layout.arrange(v)
    n = k.shape[2]
    # Spans end before their token, and padding is at the end: without a mask nothing needs to be masked.
    real = None if mask is None else valid_in(layout, mask, mask.shape[1], BLOCK, k.device)
    spans = LogSpans(n, BLOCK, k.device)
    members = torch.ones(1, 1, n, BLOCK, device=k.device) if real is None else real.float()
    counts = _firsts(members.flatten(2)[..., None], torch.add)
    query_nodes = _firsts(summary.lift_queries(q, real).flatten(2, 3), summary.join)
    key_nodes = _firsts(summary.lift_keys(k, real).flatten(2, 3), summary.join)
    may_be_empty = real is not None

    def finished(nodes: list[Tensor], level: int) -> Tensor:
        count = counts[level][..., 0]
        return summary.finish(nodes[level], count if may_be_empty or summary.pool == "mean" else None, q.dtype)

    # Local nodes are inside a block; their members are tokens of that block.
    local = range(1, BLOCK.bit_length() - 1)

    def of_blocks(nodes: list[Tensor]) -> Tensor:
        return torch.cat([torch.unflatten(x, 2, (n, -1)) for x in nodes], 3)

    qbar, local_k = (of_blocks([finished(nodes, b) for b in local]) for nodes in (query_nodes, key_nodes))
    inside = spans.members if real is None else spans.members & real[:, :, :, None]
    inside = inside.expand(*(1,) * (5 - inside.dim()), *inside.shape)
    local_v = softmax_attention(qbar, k, v, allowed=inside, may_be_empty=may_be_empty)
    keys, values = [k, local_k], [v, local_v]
    exist = None if real is None else [real, of_blocks([counts[b] for b in local])[..., 0] > 0]

    # Upper nodes: compute them level by level, then gather for every block the nodes it attends to.
    if spans.levels:
        nodes_k, nodes_v, nodes_some, offsets = [], [], [], [0]
        tokens = [t.flatten(2, 3) for t in (k, v)]
        for b in range(BLOCK.bit_length() - 1, BLOCK.bit_length() - 1 + spans.levels):
            node_k, node_v = (_first_halves(t, 1 << b) for t in tokens)
            allowed = None
            if real is not None:
                allowed = _first_halves(real.flatten(2)[..., None], 1 << b)[..., 0][:, :, :, None]
            query = finished(query_nodes, b)[:, :, :, None]
            nodes_k.append(finished(key_nodes, b))
            nodes_v.append(softmax_attention(query, node_k, node_v, allowed=allowed)[:, :, :, 0])
            nodes_some.append(counts[b][..., 0] > 0)
            offsets.append(offsets[-1] + nodes_k[-1].shape[2])
        at = spans.pair + send(torch.tensor(offsets[:-1], device="cpu"), k.device)
        at = torch.where(spans.sees_upper, at, 0)

        def of_block(nodes: list[Tensor]) -> Tensor:
            picked = gathered(torch.cat(nodes, 2), lambda x: x.index_select(2, at.flatten()))
            return torch.unflatten(picked, 2, at.shape)

        keys.append(of_block(nodes_k))
        values.append(of_block(nodes_v))
        if exist is not None:
            exist.append(of_block(nodes_some))
    allowed = log_allowed(spans, own)
    if exist is not None:
        allowed = allowed & torch.cat(exist, 3)[:, :, :, None]
    # Fused attention on the CPU processes 16 keys at a time, and is up to twice as slow with a remainder.
    short = -allowed.shape[-1] % 16
    blank = k.new_zeros(1, 1, 1, 1, 1)
    keys, values = [*keys, blank.expand_as(k[:, :, :, :short])], [*values, blank.expand_as(v[:, :, :, :short])]
    return Part(layout, torch.cat(keys, 3), torch.cat(values, 3), F.pad(allowed, (0, short)))


def _firsts(x: Tensor, join: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    """For b = 0, 1, ...: x (.., T, X) -> (.., nodes, X), the first of every two segments of 2^b tokens, if complete. A
    segment is the join of its two halves."""
    nodes = []
    while (T := x.shape[2]) > 1:
        even, last = (x, None) if T % 2 == 0 else (x[:, :, :-1], x[:, :, -1:])
        firsts, seconds = torch.unflatten(even, 2, (-1, 2)).unbind(3)
        nodes.append(firsts if last is None else torch.cat([firsts, last], 2))
        x = join(firsts, seconds)
    return [*nodes, x]


def _first_halves(x: Tensor, size: int) -> Tensor:
    """(.., T, X) -> (.., pairs, size, X): the first of every two segments of `size` tokens, if complete."""
    pairs = x.shape[2] // (2 * size)
    used = pairs * 2 * size
    halves = torch.unflatten(x[:, :, :used], 2, (pairs, 2, size))[:, :, :, 0]
    if x.shape[2] - used < size:
        return halves
    return torch.cat([halves, x[:, :, used : used + size][:, :, None]], 2)


def run_kernel(attn: CombinerLogsparse, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: None) -> Tensor:
    dtype, (key, threshold) = q.dtype, dropout_key(attn, q)
    q, k, v = (attn._widen(t) for t in (q, k, v))
    pool, causal = attn.summary.pool, attn.causal
    return kernel.span_attention(q, k, v, mask, pool=pool, causal=causal, key=key, threshold=threshold).to(dtype)


register(
    "combiner-logsparse",
    CombinerLogsparse,
    naive=naive,
    paper="Ren et al. 2021, Combiner: Full Attention Transformer with Sparse Computation Cost (2107.05768)",
    cost="L*log(L)",
    length_dependent="bidirectional spans after a token are counted from the end of the sequence",
    kernel=Kernel(run_kernel, kernel.lacks, dropout=True, grouped=lambda attn: True),
)
