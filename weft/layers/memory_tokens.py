"""Memory tokens: learned vectors that are added to the sequence and pass through ordinary layers.

Burtsev et al., Memory Transformer, https://arxiv.org/abs/2006.11527

    [·; y] = stack([mem; x])                                    mem: m learned vectors

Bulatov et al., Recurrent Memory Transformer, https://arxiv.org/abs/2207.06881

    [·; y_τ; mem_{τ+1}] = stack([mem_τ; x_τ; mem_τ])            the first copy is read, the last copy is written
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.sharding import refuse


class MemoryTokens(nn.Module):
    """`layer(x, mask)`: prepends `tokens` learned vectors to the sequence and removes them from the output.

    `stack` maps (B, L, dim) to (B, L, dim) and takes a mask (B, L). Nothing is carried between segments.
    """

    def __init__(self, stack: nn.Module, dim: int, tokens: int):
        super().__init__()
        self.stack = stack
        self.memory = nn.Parameter(torch.empty(tokens, dim))
        nn.init.normal_(self.memory, std=0.02)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        refuse("MemoryTokens")
        m = self.memory.shape[0]
        joined = torch.cat([self.memory.to(x.dtype).expand(x.shape[0], -1, -1), x], 1)
        mask = None if mask is None else F.pad(mask, (m, 0), value=True)
        return self.stack(joined, mask)[:, m:]


class ReadWriteOrder:
    """A position bias, 0 or -inf, that acts as the attention mask of [read; x; write].

    Read tokens attend to each other. Tokens of x attend to the read tokens and to x (when causal, not to later
    tokens). Write tokens attend to everything.
    """

    shared_heads = True

    def __init__(self, tokens: int, length: int, causal: bool):
        self.tokens, self.length, self.causal = tokens, length, causal

    def __call__(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        i, j, m, end = query_positions, key_positions, self.tokens, self.tokens + self.length
        within = (i >= m) & (j < end) & ((j <= i) | (not self.causal))
        allowed = (j < m) | within | (i >= end)
        return torch.zeros(allowed.shape, device=allowed.device).masked_fill(~allowed, float("-inf"))


class RecurrentMemory(nn.Module):
    """`y, memory = layer(x, memory)`: each segment reads the memory that the previous segment wrote.

    `stack(x, mask, bias)` must pass mask and bias to non-causal attention that supports a position bias; the bias
    implements causality. The memory keeps its autograd graph, for backpropagation through a few segments; `segments`
    detaches it after `bptt` segments.
    """

    def __init__(self, stack: nn.Module, dim: int, tokens: int, *, causal: bool = True):
        super().__init__()
        if tokens < 1:
            raise ValueError(f"a recurrent memory needs at least one token, got {tokens}")
        self.stack, self.causal = stack, causal
        self.memory = nn.Parameter(torch.empty(tokens, dim))  # what the first segment reads
        nn.init.normal_(self.memory, std=0.02)

    def forward(self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        refuse("RecurrentMemory")
        m, L = self.memory.shape[0], x.shape[1]
        if memory is None:
            memory = self.memory.to(x.dtype).expand(x.shape[0], -1, -1)
        if memory.shape != (x.shape[0], m, x.shape[2]):
            raise ValueError(f"memory must be {(x.shape[0], m, x.shape[2])}, got {tuple(memory.shape)}")
        joined = torch.cat([memory, x, memory], 1)
        mask = None if mask is None else F.pad(mask, (m, m), value=True)
        y = self.stack(joined, mask, ReadWriteOrder(m, L, self.causal))
        return y[:, m : m + L], y[:, m + L :]

    def segments(self, x: Tensor, length: int, *, bptt: int = 2, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Process a long x (B, T, dim) in segments of `length`; gradients cross at most `bptt` - 1 boundaries."""
        if length < 1 or bptt < 1:
            raise ValueError(f"length and bptt must be at least 1, got {length} and {bptt}")
        found, memory = [], None
        masks = [None] * len(x.split(length, 1)) if mask is None else mask.split(length, 1)
        for number, (segment, real) in enumerate(zip(x.split(length, 1), masks, strict=True)):
            if memory is not None and number % bptt == 0:
                memory = memory.detach()
            y, memory = self(segment, memory, real)
            found.append(y)
        assert memory is not None
        return torch.cat(found, 1), memory
