"""Multi-head subspace self-attention: attention that compresses tokens towards K subspaces.

Yu et al., White-Box Transformers via Sparse Rate Reduction, https://arxiv.org/abs/2306.01129

    w_k   = z U_k                                         one projection: query, key and value at once
    SSA_k = softmax(scale · w_k w_kᵀ) w_k                 eq 11; scale is 1 there, 1/√p in every published result
    MSSA  = [SSA_1 … SSA_K] Wᵀ + b                        eq 115, W free; the form of every published result
    MSSA  = γ Σ_k SSA_k U_kᵀ                              eq 12, with tied=True

z is (L, dim) with tokens as rows; U_k is (dim, p). Any registered mechanism may stand in for softmax attention.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import attention_info, make_attention
from ..attention.full import FullAttention
from ..core.contract import Attention, PositionBias, quiet_padding
from ..core.dispatch import check_backend, use_triton
from ..kernels import mssa as kernel


class SubspaceAttention(FullAttention):
    """`full`, with kernels of its own where one tensor is query, key and value: `weft/kernels/mssa.py`."""

    def __init__(self, *, backend: str = "auto", **contract: Any):
        super().__init__(**contract)
        self.backend = check_backend(backend)
        self.name, self.info = "full", attention_info("full")

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bias: PositionBias | None = None
    ) -> Tensor:
        cannot = ""
        if not (q is k and k is v):
            cannot = "the kernel takes one tensor as query, key and value, which scale=None gives"
        elif bias is not None:
            cannot = "the kernel has no position bias"
        elif self.dropout and self.training:
            cannot = "the kernel has no dropout"
        self.check(q, k, v, mask, bias)
        if not use_triton(self.backend, "MSSA", q, v, cannot=cannot, least_length=kernel.LEAST_LENGTH):
            return super().forward(q, k, v, mask, bias)
        return kernel.mssa(q, mask, causal=self.causal)


class MSSA(nn.Module):
    """`layer(x, mask=None, bias=None)`, x (B, L, dim), mask (B, L): the compression half of a CRATE layer.

    With one head as wide as `dim` there is no output map, as in the authors' code. `scale` sets the factor before
    w wᵀ in mechanisms whose logits are q·k/√D: `scale=1` with `tied=True` is the paper's eqs 11 and 12 to the letter.

    `backend` "triton" is the fused kernel of `weft/kernels/mssa.py` for softmax attention without `scale`, or the
    mechanism's own where it has one; "torch" is the plain version; "auto" takes the mechanism's own kernel, but
    cuDNN in place of ours, which needs a third of the memory and is 4 to 13 % slower. Decoding is always "torch".
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
        backend: str = "auto",
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ):
        super().__init__()
        if head_dim is None:
            if heads < 1 or dim % heads:
                raise ValueError(f"dim={dim} does not divide into {heads} heads; give head_dim")
            head_dim = dim // heads
        if gamma is not None and not tied:
            raise ValueError("gamma scales the tied output map (eq 12): give tied=True, or leave it out")
        if scale is not None and scale <= 0:
            raise ValueError(f"scale multiplies the logits and must be positive, got {scale}")
        self.dim, self.heads, self.head_dim, self.causal = dim, heads, head_dim, causal
        self.tied, self.gamma, self.scale = tied, 1.0 if gamma is None else gamma, scale
        contract = {
            "heads": heads,
            "head_dim": head_dim,
            "causal": causal,
            "max_length": max_length,
            "dropout": dropout,
        }
        self.attention = _mechanism(attention, scale, backend, contract, options).to(device=device, dtype=dtype)
        place = {"device": device, "dtype": dtype}
        self.subspaces = nn.Linear(dim, heads * head_dim, bias=False, **place)  # rows kp … (k+1)p are U_kᵀ
        bare = tied or (heads == 1 and head_dim == dim)
        self.out = None if bare else nn.Linear(heads * head_dim, dim, **place)
        self.dropout = nn.Dropout(dropout)

    @property
    def bases(self) -> Tensor:
        """The subspaces U, (heads, dim, head_dim)."""
        return self.subspaces.weight.unflatten(0, (self.heads, self.head_dim)).transpose(1, 2)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """w as query, key and value, each (B, heads, L, head_dim)."""
        w = self.subspaces(x).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
        if self.scale is None:
            return w, w, w
        # The mechanism divides by √p; a factor on both sides keeps query and key the same vector.
        qk = w * (self.scale * self.head_dim**0.5) ** 0.5
        return qk, qk, w

    def forward(self, x: Tensor, mask: Tensor | None = None, bias: PositionBias | None = None) -> Tensor:
        self._check(x)
        x = quiet_padding(x, mask)
        return self.merge(self.attention(*self.project(x), mask, bias))

    def merge(self, heads: Tensor) -> Tensor:
        """(B, H, L, D) -> (B, L, dim): through W, or back through the subspaces when tied."""
        z = heads.transpose(1, 2).flatten(2)
        if self.tied:
            z = self.gamma * F.linear(z, self.subspaces.weight.T)
        elif self.out is not None:
            z = self.out(z)
        return self.dropout(z)

    def weights(self, x: Tensor, mask: Tensor | None = None, bias: PositionBias | None = None) -> Tensor:
        """The mechanism's effective (B, H, L, L) matrix on this input."""
        self._check(x)
        return self.attention.weights(*self.project(x), mask, bias)

    def start(self, batch: int) -> Any:
        """The state before the first token, for `step`."""
        return self.attention.start(batch, device=self.subspaces.weight.device)

    def step(
        self, x: Tensor, state: Any, mask: Tensor | None = None, bias: PositionBias | None = None
    ) -> tuple[Tensor, Any]:
        """One token x (B, 1, dim) in, its output and the next state out."""
        out, state = self.attention.step(*self.project(x), state, mask, bias)
        return self.merge(out), state

    def _check(self, x: Tensor) -> None:
        if x.dim() != 3 or x.shape[-1] != self.dim:
            raise ValueError(f"x must be (B, L, {self.dim}), got {tuple(x.shape)}")

    def extra_repr(self) -> str:
        return f"dim={self.dim}, heads={self.heads}, head_dim={self.head_dim}, tied={self.tied}, scale={self.scale}"


def _mechanism(
    name: str, scale: float | None, backend: str, contract: dict[str, Any], options: dict[str, Any]
) -> Attention:
    check_backend(backend)
    if name == "full" and scale is None and not options:
        return SubspaceAttention(backend=backend, **contract)
    if "triton" in attention_info(name).backends:
        options = {**options, "backend": backend}
    elif backend == "triton":
        raise ValueError(
            f"MSSA cannot use backend='triton' with attention={name!r} and scale={scale}: "
            "its kernel is for attention='full' and scale=None; use 'auto' or 'torch'"
        )
    return make_attention(name, **contract, **options)
