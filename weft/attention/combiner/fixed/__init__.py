"""Combiner-Fixed: a token's own block directly, every other block as one span; with `levels`, blocks of blocks.

Combiner, https://arxiv.org/abs/2107.05768, sections 4.1 and 3 (the hierarchical remark). Blocks of m tokens, i//m = r:

    causal           direct {j : j//m = r, j ≤ i}        spans: block s for every s < r
    bidirectional    direct {j : j//m = r}               spans: block s for every s ≠ r

`levels` > 2 groups m blocks into a node of the next level, and so on. A query attends to its own block, at each level
to the other nodes with the same parent, and at the top to all other nodes. Every token is covered once, with about
levels · L^(1/levels) terms per query. A node's value is computed from its children, vbar = Σ_c softmax_c(qbar ·
kbar_c / √D) vbar_c; its key is the pool of all its tokens.

The sparse parent is `sparse` with pattern="fixed", which attends to some tokens of the other blocks, not to summaries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....core.blocks import ceil_div
from ....core.contract import PositionBias
from ....core.decoding_state import Place
from ....core.dense import dense_softmax, legal, positions, real_tokens
from ....core.dispatch import Kernel
from ....core.dropout import dropout_key
from ....core.joint import Part, Rows, valid_in
from ....core.partitions import default_block, own_block
from ....core.registry import register
from ....core.segments import Segments
from ....core.softmax import softmax_attention
from ....core.state import KeyValues
from ....core.tiles import next_power_of_two
from ....kernels.steps.kernel import Step, slots_step
from ...axial import decoding_block
from ..base import Combiner, Seen, combiner_naive, dense_combiner, dense_pool, join_seen
from ..summaries import Summary
from . import kernel


def naive(
    attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bias: PositionBias | None = None
) -> Tensor:
    """`own_span` (a token's own block is also a span) is in the authors' code, not in the paper."""
    (i, j), L = positions(q, k), k.shape[2]
    m = attn.block_size or default_block(L, attn.max_length, attn.levels)
    direct = i // m == j // m
    if attn.levels > 2:
        return naive_levels(attn, q, k, v, mask, direct, m)
    i, s = i[:, None], torch.arange(ceil_div(L, m), device=q.device)[:, None]
    return combiner_naive(attn, q, k, v, mask, direct, (j // m == s) & ((s != i // m) | attn.own_span))


def naive_levels(attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, direct: Tensor, m: int) -> Tensor:
    """More than two levels: the value of a node is computed from its children's values."""
    (i, j), s, tokens = positions(q, k), attn.summary, real_tokens(k, mask)[:, None, None]
    # The children of the next level's nodes: their keys, their weights over tokens, whether they have any token.
    keys, within, real = k, torch.eye(k.shape[2], dtype=k.dtype, device=k.device), tokens
    levels = []
    for level in range(1, attn.levels):
        child = torch.arange(keys.shape[2], device=k.device)
        node, mine = child[: ceil_div(len(child), m)], i // m**level
        members, children = (j // m**level == node[:, None]) & tokens, (child // m == node[:, None]) & real
        qbar, kbar = dense_pool(s, q, s.query, members), dense_pool(s, k, s.key, members)
        within = dense_softmax(qbar @ keys.mT / q.shape[-1] ** 0.5, children) @ within
        keys, real = kbar, members.any(-1)[..., None, :]
        sees = node < mine if attn.causal else node != mine
        sees = sees & (node // m == mine // m) if level < attn.levels - 1 else sees
        levels.append((sees & real, kbar[:, :, None], within[:, :, None]))
    seen, kbar, within = (torch.cat(t, dim) for t, dim in zip(zip(*levels, strict=True), (-1, -2, -2), strict=True))
    return dense_combiner(q, k, v, direct & legal(attn, q, k, mask), seen, kbar, within)


@dataclass
class Nodes:
    """The summaries of one level: keys, values, whether they have any token, and their pooled features."""

    k: Tensor  # (B, H, n, D)
    v: Tensor
    real: Tensor | None  # (B or 1, 1, n); None if all have one
    query_features: Tensor
    key_features: Tensor
    count: Tensor  # (B or 1, 1, n): tokens

    def up_to(self, n: int) -> Nodes:
        real = None if self.real is None else self.real[..., :n]
        features = self.query_features[:, :, :n], self.key_features[:, :, :n]
        return Nodes(self.k[:, :, :n], self.v[:, :, :n], real, *features, self.count[..., :n])


class CombinerFixed(Combiner):
    """`own_span` (bidirectional only) also keeps a token's own block as a span, like the published code, which counts
    it twice."""

    def __init__(
        self,
        *,
        block_size: int | None = None,
        levels: int = 2,
        summary: str = "max",
        own_span: bool = False,
        **contract: Any,
    ):
        super().__init__(summary=summary, **contract)
        if block_size is not None and block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        if levels < 2:
            raise ValueError(f"levels must be at least 2 (tokens, and blocks of tokens), got {levels}")
        if own_span and (self.causal or levels > 2):
            raise ValueError(
                "own_span=True reproduces the published bidirectional code; it requires causal=False and levels=2, "
                f"got causal={self.causal}, levels={levels}"
            )
        if levels > 2 and block_size == 1:
            raise ValueError(f"levels={levels} cannot group blocks of one token; set a larger block_size than 1")
        self.block_size, self.levels, self.own_span = block_size, levels, own_span

    def parts(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> list[Part]:
        L, device = k.shape[2], k.device
        m = self.block_size or default_block(L, self.max_length, self.levels)
        layout = Rows(m)
        # Right padding is never in the past of a real token, so causal mechanisms can ignore it.
        real = None if self.causal and mask is None else valid_in(layout, mask, L, m, device)
        blocks_q, blocks_k, blocks_v = (layout.arrange(t) for t in (q, k, v))
        own = own_block(m, self.causal, device).view(1, 1, 1, m, m) if self.causal else None
        if real is not None:
            own = real[:, :, :, None] if own is None else own & real[:, :, :, None]
        parts = [Part(layout, blocks_k, blocks_v, own)]
        n = blocks_k.shape[2]
        block = torch.arange(n, device=device)
        nodes = self._blocks(blocks_q, blocks_k, blocks_v, real)
        for level in range(1, self.levels):
            top = level == self.levels - 1
            mine = block // m ** (level - 1)
            n_nodes = nodes.k.shape[2]
            if top:
                others = torch.arange(n_nodes, device=device).expand(n, -1)
            else:
                others = (block // m**level)[:, None] * m + torch.arange(m, device=device)
            sees = others < mine[:, None] if self.causal else others != mine[:, None]
            if self.own_span:
                sees = torch.ones_like(sees)
            sees = sees & (others < n_nodes)
            others = others.clamp(max=n_nodes - 1)
            allowed = sees.view(1, 1, n, 1, -1)
            if nodes.real is not None:
                allowed = allowed & nodes.real[:, :, others][:, :, :, None]
            parts.append(Part(layout, _of_nodes(nodes.k, others, top), _of_nodes(nodes.v, others, top), allowed))
            if not top:
                nodes = self._parents(nodes, m)
        return parts

    def _blocks(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Nodes:
        """The summary of every block (B, H, n, m, D)."""
        s = self.summary
        count = torch.full((1, 1, k.shape[2]), k.shape[3], device=k.device) if real is None else real.sum(-1)
        return self._nodes(s.lift_queries(q, real), s.lift_keys(k, real), k, v, count, real)

    def _parents(self, nodes: Nodes, m: int) -> Nodes:
        """The summary of every m nodes."""
        short = -nodes.k.shape[2] % m

        def group(x: Tensor, value: float = 0.0) -> Tensor:
            return torch.unflatten(F.pad(x, (*[0, 0] * (x.dim() - 3), 0, short), value=value), 2, (-1, m))

        query, key = (group(f, self.summary.neutral) for f in (nodes.query_features, nodes.key_features))
        count = group(nodes.count)
        return self._nodes(query, key, group(nodes.k), group(nodes.v), count.sum(-1), count > 0)

    def _nodes(
        self, query_features: Tensor, key_features: Tensor, k: Tensor, v: Tensor, count: Tensor, real: Tensor | None
    ) -> Nodes:
        """The nodes of groups of children (B, H, n, m, D) with `count` tokens; `real`: which children have any."""
        s = self.summary
        query_features, key_features = s.reduce(query_features, 3), s.reduce(key_features, 3)
        pooled = None if real is None and s.pool != "mean" else count
        qbar, kbar = (s.finish(f, pooled, k.dtype) for f in (query_features, key_features))
        allowed = None if real is None else real[:, :, :, None]
        vbar = softmax_attention(qbar[:, :, :, None], k, v, allowed=allowed)[:, :, :, 0]
        return Nodes(kbar, vbar, None if real is None else count > 0, query_features, key_features, count)

    def pattern_for(self, length: int) -> int:
        return self.block_size or default_block(length, self.max_length, self.levels)

    # Decoding: a stack of levels. A full block becomes one item of the next level, and its slots are used again.

    def empty_state(self, k: Tensor, capacity: int) -> FixedState:
        k, m, top = self._widen(k), decoding_block(self, self.levels), self.levels - 1
        rooms = [ceil_div(capacity, m**depth) for depth in range(self.levels)]
        rooms[:top] = [min(m, room) for room in rooms[:top]]
        feature = self.summary.dtype(k.dtype)
        B, H, _, D = k.shape

        def pooled() -> Pooled:
            features = k.new_full((2, B, H, D), self.summary.neutral, dtype=feature)
            return Pooled(features[0].clone(), features[1].clone(), k.new_zeros(B, dtype=torch.long))

        return FixedState([KeyValues.empty(k, room) for room in rooms], [pooled() for _ in range(top)])

    def summarised(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, capacity: int) -> FixedState:
        s, m, L = self.summary, decoding_block(self, self.levels), k.shape[2]
        state, closed = self.empty_state(k, capacity), L - L % m
        rest = None if mask is None else mask[:, closed:]
        state.levels[0] = KeyValues.of(k[:, :, closed:], v[:, :, closed:], rest, state.levels[0].slots)
        if closed < L:
            real = None if rest is None else rest[:, None]
            count = k.new_full((k.shape[0],), L - closed, dtype=torch.long) if rest is None else rest.sum(1)
            lifted = s.lift_queries(q[:, :, closed:], real), s.lift_keys(k[:, :, closed:], real)
            state.pooled[0] = Pooled(s.reduce(lifted[0], 2), s.reduce(lifted[1], 2), count)
        if not closed:
            return state
        real = None if mask is None else torch.unflatten(mask[:, None, :closed], 2, (-1, m))
        blocks_q, blocks_k, blocks_v = (Rows(m).arrange(t[:, :, :closed]) for t in (q, k, v))
        nodes = self._blocks(blocks_q, blocks_k, blocks_v, real)
        for depth in range(1, self.levels):
            n, top = nodes.k.shape[2], depth == self.levels - 1
            first = 0 if top else n - n % m
            some = (nodes.count > 0)[:, 0, first:].expand(k.shape[0], -1)
            items = state.levels[depth]
            state.levels[depth] = KeyValues.of(nodes.k[:, :, first:], nodes.v[:, :, first:], some, items.slots)
            if top:
                break
            if first < n:
                count = nodes.count[:, 0, first:].sum(1).expand(k.shape[0]).clone()
                query, key = (s.reduce(f[:, :, first:], 2) for f in (nodes.query_features, nodes.key_features))
                state.pooled[depth] = Pooled(query, key, count)
            if not first:
                break
            nodes = self._parents(nodes.up_to(first), m)
        return state

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, real: Tensor, state: FixedState, at: Place
    ) -> tuple[Seen, FixedState]:
        s, m, i = self.summary, decoding_block(self, self.levels), at.i
        levels, pooled, top = list(state.levels), list(state.pooled), self.levels - 1
        slots = [i // m**depth for depth in range(self.levels)]  # of the open item of each level
        slots[:top] = [slot % m for slot in slots[:top]]
        levels[0] = levels[0].put(at, k, v, real, slots[0])
        seen = join_seen([x.read(at, slots[d] + (d == 0)) for d, x in enumerate(levels)])
        flag = None if at.whole else real[:, None, None]
        new = Pooled(s.lift_queries(q, flag)[:, :, 0], s.lift_keys(k, flag)[:, :, 0], real.long())
        for depth in range(top):
            new = pooled[depth].join(s, new, slots[depth] == 0, at)
            # Only closed items are pooled permanently. Where the position is a tensor, all levels are computed in every
            # step: the summary of an open block goes to a slot that nobody reads, until the block is full.
            closed = True if depth == 0 else (i + 1) % m**depth == 0
            pooled[depth] = pooled[depth].set(at, new, closed)
            if at.known and (i + 1) % m ** (depth + 1):
                break
            count = new.count[:, None]
            qbar = s.finish(new.query_features, count, q.dtype)[:, :, None]
            kbar = s.finish(new.key_features, count, k.dtype)[:, :, None]
            items = levels[depth]
            vbar = softmax_attention(qbar, items.k, items.v, allowed=items.valid[:, None, None])
            levels[depth + 1] = levels[depth + 1].put(at, kbar, vbar, new.count > 0, slots[depth + 1])
        return seen, FixedState(levels, pooled)


@dataclass
class Pooled:
    """The features for the summary of an open node."""

    query_features: Tensor  # (B, H, D)
    key_features: Tensor
    count: Tensor  # (B,): tokens

    def join(self, summary: Summary, new: Pooled, first: Any, at: Place) -> Pooled:
        """With one more item, or with only that item if it is the first."""
        return Pooled(
            at.choose(first, new.query_features, summary.join(self.query_features, new.query_features)),
            at.choose(first, new.key_features, summary.join(self.key_features, new.key_features)),
            at.choose(first, new.count, self.count + new.count),
        )

    def set(self, at: Place, new: Pooled, condition: Any) -> Pooled:
        return Pooled(
            at.set(self.query_features, at.choose(condition, new.query_features, self.query_features)),
            at.set(self.key_features, at.choose(condition, new.key_features, self.key_features)),
            at.set(self.count, at.choose(condition, new.count, self.count)),
        )


@dataclass
class FixedState:
    levels: list[KeyValues]  # tokens of the open block, nodes of the open group of each level, all nodes of the top
    pooled: list[Pooled]  # the open node of each level but the top


def _of_nodes(x: Tensor, index: Tensor, everything: bool) -> Tensor:
    """Nodes (B, H, n, D) for each block, by index (blocks, K): (B, H, blocks, K, D)."""
    if everything:
        return x[:, :, None].expand(-1, -1, index.shape[0], -1, -1)
    return torch.unflatten(x.index_select(2, index.flatten()), 2, index.shape)


def run_kernel(attn: CombinerFixed, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: None) -> Tensor:
    m = attn.block_size or default_block(q.shape[2], attn.max_length)
    return _run(attn, q, k, v, mask, m, None, 0)


def run_packed(
    attn: CombinerFixed, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, documents: Segments
) -> Tensor | None:
    m = attn.pattern_for(documents.longest)
    if m != attn.pattern_for(documents.shortest):  # the default block size is not the same for all documents
        return None
    longest = next_power_of_two(documents.longest)  # few values: launches are recorded by it
    return _run(attn, q, k, v, mask, m, documents.table(m), longest)


def _run(
    attn: CombinerFixed,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    m: int,
    table: Tensor | None,
    longest: int,
) -> Tensor:
    dtype, pool = q.dtype, attn.summary.pool
    if attn.long_sums:
        q, k, v = (attn._widen(t) for t in (q, k, v))
    key, threshold = dropout_key(attn, q)
    out = kernel.combiner_fixed(q, k, v, mask, m, pool, attn.causal, table, longest, key, threshold)
    return out.to(dtype) if attn.long_sums else out


def step_of(attn: CombinerFixed, state: FixedState) -> Step | None:
    tokens, blocks = state.levels
    block = state.pooled[0]
    return slots_step(
        tokens, "fixed", decoding_block(attn), far=blocks, queries=block.query_features,
        key_features=block.key_features, count=block.count, pool=attn.summary.pool,
    )  # fmt: skip


def lacks(attn: CombinerFixed, *qkv: Tensor) -> str:
    if attn.levels > 2 or attn.own_span:
        return "the kernel supports neither levels > 2 nor own_span=True"
    if attn.summary.kind not in kernel.POOLS:
        return f"the kernel supports the summaries {', '.join(kernel.POOLS)}, got {attn.summary.kind}"
    return ""


register(
    "combiner-fixed",
    CombinerFixed,
    naive=naive,
    paper="Ren et al. 2021, Combiner: Full Attention Transformer with Sparse Computation Cost (2107.05768)",
    cost="L*sqrt(L)",
    length_dependent="without max_length the default block size depends on the length; set block_size to fix it",
    kernel=Kernel(
        run_kernel,
        lacks,
        kernel.LEAST_LENGTH,
        tested=False,
        dropout=True,
        far=True,
        grouped=lambda attn: True,
        packed=run_packed,
        step=step_of,
    ),
)
