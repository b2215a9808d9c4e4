"""Routing attention: a token sees the tokens of its cluster.

Roy et al., Efficient Content-Based Sparse Attention with Routing Transformers, https://arxiv.org/abs/2003.05997

    Ω_i = {j : run of j = run of i}          cut at i when causal

Runs are clusters of keys, cut at a fixed capacity (clusters.py). A token has one cluster, that of its key; the
paper's choice of the w best tokens per centroid leaves some in none and lets the future move the past.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..core.contract import Attention, PositionBias
from ..core.dense import dense_attention, runs_of, same
from ..core.joint import Part, joint_attention
from ..core.partitions import own_block
from ..core.registry import register
from ..core.runs import Runs, take_mask, take_rows
from .clusters import Clusters


def naive(
    attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bias: PositionBias | None = None
) -> Tensor:
    """The paper gives each centroid its w best tokens; here every token belongs to one run of one cluster."""
    nearest = (k @ attn.clusters.centroids.mT).argmax(-1)
    group, run = runs_of(nearest, mask, attn.clusters.size(k.shape[2]))
    return dense_attention(attn, q, k, v, mask, bias, same(group) & same(run))


@dataclass
class RunLayout:
    """Tokens gathered in runs. In an empty slot stands some token; nobody sees it there."""

    runs: Runs

    def arrange(self, x: Tensor) -> Tensor:
        token = self.runs.token
        return take_rows(x.expand(*token.shape[:2], *x.shape[2:]), token.clamp(max=x.shape[2] - 1))

    def restore(self, x: Tensor, length: int) -> Tensor:
        return take_rows(x.flatten(2, 3), self.runs.slot)


def run_part(
    runs: Runs, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, bias: PositionBias | None = None
) -> Part:
    """The own run."""
    layout, L = RunLayout(runs), k.shape[2]
    if causal and mask is None:  # runs are in order of position, and their empty slots at the end
        allowed = own_block(runs.token.shape[-1], causal, k.device)[None, None, None]
    else:
        allowed = take_mask(mask, runs.token, L)[..., None, :]
        if causal:
            allowed = allowed & (runs.token[..., None, :] <= runs.token[..., :, None])
    at = runs.token.clamp(max=L - 1)
    values = None if bias is None else bias(at[..., :, None], at[..., None, :])
    return Part(layout, layout.arrange(k), layout.arrange(v), allowed, values)


class RoutingAttention(Attention):
    """`clusters` centroids per head, runs of at most `capacity` tokens, `decay` of the centroids' moving average."""

    def __init__(
        self, *, clusters: int | None = None, capacity: int | None = None, decay: float = 0.999, **contract: Any
    ):
        super().__init__(**contract)
        self.clusters = Clusters(self.heads, self.head_dim, clusters, capacity, decay, self.max_length)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: PositionBias | None) -> Tensor:
        part = run_part(self.clusters.runs(k, mask), k, v, mask, self.causal, bias)
        return joint_attention(q, [part], dropout=self.dropout if self.training else 0.0)


register(
    "routing",
    RoutingAttention,
    naive=naive,
    paper="Roy et al. 2020, Efficient Content-Based Sparse Attention with Routing Transformers (2003.05997)",
    cost="L*sqrt(L)",
    bias=True,
    length_dependent="without max_length the default capacity follows the length; capacity fixes it",
)
