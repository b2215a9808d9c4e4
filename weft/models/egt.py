"""EGT-Simple: a Transformer on graphs whose edges bias and gate the attention, and are not updated.

Hussain et al., Global Self-Attention as a Replacement for Graph Convolution, https://arxiv.org/abs/2108.03348; with
source dropout: The Information Pathways Hypothesis, https://arxiv.org/abs/2306.01705

    x_i = Σ_f Embed_f(node feature f of i)          e_ij = Embed(distance) + Σ_f Embed_f(bond feature f of ij)
    x = x + EdgeAttention(LN(x), e);  x = x + FFN(LN(x))          layers times, on nodes and 4 virtual nodes
    value = MLP([LN(x) of the virtual nodes])

The published small model has 6 layers, width 512, 32 heads, edges of width 64, an FFN as wide as the model: 11 M.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.feedforward import FeedForward
from ..layers.graph_attention import EdgeAttention


class EGT(nn.Module):
    """`model(nodes, distances, bonds)` -> (B,): one value per graph.

    nodes (B, N, features) are integers, 0 in the first feature for padding; distances (B, N, N) and bonds
    (B, N, N, bond features), 0 without a bond. The sizes are numbers of values per feature.
    """

    def __init__(
        self,
        node_sizes: tuple[int, ...],
        bond_sizes: tuple[int, ...],
        distances: int,
        *,
        dim: int = 512,
        edge_dim: int = 64,
        heads: int = 32,
        layers: int = 6,
        mlp_dim: int = 512,
        virtual: int = 4,
        source_dropout: float = 0.1,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.virtual = virtual
        self.node = nn.ModuleList([nn.Embedding(size, dim) for size in node_sizes])
        self.bond = nn.ModuleList([nn.Embedding(size, edge_dim, padding_idx=0) for size in bond_sizes])
        self.distance = nn.Embedding(distances, edge_dim)
        for embedding in (*self.node, *self.bond, self.distance):
            nn.init.normal_(embedding.weight, std=0.02)  # type: ignore[arg-type]
        self.virtual_nodes = nn.Parameter(torch.randn(virtual, dim) * 0.02)
        self.virtual_edges = nn.Parameter(torch.randn(virtual, edge_dim) * 0.02)  # to and from each virtual node
        self.attention = nn.ModuleList(
            [EdgeAttention(dim, heads, edge_dim, source_dropout=source_dropout) for _ in range(layers)]
        )
        self.feedforward = nn.ModuleList([FeedForward(dim, mlp_dim, dropout=dropout) for _ in range(layers)])
        self.norms = nn.ModuleList([nn.LayerNorm(dim) for _ in range(2 * layers + 1)])
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Sequential(
            nn.Linear(dim * virtual, dim), nn.GELU(), nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, 1)
        )

    def forward(self, nodes: Tensor, distances: Tensor, bonds: Tensor) -> Tensor:
        B, V = nodes.shape[0], self.virtual
        mask = F.pad(nodes[..., 0] > 0, (V, 0), value=True)
        x = torch.stack([embed(nodes[..., f].long()) for f, embed in enumerate(self.node)]).sum(0)
        x = torch.cat([self.virtual_nodes.expand(B, -1, -1).to(x.dtype), x], 1)
        e = self.distance(distances.long())
        for f, embed in enumerate(self.bond):
            e = e + embed(bonds[..., f].long())
        e = self._with_virtual(e)
        for i, (attention, feedforward) in enumerate(zip(self.attention, self.feedforward, strict=True)):
            x = x + self.dropout(attention(self.norms[2 * i](x), e, mask))
            x = x + self.dropout(feedforward(self.norms[2 * i + 1](x)))
        with torch.autocast(x.device.type, enabled=False):  # bfloat16 would round the values to three digits
            return self.out(self.norms[-1](x[:, :V].to(self.norms[-1].weight.dtype)).flatten(1))[:, 0]  # type: ignore

    def _with_virtual(self, e: Tensor) -> Tensor:
        """Edges (B, N, N, d) -> (B, V + N, V + N, d): every virtual node has one edge feature for all its edges."""
        B, N, V = e.shape[0], e.shape[1], self.virtual
        own = self.virtual_edges.to(e.dtype)
        rows = own[None, :, None].expand(B, V, N, -1)
        among = (own[:, None] + own[None])[None].expand(B, -1, -1, -1) / 2
        return torch.cat([torch.cat([among, rows], 2), torch.cat([rows.transpose(1, 2), e], 2)], 1)
