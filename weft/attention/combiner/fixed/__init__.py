"""Combiner-Fixed: the own block directly, every other block as one span; with `levels`, blocks of blocks.

Combiner, https://arxiv.org/abs/2107.05768, sections 4.1 and 3 (the hierarchical remark). Blocks of m tokens, i//m = r:

    causal           direct {j : j//m = r, j ≤ i}        spans: block s for every s < r
    bidirectional    direct {j : j//m = r}               spans: block s for every s ≠ r

`levels` > 2 groups m blocks to a node of the next level, and so on; a query sees its own block, at each level the
other nodes under the same parent, and at the top all other nodes. Every token is covered once, with about
levels · L^(1/levels) terms per query. A node's value is drawn from its children, vbar = Σ_c softmax_c(qbar ·
kbar_c / √D) vbar_c; its key is the pool of all its tokens.

The sparse parent is `sparse` with pattern="fixed", which sees some tokens of the other blocks and no summary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....core.blocks import ceil_div
from ....core.contract import PositionBias
from ....core.dense import dense_softmax, legal, positions, real_tokens
from ....core.dispatch import Kernel
from ....core.joint import Part, Rows, valid_in
from ....core.partitions import default_block, own_block
from ....core.registry import register
from ....core.softmax import softmax_attention
from ...axial import decoding_block
from ..base import Combiner, Seen, combiner_naive, dense_combiner, dense_pool, join_seen
from . import kernel


def naive(
    attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bias: PositionBias | None = None
) -> Tensor:
    """`own_span`, the own block also as a span, is the authors' code, not the paper."""
    (i, j), L = positions(q, k), k.shape[2]
    m = attn.block_size or default_block(L, attn.max_length, attn.levels)
    direct = i // m == j // m
    if attn.levels > 2:
        return naive_levels(attn, q, k, v, mask, direct, m)
    i, s = i[:, None], torch.arange(ceil_div(L, m), device=q.device)[:, None]
    return combiner_naive(attn, q, k, v, mask, direct, (j // m == s) & ((s != i // m) | attn.own_span))


def naive_levels(attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, direct: Tensor, m: int) -> Tensor:
    """More than two levels: the value of a node is drawn from its children's values."""
    (i, j), s, tokens = positions(q, k), attn.summary, real_tokens(k, mask)[:, None, None]
    # What a node's value is drawn from, its children: their keys, which tokens they stand for, whether they have any.
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
    """The summaries of one level: keys, values, whether they hold any token, and the features they were pooled from."""

    k: Tensor  # (B, H, n, D)
    v: Tensor
    real: Tensor | None  # (B or 1, 1, n); None where all do
    query_features: Tensor
    key_features: Tensor
    count: Tensor  # (B or 1, 1, n): tokens


class CombinerFixed(Combiner):
    """`own_span` keeps the own block also as a span when bidirectional: the published code, which counts it twice."""

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
            raise ValueError("own_span reproduces the published bidirectional code: it needs causal=False and levels=2")
        if levels > 2 and block_size == 1:
            raise ValueError("blocks of one token cannot be grouped into levels: give a larger block_size")
        self.block_size, self.levels, self.own_span = block_size, levels, own_span

    def parts(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> list[Part]:
        L, device = k.shape[2], k.device
        m = self.block_size or default_block(L, self.max_length, self.levels)
        layout = Rows(m)
        # Right padding is never in the past of a real token: a causal mechanism need not look at it.
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
        query_features = s.reduce(s.lift_queries(q, real), 3)
        key_features = s.reduce(s.lift_keys(k, real), 3)
        n, m = k.shape[2:4]
        count = torch.full((1, 1, n), m, device=k.device) if real is None else real.sum(-1)
        some = None if real is None else count
        qbar = s.finish(query_features, count if s.pool == "mean" else some, q.dtype)
        kbar = s.finish(key_features, count if s.pool == "mean" else some, k.dtype)
        allowed = None if real is None else real[:, :, :, None]
        vbar = softmax_attention(qbar[:, :, :, None], k, v, allowed=allowed)[:, :, :, 0]
        return Nodes(kbar, vbar, None if real is None else count > 0, query_features, key_features, count)

    def _parents(self, nodes: Nodes, m: int) -> Nodes:
        """The summary of every m nodes."""
        s, n = self.summary, nodes.k.shape[2]
        short = -n % m

        def group(x: Tensor, value: float = 0.0) -> Tensor:
            return torch.unflatten(F.pad(x, (0, 0, 0, short), value=value), 2, (-1, m))

        def group_flags(x: Tensor) -> Tensor:
            return torch.unflatten(F.pad(x, (0, short)), 2, (-1, m))

        count = group_flags(nodes.count).sum(-1)
        query_features = s.reduce(group(nodes.query_features, s.neutral), 3)
        key_features = s.reduce(group(nodes.key_features, s.neutral), 3)
        qbar = s.finish(query_features, count, nodes.k.dtype)
        kbar = s.finish(key_features, count, nodes.k.dtype)
        children = group_flags(nodes.count) > 0
        vbar = softmax_attention(qbar[:, :, :, None], group(nodes.k), group(nodes.v), allowed=children[:, :, :, None])
        return Nodes(kbar, vbar[:, :, :, 0], count > 0, query_features, key_features, count)

    # Decoding: a stack of levels. A block that is full becomes one item of the level above, and its tokens are dropped.

    def initial_state(self) -> FixedState:
        decoding_block(self, self.levels)  # refuses where there is none
        return FixedState(0, [Level() for _ in range(self.levels)])

    def advance(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor, state: FixedState) -> tuple[Seen, FixedState]:
        s, m = self.summary, decoding_block(self, self.levels)
        flag = real[:, None]
        levels = list(state.levels)
        query_features = s.lift_queries(q, flag[:, None])[:, :, 0]
        key_features = s.lift_keys(k, flag[:, None])[:, :, 0]
        levels[0] = levels[0].add(s, k, v, flag, query_features, key_features, real.long())
        seen = join_seen([(x.k, x.v, x.real) for x in levels if x.k is not None])
        for depth in range(self.levels - 1):
            level = levels[depth]
            if level.k is None or level.k.shape[2] < m:
                break
            count = level.count[:, None]
            qbar = s.finish(level.query_features, count, q.dtype)[:, :, None]
            kbar = s.finish(level.key_features, count, k.dtype)[:, :, None]
            vbar = softmax_attention(qbar, level.k, level.v, allowed=level.real[:, None, None])
            levels[depth] = Level()
            levels[depth + 1] = levels[depth + 1].add(
                s, kbar, vbar, count > 0, level.query_features, level.key_features, level.count
            )
        return seen, FixedState(state.position + 1, levels)


@dataclass
class Level:
    """The items of a level that are not yet summarised, tokens or nodes, and what their summary will be made of."""

    k: Any = None  # (B, H, items, D); None while there are none
    v: Any = None
    real: Any = None  # (B, items)
    query_features: Any = None  # (B, H, D)
    key_features: Any = None
    count: Any = None  # (B,): tokens

    def add(self, summary, k, v, real, query_features, key_features, count) -> Level:
        if self.k is None:
            return Level(k, v, real, query_features, key_features, count)
        return Level(
            torch.cat([self.k, k], 2),
            torch.cat([self.v, v], 2),
            torch.cat([self.real, real], 1),
            summary.join(self.query_features, query_features),
            summary.join(self.key_features, key_features),
            self.count + count,
        )


@dataclass
class FixedState:
    position: int
    levels: list[Level]


def _of_nodes(x: Tensor, index: Tensor, everything: bool) -> Tensor:
    """Nodes (B, H, n, D) for each block, by index (blocks, K): (B, H, blocks, K, D)."""
    if everything:
        return x[:, :, None].expand(-1, -1, index.shape[0], -1, -1)
    return torch.unflatten(x.index_select(2, index.flatten()), 2, index.shape)


def run_kernel(attn: CombinerFixed, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: None) -> Tensor:
    dtype, m = q.dtype, attn.block_size or default_block(q.shape[2], attn.max_length)
    q, k, v = (attn._widen(t) for t in (q, k, v))
    return kernel.combiner_fixed(q, k, v, mask, block_size=m, pool=attn.summary.pool, causal=attn.causal).to(dtype)


def lacks(attn: CombinerFixed, *qkv: Tensor) -> str:
    if attn.levels > 2 or attn.own_span:
        return "the kernel has neither levels > 2 nor own_span"
    if attn.summary.kind not in kernel.POOLS:
        return f"the kernel has the summaries {', '.join(kernel.POOLS)}, not {attn.summary.kind}"
    return ""


register(
    "combiner-fixed",
    CombinerFixed,
    naive=naive,
    paper="Ren et al. 2021, Combiner: Full Attention Transformer with Sparse Computation Cost (2107.05768)",
    cost="L*sqrt(L)",
    length_dependent="without max_length the default block size follows the length; block_size fixes it",
    kernel=Kernel(run_kernel, lacks, kernel.LEAST_LENGTH),
)
