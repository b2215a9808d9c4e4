"""Synthesizer: attention logits that are learned, or computed from each query alone.

Tay et al., Synthesizer: Rethinking Self-Attention, https://arxiv.org/abs/2005.00743

    out_i = Σ_j softmax_j(R_ij [+ q_i · k_j / √D]) v_j

    random       R learned, (H, max_length, max_length)
    factorized   R = U V,  U (H, max_length, rank), V (H, rank, max_length)
    dense        R_i = W_2 ReLU(W_1 q_i),  max_length logits for each query; W_1 (H, D, D), W_2 (H, D, max_length)

`dot=True` adds the usual dot product. Without it, random and factorized use neither q nor k. The factorized form never
computes R: its logits are dot products of longer vectors, (q_i, √D U_i) · (k_j, V_j) / √D.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.blocks import ceil_div
from ..core.contract import Attention, PositionBias
from ..core.dense import dense_logits, dense_softmax, legal
from ..core.registry import register
from ..core.segments import Segments
from ..core.softmax import fused, fused_packed, softmax_attention


def naive(
    attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bias: PositionBias | None = None
) -> Tensor:
    Lq, Lk, f = q.shape[2], k.shape[2], list(attn.factors)
    if attn.kind == "random":
        R = f[0][:, :Lq, :Lk]
    elif attn.kind == "factorized":
        R = f[0][:, :Lq] @ f[1][:, :, :Lk]
    else:
        R = (q @ f[0]).relu() @ f[1][:, :, :Lk]
    dot = 1 if attn.dot else 0
    return dense_softmax(R + dense_logits(dot * q, k, bias), legal(attn, q, k, mask)) @ v


class SynthesizerAttention(Attention):
    def __init__(self, *, kind: str = "factorized", rank: int = 32, dot: bool = True, **contract):
        super().__init__(**contract)
        if kind not in ("random", "factorized", "dense"):
            raise ValueError(f"kind must be 'random', 'factorized' or 'dense', got {kind!r}")
        if rank < 1:
            raise ValueError(f"rank must be at least 1, got {rank}")
        assert self.max_length is not None
        H, N, D = self.heads, self.max_length, self.head_dim
        self.kind, self.dot = kind, dot
        self.packs = kind == "factorized" and D + rank <= 248
        self.reads_q, self.reads_k = dot or kind == "dense", dot
        self.places_queries = kind != "dense"
        shapes = {"random": [(H, N, N)], "factorized": [(H, N, rank), (H, rank, N)], "dense": [(H, D, D), (H, D, N)]}
        self.factors = nn.ParameterList([nn.Parameter(torch.empty(shape)) for shape in shapes[kind]])
        for factor in self.factors:
            nn.init.normal_(factor, std=factor.shape[1] ** -0.5 if kind == "dense" else 0.1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: PositionBias | None) -> Tensor:
        Lq, Lk, width = q.shape[2], k.shape[2], v.shape[3]
        factors = [f.to(q.dtype) for f in self.factors]
        R, scale = None, self.head_dim**-0.5
        if self.kind == "factorized":
            q, k, v = self._longer(q, k, v, factors[0][None, :, :Lq], factors[1][None, :, :, :Lk].mT)
        elif self.kind == "random":
            R = factors[0][None, :, :Lq, :Lk]
        else:
            R = (q @ factors[0]).relu() @ factors[1][:, :, :Lk]
        if R is not None and not self.dot:
            q, k = torch.zeros_like(q), torch.zeros_like(k)
        if self.causal and mask is None and bias is None and R is None:
            return fused(q, k, v, is_causal=True, dropout_p=self.dropout_now, scale=scale)[..., :width]
        i = torch.arange(Lq, device=q.device).view(1, 1, Lq, 1)
        j = torch.arange(Lk, device=q.device).view(1, 1, 1, Lk)
        if bias is not None:
            values = bias(i, j).to(q.dtype)
            R = values if R is None else R + values
        allowed = None if mask is None else mask[:, None, None]
        if self.causal:
            allowed = j <= i if allowed is None else (j <= i) & allowed
        return softmax_attention(q, k, v, allowed=allowed, bias=R, dropout=self.dropout_now, scale=scale)[..., :width]

    def attend_packed(self, q: Tensor, k: Tensor, v: Tensor, documents: Segments) -> Tensor:
        D, at = self.head_dim, documents.positions

        def placed(factor: Tensor, at: Tensor) -> Tensor:
            """(H, max_length, rank) -> (B, H, L, rank). The gradient of an embedding sums the documents in float32."""
            rows = F.embedding(at, factor.to(q.dtype).transpose(0, 1).flatten(1))
            return torch.unflatten(rows, -1, (self.heads, -1)).transpose(1, 2)

        own = at if q.shape[2] == k.shape[2] else at.new_zeros(1, q.shape[2])
        longer = self._longer(q, k, v, placed(self.factors[0], own), placed(self.factors[1].mT, at))
        return fused_packed(*longer, documents, causal=self.causal, dropout=self.dropout_now, scale=D**-0.5)[..., :D]

    def _longer(self, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v with √D q kᵀ = √D U V [+ q kᵀ], for the factors' `rows` and `columns`, (1 or B, H, L, rank). All
        have the same width, as fused attention requires."""
        D, used = self.head_dim, rows.shape[-1] + (self.head_dim if self.dot else 0)
        width = max(D, ceil_div(used, 8) * 8)

        def joined(x: Tensor, factor: Tensor) -> Tensor:
            factor = factor.expand(x.shape[0], -1, -1, -1)
            # The layout (B, L, H, D) is that of the projections, and of fused attention.
            whole = torch.cat([part.transpose(1, 2) for part in ([x, factor] if self.dot else [factor])], -1)
            return F.pad(whole, (0, width - used)).transpose(1, 2)

        return joined(q, rows * D**0.5), joined(k, columns), F.pad(v, (0, max(0, width - v.shape[-1])))


register(
    "synthesizer",
    SynthesizerAttention,
    naive=naive,
    paper="Tay et al. 2021, Synthesizer (2005.00743)",
    cost="L^2",
    cross=True,
    bias=True,
    learned=True,
    needs_max_length=True,
)
