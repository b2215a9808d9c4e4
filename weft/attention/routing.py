"""Routing attention: a token attends to the tokens of its cluster.

Roy et al., Efficient Content-Based Sparse Attention with Routing Transformers, https://arxiv.org/abs/2003.05997

    g_j = argmax_g μ_g · k_j / |k_j|                          μ_g unit vectors, per head
    Ω_i = {j : g_j = g_i, run of j = run of i}                and j ≤ i if causal

argmax assigns every token to exactly one cluster and depends only on that token, so the partition is causal. The
paper instead picks the w best tokens per centroid; this leaves some tokens without a cluster, and later tokens affect
earlier ones. Each cluster is split, in order of position, into runs of at most `capacity` tokens. Tokens attend within
their run, so the cost is bounded for any data.

In training, each centroid is an exponential moving average of its keys. A batch updates the centroids at the next
training call, so a call never uses its own batch. If activation checkpointing repeats a call in the backward pass, the
repeated call updates nothing and uses the same centroids as the first one. Data-parallel ranks add up their keys, so
that N ranks with batch B equal one with batch N·B; every rank must run every training call.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.blocks import power_of_two
from ..core.contract import Attention, PositionBias, hide
from ..core.dense import dense_attention, runs_of, same
from ..core.dispatch import Kernel, constant
from ..core.dropout import dropout_key
from ..core.joint import Part, joint_attention
from ..core.partitions import own_block
from ..core.precision import autocast, precise
from ..core.recomputing import Replays, once, recomputing, refuse_replica
from ..core.registry import register
from ..core.runs import Runs, gather_runs, take_mask, take_rows
from ..kernels.intervals.clusters import content_of, routed_attention
from ..kernels.intervals.kernel import MOST_GROUPS, Orders, group_sums, interval_attention, nearest
from ..kernels.operator import Operator, plain_call


def naive(
    attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bias: PositionBias | None = None
) -> Tensor:
    """The paper picks the w best tokens per centroid; here every token belongs to one run of one cluster."""
    nearest = (k.to(attn.clusters.centroids.dtype) @ attn.clusters.centroids.mT).argmax(-1)
    group, run = runs_of(nearest, mask, attn.clusters.size(k.shape[2]))
    return dense_attention(attn, q, k, v, mask, bias, same(group) & same(run))


class Clusters(nn.Module):
    """Centroids per head, and the assignment of keys to runs."""

    centroids: Tensor
    drawn: Tensor
    count: Tensor

    def __init__(
        self,
        heads: int,
        head_dim: int,
        clusters: int | None,
        capacity: int | None,
        decay: float,
        max_length: int | None,
        whole_up_to: int = 0,
    ):
        super().__init__()
        if clusters is None:
            clusters = 16 if max_length is None else power_of_two(max_length**0.5)
        if clusters < 1:
            raise ValueError(f"clusters must be at least 1, got {clusters}")
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"decay must be in [0, 1], got {decay}")
        self.clusters, self.capacity, self.decay, self.max_length = clusters, capacity, decay, max_length
        self.whole_up_to = whole_up_to
        self.lookers: list[int] = []  # the threads inside `looking`
        start = F.normalize(precise(torch.randn(heads, clusters, head_dim)), dim=-1)
        self.register_buffer("centroids", start)
        self.register_buffer("drawn", torch.zeros_like(start))  # sum of the unit keys of the last batch
        self.register_buffer("count", start.new_zeros(heads, clusters))
        self.replays = Replays()

    def _apply(self, fn: Any, recurse: bool = True) -> Clusters:
        """Casts to half precision keep float32 here, where a step of the moving average would be rounded away."""
        super()._apply(fn, recurse)
        self._keep_precise()
        return self

    def _load_from_state_dict(self, *given: Any) -> None:
        super()._load_from_state_dict(*given)
        self._keep_precise()  # assign=True takes the dtype of the checkpoint

    def _keep_precise(self) -> None:
        for name, buffer in self.named_buffers():
            self._buffers[name] = precise(buffer)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Within this block (`attn.weights`), calls of this thread do not update the centroids."""
        self.lookers.append(_thread())
        try:
            yield
        finally:
            self.lookers.remove(_thread())

    @property
    def learns(self) -> bool:
        if not self.training or (self.lookers and _thread() in self.lookers):
            return False
        refuse_replica(self)
        return True

    @contextmanager
    def one_call(self, k: Tensor, real: Tensor | None) -> Iterator[None]:
        """Within this block (packed documents in groups), keys update the centroids once, and all calls use the same
        centroids."""
        if not self.learns:
            yield
            return
        used, k = k, hide(autocast(k)[0], real)
        k = k.repeat_interleave(len(self.centroids) // k.shape[1], 1)
        before, recalled = self.centroids, self.replays.recall(k) if recomputing() else None
        if recalled is None:
            self.assign(k, real, used)
        else:
            self.centroids = recalled
        try:
            with self.looking():
                yield
        finally:
            self.centroids = before

    def size(self, length: int) -> int:
        """Maximum number of tokens in a run. Without `capacity`, clusters stay whole up to `whole_up_to` tokens."""
        length = self.max_length or length
        if self.capacity is None and length <= self.whole_up_to:
            return max(1, length)
        return self.capacity or power_of_two(2 * length**0.5, least=32)

    @torch.no_grad()
    def assign(self, k: Tensor, mask: Tensor | None, used: Tensor | None = None) -> Tensor:
        """Return the cluster of every key, (B, H, L). Masked tokens get their own cluster, number `clusters`."""
        centroids, learning = self.begin(k, used)
        group = _nearest(k, centroids)
        if mask is not None:
            group = group.masked_fill(~mask[:, None], self.clusters)
        if learning:
            self._remember(F.normalize(k.to(self.centroids.dtype), dim=-1), group)
        return group

    def run_kernel(
        self, operator: Operator, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, key: Tensor | None,
        *options: Any,
    ) -> Tensor | None:  # fmt: skip
        """Attention by an operator of `clustered`, with the key of its dropout. None if this call needs the operators
        of `assign_orders`."""
        if self.clusters > MOST_GROUPS or not plain_call(q):
            return None
        centroids, learning = self.centroids, self.learns
        if learning and recomputing():
            centroids, learning = self.replays.recall(k, content_of), False
        sizes = self.clusters, self.decay, learning
        out, before, content = operator(q, k, v, centroids, self.drawn, self.count, mask, key, *sizes, *options)
        if learning:
            self._add_ranks()
            self.replays.remember(k, before, k, content)
        return out

    @torch.no_grad()
    def assign_orders(self, k: Tensor, mask: Tensor | None) -> Orders:
        """`assign` with the kernels; the tokens sorted by cluster."""
        centroids, learning = self.begin(k)
        group, _ = nearest(k, centroids[None], mask, groups=self.clusters)
        orders = Orders.of(group, self.clusters)
        if learning and torch.compiler.is_compiling():  # Inductor of torch 2.11 needs tables that one operator reads
            unit = F.normalize(k.to(self.centroids.dtype), dim=-1)
            self._remember(unit.repeat_interleave(group.shape[2] // k.shape[1], 1), group[0].long())
        elif learning:
            self.learn(*group_sums(k, orders, len(centroids), self.drawn.dtype))
        return orders

    def begin(self, k: Tensor, used: Tensor | None = None) -> tuple[Tensor, bool]:
        """The centroids for a call with these keys, and whether it must `learn` from them. `used`: the keys in the
        graph of the call, if k is a copy that is not."""
        learning = self.learns
        if learning and recomputing():
            return self.replays.recall(k), False
        if learning:
            self._fold()
            if torch.compiler.is_compiling():
                # A compiled checkpoint would repeat the call with the centroids of the next one. Dynamo leaves
                # checkpoints with an assignment to eager code, and `once` raises an error in others.
                self.centroids = self.centroids
                return once(self.centroids), learning
            self.replays.remember(k, self.centroids.clone(), k if used is None else used)
        return self.centroids, learning

    @torch.no_grad()
    def nearest(self, k: Tensor) -> Tensor:
        """Return the cluster of every key (B, H, L, D) without an update. The norm of a key does not matter."""
        return _nearest(k, self.centroids)

    def runs(self, k: Tensor, mask: Tensor | None) -> Runs:
        return gather_runs(self.assign(k, mask), self.clusters + (mask is not None), self.size(k.shape[2]))

    def _fold(self) -> None:
        mean = self.drawn / self.count.clamp(min=1)[..., None]
        moved = F.normalize(self.decay * self.centroids + (1 - self.decay) * mean, dim=-1)
        self.centroids.copy_(torch.where(self.count[..., None] > 0, moved, self.centroids))

    def _remember(self, unit: Tensor, group: Tensor) -> None:
        """Sum the unit keys of every cluster. Matrix products give the same sums in every run; scatter_add does not."""
        member = (group[..., None] == torch.arange(self.clusters, device=group.device)).to(unit.dtype)  # (B, H, L, C)
        self.learn((member.mT @ unit).sum(0), member.sum((0, 2)))

    def learn(self, total: Tensor, count: Tensor) -> None:
        """Keep the sum of the unit keys of each cluster, and their number, for the next training call."""
        self.drawn.copy_(total)
        self.count.copy_(count)
        self._add_ranks()

    def _add_ranks(self) -> None:
        """Add up the keys of all data-parallel ranks."""
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self.drawn)
            dist.all_reduce(self.count)


@constant
def _thread() -> int:
    return threading.get_ident()


def _nearest(k: Tensor, centroids: Tensor) -> Tensor:
    return (k.to(centroids.dtype) @ centroids.transpose(-1, -2)).argmax(-1)


@dataclass
class RunLayout:
    """Tokens gathered in runs. Empty slots hold an arbitrary token that is masked."""

    runs: Runs

    def arrange(self, x: Tensor) -> Tensor:
        token = self.runs.token
        return take_rows(x.expand(*token.shape[:2], *x.shape[2:]), token.clamp(max=x.shape[2] - 1))

    def restore(self, x: Tensor, length: int) -> Tensor:
        return take_rows(x.flatten(2, 3), self.runs.slot)


def run_part(
    runs: Runs, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, bias: PositionBias | None = None
) -> Part:
    """A token's own run."""
    layout, L = RunLayout(runs), k.shape[2]
    if causal and mask is None:  # runs are sorted by position, with empty slots at the end
        allowed = own_block(runs.token.shape[-1], causal, k.device)[None, None, None]
    else:
        allowed = take_mask(mask, runs.token, L)[..., None, :]
        if causal:
            allowed = allowed & (runs.token[..., None, :] <= runs.token[..., :, None])
    at = runs.token.clamp(max=L - 1)
    values = None if bias is None else bias(at[..., :, None], at[..., None, :])
    return Part(layout, layout.arrange(k), layout.arrange(v), allowed, values)


class RoutingAttention(Attention):
    """`clusters`: centroids per head. `capacity`: maximum run length. `decay`: of the centroids' moving average."""

    def __init__(
        self, *, clusters: int | None = None, capacity: int | None = None, decay: float = 0.999, **contract: Any
    ):
        super().__init__(**contract)
        self.clusters = Clusters(self.heads, self.head_dim, clusters, capacity, decay, self.max_length)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: PositionBias | None) -> Tensor:
        part = run_part(self.clusters.runs(k, mask), k, v, mask, self.causal, bias)
        return joint_attention(q, [part], dropout=self.dropout_now)

    def pattern_for(self, length: int) -> Hashable:
        return self.clusters.size(length)


def run_kernel(attn: RoutingAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: None) -> Tensor:
    clusters, size = attn.clusters, attn.clusters.size(k.shape[2])
    key, threshold = dropout_key(attn, q)
    out = clusters.run_kernel(routed_attention, q, k, v, mask, key, size, attn.causal, threshold)
    if out is None:
        orders = clusters.assign_orders(k, mask)
        out = interval_attention(q, k, v, orders, size=size, causal=attn.causal, key=key, threshold=threshold)
    return out


register(
    "routing",
    RoutingAttention,
    naive=naive,
    paper="Roy et al. 2020, Efficient Content-Based Sparse Attention with Routing Transformers (2003.05997)",
    cost="L*sqrt(L)",
    bias=True,
    length_dependent="without max_length the default capacity depends on the length; set capacity to fix it",
    kernel=Kernel(run_kernel, dropout=True, grouped=lambda attn: True),
)
