"""Combiner-Routing: a token's own cluster directly, every other cluster as a span.

Combiner, https://arxiv.org/abs/2107.05768, section 4.5, which defines only the sets. The clusters are those of the
sparse parent, `routing`:

    causal           direct G_{g_i} ∩ {0..i}      spans G_g ∩ {0..i} for every other cluster g          (equation 11)
    bidirectional    direct G_{g_i}               spans G_g for every other cluster g                   (equation 12)

Clusters may have any size, so this costs up to L². By default it is computed exactly up to `WHOLE` tokens
(`max_length`, if given). For longer sequences, and whenever `capacity` is given, each cluster is split into runs of at
most `capacity` tokens, in order of position, and "cluster" means "run" in the sets above. That bounds the cost for any
data, at L · (capacity + clusters + L / capacity), but changes the result: tokens of earlier runs of its own cluster
are read through a summary.

If causal, a span grows with i, so every token j has a summary: that of its run up to j. At i, the newest run of a
cluster is represented by the summary at its last token up to i. Older runs are closed and represented as a whole.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.blocks import ceil_div
from ...core.contract import PositionBias
from ...core.decoding_state import Place
from ...core.dense import runs_of, same
from ...core.dispatch import Kernel, without_dropout
from ...core.dropout import dropout_key
from ...core.joint import Part, Rows, token_positions
from ...core.partitions import default_block
from ...core.registry import register
from ...core.runs import Runs, fixed_shapes, gather_runs, room_for, take_mask, take_rows
from ...core.softmax import softmax_attention
from ...kernels.cluster_spans import kernel
from ..routing import Clusters, RunLayout, run_part
from .base import Combiner, Seen, combiner_naive, line_summaries

WHOLE = 1024


def naive(
    attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bias: PositionBias | None = None
) -> Tensor:
    nearest = (k.to(attn.clusters.centroids.dtype) @ attn.clusters.centroids.mT).argmax(-1)
    group, run = runs_of(nearest, mask, attn.clusters.size(k.shape[2]))
    together = same(group) & same(run)
    first = ~together.tril(-1).any(-1)  # identify a run by its first token
    spans = (together & first[..., None])[:, :, None] & ~together[..., None]
    return combiner_naive(attn, q, k, v, mask, together, spans)


class CombinerRouting(Combiner):
    """`clusters`: centroids per head. `capacity`: maximum run length; None: whole clusters up to 1,024 tokens, then
    runs of about 2·√L. `decay`: of the centroids' moving average."""

    def __init__(
        self,
        *,
        clusters: int | None = None,
        capacity: int | None = None,
        decay: float = 0.999,
        summary: str = "max",
        **contract: Any,
    ):
        super().__init__(summary=summary, **contract)
        self.clusters = Clusters(self.heads, self.head_dim, clusters, capacity, decay, self.max_length, WHOLE)

    def parts(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> list[Part]:
        size = self.clusters.size(k.shape[2])
        if k.shape[2] <= min(WHOLE, size) and fixed_shapes(k):  # each cluster is one run, with room for all tokens
            return self._whole_clusters(q, k, v, mask)
        runs = self.clusters.runs(k, mask)
        direct = run_part(runs, k, v, mask, self.causal)
        real = take_mask(mask, runs.token, k.shape[2])
        run_q = RunLayout(runs).arrange(q)
        if self.causal:
            # The slots of a run are filled in order: without a mask, all slots before a filled one are filled.
            among = None if mask is None else real
            kbar, vbar, _ = line_summaries(self.summary, run_q, direct.k, direct.v, among, "up_to")
            return [direct, _growing_spans(runs, kbar, vbar, real, self.clusters.clusters + (mask is not None))]
        s, count = self.summary, real.sum(-1)
        qbar = s.finish(s.reduce(s.lift_queries(run_q, real), 3), count, q.dtype)
        kbar = s.finish(s.reduce(s.lift_keys(direct.k, real), 3), count, k.dtype)
        vbar = softmax_attention(qbar[:, :, :, None], direct.k, direct.v, allowed=real[:, :, :, None])[:, :, :, 0]
        R = kbar.shape[2]
        others = ~torch.eye(R, dtype=torch.bool, device=k.device)[:, None] & (count > 0)[:, :, None, None]
        each_k, each_v = (t[:, :, None].expand(-1, -1, R, -1, -1) for t in (kbar, vbar))
        return [direct, Part(direct.layout, each_k, each_v, others)]

    def _whole_clusters(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> list[Part]:
        """`parts` without runs: L x L logits with a mask of the clusters, fewer than those of runs of fixed shapes."""
        L, s, G = k.shape[2], self.summary, self.clusters.clusters
        group = self.clusters.assign(k, mask)
        member = group[:, :, None] == torch.arange(G, device=k.device)[:, None]  # (B, H, G, L)
        own = same(group) if mask is None else same(group) & mask[:, None, None]
        lifted_q, lifted_k = (
            lifted[:, :, None].expand(-1, -1, G, -1, -1).masked_fill(~member[..., None], s.neutral)
            for lifted in (s.lift_queries(q, None), s.lift_keys(k, None))
        )
        layout = Rows(L)
        if not self.causal:
            count = member.sum(-1)
            qbar, kbar = (s.finish(s.reduce(f, 3), count, k.dtype) for f in (lifted_q, lifted_k))
            vbar = softmax_attention(qbar, k, v, allowed=member)
            others = ~member.mT & (count > 0)[:, :, None]
            return [_part(layout, k, v, own), _part(layout, kbar, vbar, others)]
        at = torch.arange(L, device=k.device)
        past = own & (at <= at[:, None])
        place = group.clamp(max=G - 1)[:, :, None, :, None].expand(-1, -1, 1, -1, k.shape[-1])
        count = member.cumsum(-1).gather(2, place[..., 0])[:, :, 0]  # finite summaries at masked tokens, too
        qbar, kbar = (s.finish(s.up_to(f).gather(2, place)[:, :, 0], count, k.dtype) for f in (lifted_q, lifted_k))
        vbar = softmax_attention(qbar, k, v, allowed=past, may_be_empty=mask is not None)
        until = torch.where(own & (at > at[:, None]), at, L).amin(-1)  # the cluster's next token
        stands = (at <= at[:, None]) & (at[:, None] < until[:, :, None]) & ~same(group)
        if mask is not None:
            stands = stands & mask[:, None, None]
        return [_part(layout, k, v, past), _part(layout, kbar, vbar, stands)]

    def pattern_for(self, length: int) -> Hashable:
        return self.clusters.size(length)

    # Decoding: the newest run of every cluster is open. A full run is closed when its cluster gets another token.

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "clusters": self.clusters.clusters, "capacity": self.clusters.capacity}

    def empty_state(self, k: Tensor, capacity: int) -> RoutingState:
        if self.clusters.capacity is None and self.max_length is None:
            raise ValueError(
                f"{self.name} derives its capacity from the length, which is unknown while decoding; "
                "set capacity or max_length"
            )
        k, (B, H, _, D), features = self._widen(k), k.shape, self.summary.dtype(k.dtype)
        G, size = self.clusters.clusters, self.clusters.size(0)

        def room(*shape: int, dtype: torch.dtype = k.dtype) -> Tensor:
            return k.new_zeros(B, H, *shape, dtype=dtype)

        return RoutingState(
            k=room(G, size, D),
            v=room(G, size, D),
            filled=room(G, dtype=torch.long),
            query_features=room(G, D, dtype=features),
            key_features=room(G, D, dtype=features),
            span_k=room(G, D),
            span_v=room(G, D),
            closed_k=room(ceil_div(capacity, size), D),
            closed_v=room(ceil_div(capacity, size), D),
            closed=room(dtype=torch.long),
        )

    def summarised(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, capacity: int) -> RoutingState:
        s, G, size = self.summary, self.clusters.clusters, self.clusters.size(0)
        group = self.clusters.nearest(k)
        if mask is not None:
            group = group.masked_fill(~mask[:, None], G)
        runs = gather_runs(group, G + 1, size)
        real = take_mask(mask, runs.token, k.shape[2])
        queries, keys, values = (RunLayout(runs).arrange(t) for t in (q, k, v))
        count = real.sum(-1)
        pooled_q, pooled_k = s.reduce(s.lift_queries(queries, real), 3), s.reduce(s.lift_keys(keys, real), 3)
        qbar, kbar = s.finish(pooled_q, count, q.dtype), s.finish(pooled_k, count, k.dtype)
        vbar = softmax_attention(qbar[:, :, :, None], keys, values, allowed=real[:, :, :, None])[:, :, :, 0]
        # The last run of every cluster is open, the others are closed.
        ahead = torch.cat([runs.group[:, :, 1:], torch.full_like(runs.group[:, :, :1], -1)], 2)
        ends = (count > 0) & (ahead != runs.group)
        at = torch.where(ends, runs.group.clamp(max=G), G)
        last = torch.zeros(*at.shape[:2], G + 1, dtype=torch.long, device=k.device)
        last = last.scatter(2, at, torch.arange(at.shape[2], device=k.device).expand_as(at))[:, :, :G]
        some = torch.zeros(*at.shape[:2], G + 1, dtype=torch.long, device=k.device).scatter(2, at, 1)[:, :, :G]
        shut = (count > 0) & ~ends
        room = ceil_div(capacity, size)
        order = torch.argsort(shut.long(), dim=2, descending=True, stable=True)
        order = F.pad(order, (0, max(0, room - at.shape[2])))[:, :, :room]
        used = runs.token.shape[3]
        opened = last[..., None, None].expand(-1, -1, -1, used, k.shape[-1])
        return RoutingState(
            k=F.pad(keys.gather(2, opened), (0, 0, 0, size - used)),
            v=F.pad(values.gather(2, opened), (0, 0, 0, size - used)),
            filled=count.gather(2, last) * some,
            query_features=take_rows(pooled_q, last),
            key_features=take_rows(pooled_k, last),
            span_k=take_rows(kbar, last),
            span_v=take_rows(vbar, last),
            closed_k=take_rows(kbar, order),
            closed_v=take_rows(vbar, order),
            closed=shut.sum(2),
        )

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, real: Tensor, state: RoutingState, at: Place
    ) -> tuple[Seen, RoutingState]:
        s, size = self.summary, state.k.shape[3]
        lifted_q, lifted_k = s.lift_queries(q, None)[:, :, 0], s.lift_keys(k, None)[:, :, 0]
        B, H = k.shape[:2]
        b, h = torch.arange(B, device=k.device)[:, None], torch.arange(H, device=k.device)[None]
        g = self.clusters.nearest(k)[..., 0]
        here = real[:, None].expand(B, H)
        full = (state.filled[b, h, g] == size) & here

        def put(x: Tensor, new: Tensor, *slot: Tensor, when: Tensor = here) -> Tensor:
            """Write at a slot of every head, if the token is real."""
            new = torch.where(when.view(B, H, *[1] * (new.dim() - 2)), new.to(x.dtype), x[(b, h, *slot)])
            return (x.index_put_ if at.in_place else x.index_put)((b, h, *slot), new)

        shelf = state.closed.clamp(max=state.closed_k.shape[2] - 1)
        closed_k = put(state.closed_k, state.span_k[b, h, g], shelf, when=full)
        closed_v = put(state.closed_v, state.span_v[b, h, g], shelf, when=full)
        closed = at.set(state.closed, state.closed + full)
        place = state.filled[b, h, g].masked_fill(full, 0).clamp(max=size - 1)
        keys, values = put(state.k, k[:, :, 0], g, place), put(state.v, v[:, :, 0], g, place)
        first = (place == 0)[..., None]
        pooled_q = torch.where(first, lifted_q, s.join(state.query_features[b, h, g], lifted_q))
        pooled_k = torch.where(first, lifted_k, s.join(state.key_features[b, h, g], lifted_k))
        count = place + 1
        own = torch.arange(size, device=k.device) < count[..., None]
        own_k, own_v = keys[b, h, g], values[b, h, g]
        qbar = s.finish(pooled_q, count, q.dtype)
        vbar = softmax_attention(qbar[:, :, None], own_k, own_v, allowed=own[:, :, None])[:, :, 0]
        filled = put(state.filled, count, g)
        span_k, span_v = put(state.span_k, s.finish(pooled_k, count, k.dtype), g), put(state.span_v, vbar, g)
        others = (filled > 0) & (torch.arange(filled.shape[-1], device=k.device) != g[..., None])
        old = torch.arange(closed_k.shape[2], device=k.device) < closed[..., None]
        seen = (
            torch.cat([own_k, span_k, closed_k], 2),
            torch.cat([own_v, span_v, closed_v], 2),
            torch.cat([own & here[..., None], others, old], 2),
        )
        return seen, RoutingState(
            k=keys,
            v=values,
            filled=filled,
            query_features=put(state.query_features, pooled_q, g),
            key_features=put(state.key_features, pooled_k, g),
            span_k=span_k,
            span_v=span_v,
            closed_k=closed_k,
            closed_v=closed_v,
            closed=closed,
        )


@dataclass
class RoutingState:
    k: Tensor  # (B, H, clusters, capacity, D): the open run of every cluster
    v: Tensor
    filled: Tensor  # (B, H, clusters)
    query_features: Tensor  # (B, H, clusters, D): pooled features of the open runs
    key_features: Tensor
    span_k: Tensor  # (B, H, clusters, D): the summaries of the open runs
    span_v: Tensor
    closed_k: Tensor  # (B, H, runs, D): the summaries of the closed runs; their tokens are dropped
    closed_v: Tensor
    closed: Tensor  # (B, H): how many there are


def _part(layout: Rows, k: Tensor, v: Tensor, allowed: Tensor) -> Part:
    """Keys that all queries share."""
    return Part(layout, k[:, :, None], v[:, :, None], allowed[:, :, None])


def _growing_spans(runs: Runs, kbar: Tensor, vbar: Tensor, real: Tensor, groups: int) -> Part:
    """The spans that the tokens of a segment attend to: those of other clusters, and closed runs.

    kbar and vbar (B, H, R, size, D) are the summaries of every run up to each of its slots; `real` (B, H, R, size) is
    True for slots with a token. Token j represents the newest run of its cluster from j until the next token of the
    cluster. At i, the cluster of i is represented by i itself. A segment needs its own tokens and, for every cluster,
    the last token before the segment.
    """
    (B, H, L), device = runs.slot.shape, kbar.device
    R, size = runs.token.shape[2:]
    tokens = torch.cat([runs.token.flatten(2), runs.token.new_full((B, H, 1), L)], 2)
    run_of_next = ((runs.slot + 1) // size).clamp(max=R - 1)
    group = runs.group.gather(2, runs.slot // size)
    same = runs.group.gather(2, run_of_next) == group
    until = torch.where(same, tokens.gather(2, runs.slot + 1), L)  # (B, H, L): the cluster's next token
    until = until.masked_fill(~real.flatten(2).gather(2, runs.slot), 0)  # a masked token represents no run

    # For every segment and cluster, the last token before the segment; -1 if there is none.
    layout = Rows(default_block(L, None))
    T, n = layout.size, ceil_div(L, layout.size)
    at = torch.arange(L, device=device).expand(B, H, L)
    last = torch.full((B, H, n * groups), -1, device=device)
    last = last.scatter_reduce(2, (at // T) * groups + group, at, "amax")
    last = torch.unflatten(last, 2, (n, groups)).cummax(2).values
    before = torch.cat([torch.full_like(last[:, :, :1], -1), last[:, :, :-1]], 2)
    own = torch.arange(n * T, device=device).view(n, T).expand(B, H, n, T)
    stands = torch.cat([before, own], 3)
    nobody = (stands < 0) | (stands >= L)
    who = stands.masked_fill(nobody, 0).flatten(2)
    ends = until.gather(2, who).view_as(stands).masked_fill(nobody, 0)

    # A run is closed once the next run of its cluster has started. Closed runs are full: at most L // size.
    begins = torch.cat([runs.token[:, :, 1:, 0], runs.token.new_full((B, H, 1), L)], 2)
    continued = torch.cat([runs.group[:, :, 1:] == runs.group[:, :, :-1], torch.zeros_like(real[:, :, :1, 0])], 2)
    continued &= real[..., -1]
    closes, closing = torch.where(continued, begins, L).sort(2)
    C = room_for(continued.sum(2), L // size)
    closes, closing = closes[:, :, :C], closing[:, :, :C]

    slots = torch.cat([runs.slot.gather(2, who).view_as(stands), _of_each(closing * size + size - 1, n)], 3)
    keys, values = (take_rows(t.flatten(2, 3), slots) for t in (kbar, vbar))
    # All are visible to the tokens after `stands` and before `ends`.
    stands = torch.cat([stands, _of_each(closes - 1, n)], 3).float()[..., None, :]
    ends = F.pad(ends, (0, C), value=L).float()[..., None, :]
    i = token_positions(layout, L, device).float()[..., None]
    inside = torch.minimum(i - stands, ends - i)
    return Part(layout, keys, values, bias=F.threshold(inside, 0, float("-inf"), inplace=True).clamp_(max=0))


def _of_each(x: Tensor, n: int) -> Tensor:
    """(B, H, X) -> (B, H, n, X)"""
    return x[:, :, None].expand(-1, -1, n, -1)


def run_kernel(attn: CombinerRouting, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: None) -> Tensor:
    dtype, clusters, size = q.dtype, attn.clusters, attn.clusters.size(k.shape[2])
    q, k, v = (attn._widen(t) for t in (q, k, v))
    key, threshold = dropout_key(attn, q)
    options = size, attn.summary.pool, attn.causal, threshold
    out = clusters.run_kernel(kernel.routed_spans, q, k, v, mask, key, *options)
    if out is None:
        out = kernel.span_attention(q, k, v, clusters.assign_orders(k, mask), key, *options)
    return out.to(dtype)


def lacks(attn: CombinerRouting, *qkv: Tensor) -> str:
    if attn.summary.kind not in kernel.POOLS:
        return f"the kernel supports the summaries {', '.join(kernel.POOLS)}, got {attn.summary.kind}"
    if not qkv:
        return ""
    length = qkv[0].shape[2]
    size = attn.clusters.size(length)
    if length <= min(WHOLE, size) or size > kernel.LONGEST_RUN:
        return (
            f"the kernel needs runs shorter than the sequence, and of at most {kernel.LONGEST_RUN} tokens; got "
            f"{length} tokens and a capacity of {size}; set a smaller capacity"
        )
    return ""


register(
    "combiner-routing",
    CombinerRouting,
    naive=naive,
    paper="Ren et al. 2021, Combiner: Full Attention Transformer with Sparse Computation Cost (2107.05768)",
    cost="L*sqrt(L)",
    length_dependent="without max_length the default capacity depends on the length; set capacity to fix it",
    kernel=Kernel(run_kernel, lacks, WHOLE + 1, dropout=True, grouped=lambda attn: True, auto=without_dropout),
)
