"""Attention on graphs with source dropout: EGT-Simple, an edge-augmented transformer that does not update edges.

The Information Pathways Hypothesis, https://arxiv.org/abs/2306.01705; EGT, https://arxiv.org/abs/2108.03348

    out_i = Σ_j softmax_j(q_i · k_j / √D + e_ij) sigmoid(g_ij) v_j          e, g linear in the edge features, per head

In training, each source node of each graph is dropped with probability `source_dropout`, for all heads and targets,
but at least one per graph is kept. This is the unbiased form of subsampled attention; it replaces attention dropout.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..attention.subsampled import Subsampling, drop_sources


class EdgeAttention(Subsampling, nn.Module):
    """`layer(x, edges, mask=None)`: nodes x (B, N, dim), edges (B, N, N, edge_dim), mask (B, N) True for real nodes."""

    def __init__(
        self, dim: int, heads: int, edge_dim: int, *, source_dropout: float = 0.1, same_on_all_ranks: bool = False
    ):
        super().__init__()
        if heads < 1 or dim % heads:
            raise ValueError(f"dim={dim} must be divisible by heads={heads}")
        if not 0 <= source_dropout < 1:
            raise ValueError(f"source_dropout must be in [0, 1), got {source_dropout}")
        self.dim, self.heads, self.edge_dim = dim, heads, edge_dim
        self.source_dropout, self.same_on_all_ranks = source_dropout, same_on_all_ranks
        self.qkv = nn.Linear(dim, 3 * dim)
        self.edge = nn.Linear(edge_dim, 2 * heads)  # the bias of each head, then the gate of each head
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, edges: Tensor, mask: Tensor | None = None) -> Tensor:
        B, N, _ = x.shape
        if edges.shape != (B, N, N, self.edge_dim):
            raise ValueError(f"edges must be {(B, N, N, self.edge_dim)}, got {tuple(edges.shape)}")
        if mask is not None:
            # Padding may contain NaN.
            x = x.masked_fill(~mask[..., None], 0)
            edges = edges.masked_fill(~(mask[:, :, None] & mask[:, None, :])[..., None], 0)
        q, k, v = (torch.unflatten(t, -1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        bias, gate = self.edge(edges).movedim(-1, 1).chunk(2, 1)
        logits = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + bias
        legal = mask
        if self.samples_now and self.source_dropout:
            legal = drop_sources(mask, x, N, self.source_dropout, per_rank=not self.same_on_all_ranks)
        if legal is not None:
            legal = legal[:, None, None, :]
            # An empty graph attends to everything and is then zeroed: no NaN, no gradient.
            empty = ~legal.any(-1, keepdim=True)
            logits = logits.masked_fill(~(legal | empty), float("-inf"))
            gate = gate.masked_fill(~legal, float("-inf"))
        out = (logits.softmax(-1) * gate.sigmoid()) @ v
        return self.out(out.transpose(1, 2).flatten(2))
