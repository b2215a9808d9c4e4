"""Synthesizer: attention logits that are learned, or computed from each query alone.

Tay et al., Synthesizer: Rethinking Self-Attention, https://arxiv.org/abs/2005.00743

    out_i = Σ_j softmax_j(R_ij [+ q_i · k_j / √D]) v_j

    random       R learned, (H, max_length, max_length)
    factorized   R = U V,  U (H, max_length, rank), V (H, rank, max_length)
    dense        R_i = W_2 ReLU(W_1 q_i),  max_length logits for each query; W_1 (H, D, D), W_2 (H, D, max_length)

`dot=True` adds the usual dot product. Without it, random and factorized use neither q nor k.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..core.contract import Attention, PositionBias
from ..core.dense import dense_logits, dense_softmax, legal
from ..core.registry import register
from ..core.softmax import softmax_attention


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
        self.reads_q, self.reads_k = dot or kind == "dense", dot
        shapes = {"random": [(H, N, N)], "factorized": [(H, N, rank), (H, rank, N)], "dense": [(H, D, D), (H, D, N)]}
        self.factors = nn.ParameterList([nn.Parameter(torch.empty(shape)) for shape in shapes[kind]])
        for factor in self.factors:
            nn.init.normal_(factor, std=factor.shape[1] ** -0.5 if kind == "dense" else 0.1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: PositionBias | None) -> Tensor:
        Lq, Lk = q.shape[2], k.shape[2]
        factors = [f.to(q.dtype) for f in self.factors]
        if self.kind == "random":
            R = factors[0][None, :, :Lq, :Lk]
        elif self.kind == "factorized":
            R = (factors[0][:, :Lq] @ factors[1][:, :, :Lk])[None]
        else:
            R = (q @ factors[0]).relu() @ factors[1][:, :, :Lk]
        i = torch.arange(Lq, device=q.device).view(1, 1, Lq, 1)
        j = torch.arange(Lk, device=q.device).view(1, 1, 1, Lk)
        if bias is not None:
            R = R + bias(i, j).to(R.dtype)
        if not self.dot:
            q, k = torch.zeros_like(q), torch.zeros_like(k)
        allowed = None if mask is None else mask[:, None, None]
        if self.causal:
            allowed = j <= i if allowed is None else (j <= i) & allowed
        return softmax_attention(q, k, v, allowed=allowed, bias=R, dropout=self.dropout if self.training else 0.0)


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
