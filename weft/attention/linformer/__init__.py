"""Linformer: keys and values are projected along the length to a small, fixed number of slots.

Wang et al., Linformer: Self-Attention with Linear Complexity, https://arxiv.org/abs/2006.04768

    k' = Fᵀ k,  v' = Fᵀ v          F learned, (max_length, rank), shared by keys, values and heads
    out_i = Σ_r softmax_r(q_i · k'_r / √D) v'_r

Padded tokens have zero keys and values, so they add nothing to any slot.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...core.contract import Attention, PositionBias, hide
from ...core.dense import dense_logits
from ...core.dispatch import Kernel
from ...core.dropout import dropout_key
from ...core.registry import register
from ...core.softmax import softmax_attention
from . import kernel


def naive(
    attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bias: PositionBias | None = None
) -> Tensor:
    """The published code also projects padding; here padding adds nothing."""
    slots_k, slots_v = (attn.kernel[: k.shape[2]].T @ hide(x, mask) for x in (k, v))
    return dense_logits(q, slots_k).softmax(-1) @ slots_v


class LinformerAttention(Attention):
    exports_any_length = True

    def __init__(self, *, rank: int = 16, **contract):
        super().__init__(**contract)
        if rank < 1:
            raise ValueError(f"rank must be at least 1, got {rank}")
        assert self.max_length is not None
        self.kernel = nn.Parameter(torch.empty(self.max_length, rank))
        nn.init.xavier_uniform_(self.kernel)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: PositionBias | None) -> Tensor:
        F = self.kernel[: k.shape[2]].to(k.dtype)
        # In the layout of projections, (B, L, H D), this is a matrix product without a copy.
        slots = (torch.unflatten(F.mT @ x.transpose(1, 2).flatten(2), 2, (x.shape[1], -1)) for x in (k, v))
        slots_k, slots_v = (x.transpose(1, 2) for x in slots)
        return softmax_attention(q, slots_k, slots_v, dropout=self.dropout_now)


def run_kernel(attn: LinformerAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: None) -> Tensor:
    key, threshold = dropout_key(attn, q)
    return kernel.attend_slots(q, k, v, attn.kernel, key, threshold)


register(
    "linformer",
    LinformerAttention,
    naive=naive,
    paper="Wang et al. 2020, Linformer (2006.04768)",
    cost="L*rank",
    cross=True,
    learned=True,
    needs_max_length=True,
    causal=False,
    not_causal="each slot mixes all positions, including future ones; use 'performer' or 'combiner-fixed'",
    kernel=Kernel(run_kernel, kernel.lacks, dropout=True, cross=True, far=True, grouped=lambda attn: True),
)
