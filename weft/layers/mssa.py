"""Multi-head subspace self-attention: attention that compresses tokens towards K subspaces.

Yu et al., White-Box Transformers via Sparse Rate Reduction, https://arxiv.org/abs/2306.01129

    w_k   = z U_k                                         one projection for query, key and value
    SSA_k = softmax(scale · w_k w_kᵀ) w_k                 eq 11; scale is 1 there, 1/√p in every published result
    MSSA  = [SSA_1 … SSA_K] Wᵀ + b                        eq 115, W independent of U; used in every published result
    MSSA  = γ Σ_k SSA_k U_kᵀ                              eq 12, with tied=True

z is (L, dim) with tokens as rows; U_k is (dim, p). Any registered mechanism can replace softmax attention.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import make_attention
from ..core.contract import PositionBias, quiet_padding
from ..core.segments import Segments, documents_of
from .decoding import DecodingLayer


class MSSA(DecodingLayer):
    """`layer(x, mask=None, bias=None)`, x (B, L, dim), mask (B, L): the compression half of a CRATE layer.

    With one head of width `dim` there is no output map, as in the authors' code. `scale` sets the factor before w wᵀ
    for mechanisms with logits q·k/√D; `scale=1` with `tied=True` is exactly the paper's eqs 11 and 12.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        head_dim: int | None = None,
        attention: str = "full",
        causal: bool = False,
        max_length: int | None = None,
        dropout: float = 0.0,
        tied: bool = False,
        gamma: float | None = None,
        scale: float | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ):
        super().__init__()
        if head_dim is None:
            if heads < 1 or dim % heads:
                raise ValueError(f"dim={dim} is not divisible by heads={heads}: set head_dim")
            head_dim = dim // heads
        if gamma is not None and not tied:
            raise ValueError("gamma scales the tied output map (eq 12): set tied=True, or remove gamma")
        if scale is not None and scale <= 0:
            raise ValueError(f"scale must be positive, got {scale}")
        self.dim, self.heads, self.head_dim, self.causal = dim, heads, head_dim, causal
        self.tied, self.gamma, self.scale = tied, 1.0 if gamma is None else gamma, scale
        contract = {"causal": causal, "max_length": max_length, "dropout": dropout, **options}
        self.attention = make_attention(attention, heads=heads, head_dim=head_dim, **contract)
        self.attention.to(device=device, dtype=dtype)
        place = {"device": device, "dtype": dtype}
        self.subspaces = nn.Linear(dim, heads * head_dim, bias=False, **place)  # rows kp … (k+1)p are U_kᵀ
        bare = tied or (heads == 1 and head_dim == dim)
        self.out = None if bare else nn.Linear(heads * head_dim, dim, **place)
        self.dropout = nn.Dropout(dropout)

    @property
    def bases(self) -> Tensor:
        """The subspaces U, (heads, dim, head_dim)."""
        return torch.unflatten(self.subspaces.weight, 0, (self.heads, self.head_dim)).transpose(1, 2)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """w as query, key and value, each (B, heads, L, head_dim)."""
        w = torch.unflatten(self.subspaces(x), -1, (self.heads, self.head_dim)).transpose(1, 2)
        if self.scale is None:
            return w, w, w
        # The mechanism divides by √p. Scaling both sides keeps query and key the same vector.
        qk = w * (self.scale * self.head_dim**0.5) ** 0.5
        return qk, qk, w

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        bias: PositionBias | None = None,
        *,
        segments: Tensor | Segments | None = None,
    ) -> Tensor:
        self.check_input(x)
        if segments is not None:
            segments = documents_of(segments, x)
            x = quiet_padding(x, segments.mask)
        x = quiet_padding(x, mask)
        return self.merge(self.attention(*self.project(x), mask, bias, segments, **self.input(x)))

    def merge(self, heads: Tensor) -> Tensor:
        """(B, H, L, D) -> (B, L, dim): multiply by W, or by the subspaces if tied."""
        z = heads.transpose(1, 2).flatten(2)
        if self.tied:
            if isinstance(self.subspaces, nn.Linear):
                U = self.subspaces.weight.T  # hooks on the projection of tokens must not see U
            else:  # an adapter adds to the weight
                U = self.subspaces(torch.eye(self.dim, dtype=z.dtype, device=z.device))
            z = self.gamma * F.linear(z, U)
        elif self.out is not None:
            z = self.out(z)
        return self.dropout(z)

    def weights(self, x: Tensor, mask: Tensor | None = None, bias: PositionBias | None = None) -> Tensor:
        """The mechanism's effective (B, H, L, L) matrix on this input."""
        self.check_input(x)
        return self.attention.weights(*self.project(x), mask, bias, **self.input(x))

    def extra_repr(self) -> str:
        return f"dim={self.dim}, heads={self.heads}, head_dim={self.head_dim}, tied={self.tied}, scale={self.scale}"
