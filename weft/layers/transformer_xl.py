"""Transformer-XL: attention over a memory of the last segments, with relative positions.

Dai et al., Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context, https://arxiv.org/abs/1901.02860

    h̃    = [stop-gradient(m); h]                          q from h, k and v from h̃
    A_ij = ((q_i + u) · k_j + (q_i + v) · W_R R_{i-j}) / √d          j ≤ i, R: sinusoids of the distance
    m'   = the last M rows of [m; h]
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.positions import sinusoids
from ..core.sharding import refuse
from ..core.softmax import softmax_attention


class SegmentMemory(NamedTuple):
    """A layer's inputs from earlier segments, (B, M, dim), and which of them are real, (B, M)."""

    tokens: Tensor
    valid: Tensor


class TransformerXLAttention(nn.Module):
    """`y, memory = layer(x, memory)`: causal attention that also reads up to `memory` tokens of earlier segments.

    The memory is an explicit input and output; the layer has no hidden state. With `memory=0` it is plain relative
    attention and returns only y, so `CachedAttention` can wrap it.
    """

    causal = True

    def __init__(self, dim: int, heads: int, memory: int, *, dropout: float = 0.0):
        super().__init__()
        if heads < 1 or dim % heads:
            raise ValueError(f"dim={dim} must be divisible by heads={heads}")
        if memory < 0:
            raise ValueError(f"memory must be a number of tokens, 0 or more, got {memory}")
        self.dim, self.heads, self.head_dim, self.memory, self.dropout = dim, heads, dim // heads, memory, dropout
        self.q, self.k, self.v, self.out, self.r = (nn.Linear(dim, dim, bias=False) for _ in range(5))
        self.content_bias = nn.Parameter(torch.zeros(heads, self.head_dim))  # u
        self.position_bias = nn.Parameter(torch.zeros(heads, self.head_dim))  # v
        for linear in (self.q, self.k, self.v, self.out, self.r):
            nn.init.xavier_uniform_(linear.weight)

    def forward(self, x: Tensor, memory: SegmentMemory | None = None, mask: Tensor | None = None) -> Any:
        """x (B, L, dim); `mask` (B, L) is True for real tokens."""
        y = self.merge(self.per_head(x, memory, mask))
        return y if self.memory == 0 else (y, self.remember(x, memory, mask))

    def per_head(self, x: Tensor, memory: SegmentMemory | None = None, mask: Tensor | None = None) -> Tensor:
        """The heads before the output projection, (B, H, L, head_dim)."""
        refuse("TransformerXLAttention")
        seen, valid = _joined(x, memory, mask)
        L, M = x.shape[1], seen.shape[1] - x.shape[1]
        x = seen[:, M:]
        q, k, v = self._split(self.q(x)), self._split(self.k(seen)), self._split(self.v(seen))
        distances = self.r(sinusoids(M + L, self.dim, device=x.device, dtype=x.dtype))
        r = torch.unflatten(distances, -1, (self.heads, -1)).transpose(0, 1)  # (H, M + L, d), by distance
        by_distance = (q + self.position_bias[:, None]) @ r.transpose(1, 2)
        i = torch.arange(M, M + L, device=x.device)[:, None]
        j = torch.arange(M + L, device=x.device)[None]
        distance = (i - j).clamp(min=0).expand(*q.shape[:2], -1, -1)
        bias = by_distance.gather(-1, distance) / self.head_dim**0.5
        allowed = (j <= i)[None, None] & valid[:, None, None]
        dropout = self.dropout if self.training else 0.0
        return softmax_attention(q + self.content_bias[:, None], k, v, allowed=allowed, bias=bias, dropout=dropout)

    def merge(self, heads: Tensor) -> Tensor:
        """(B, H, L, head_dim) -> (B, L, dim)."""
        return self.out(heads.transpose(1, 2).flatten(2))

    def remember(self, x: Tensor, memory: SegmentMemory | None = None, mask: Tensor | None = None) -> SegmentMemory:
        """The memory for the next segment, detached from the graph."""
        seen, valid = _joined(x, memory, mask)
        first = max(0, seen.shape[1] - self.memory)
        return SegmentMemory(seen[:, first:].detach(), valid[:, first:])

    def _split(self, x: Tensor) -> Tensor:
        return torch.unflatten(x, -1, (self.heads, -1)).transpose(1, 2)


def _joined(x: Tensor, memory: SegmentMemory | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """[m; h] and its mask. Masked tokens are zeroed, so that NaN in padding has no effect."""
    if mask is None:
        mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    if mask.dtype != torch.bool or mask.shape != x.shape[:2]:
        raise ValueError(f"mask must be boolean (B, L) = {tuple(x.shape[:2])}, got {mask.dtype} {tuple(mask.shape)}")
    x = x.masked_fill(~mask[..., None], 0)
    if memory is None:
        return x, mask
    if memory.tokens.shape[0] != x.shape[0]:
        raise ValueError(f"the memory has {memory.tokens.shape[0]} rows, but this batch has {x.shape[0]}")
    return torch.cat([memory.tokens.detach(), x], 1), torch.cat([memory.valid, mask], 1)
