"""Full softmax attention.

Vaswani et al., Attention Is All You Need, https://arxiv.org/abs/1706.03762

    out_i = Σ_j softmax_j(q_i · k_j / √D + bias_ij) v_j          over all allowed j (j ≤ i if causal)

Exact and quadratic: the baseline for all other mechanisms. It calls PyTorch's `scaled_dot_product_attention`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.contract import PositionBias
from ..core.decoding_state import Place
from ..core.dense import dense_logits, dense_softmax, legal
from ..core.registry import register
from ..core.segments import Segments
from ..core.softmax import fused, fused_packed, softmax_attention
from ..core.state import KeepsAll, KeyValues


def naive(
    attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bias: PositionBias | None = None
) -> Tensor:
    return dense_softmax(dense_logits(q, k, bias), legal(attn, q, k, mask)) @ v


class FullAttention(KeepsAll):
    exports_any_length = True
    packs = True
    first_sees_all = True

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: PositionBias | None) -> Tensor:
        if self.causal and mask is None and bias is None:
            return fused(q, k, v, is_causal=True, dropout_p=self.dropout_now)
        i = torch.arange(q.shape[2], device=q.device)[:, None]
        j = torch.arange(k.shape[2], device=q.device)[None, :]
        allowed = None if mask is None else mask[:, None, None, :]
        if self.causal:
            past = (j <= i)[None, None]
            allowed = past if allowed is None else past & allowed
        values = None if bias is None else bias(i[None, None], j[None, None])
        return softmax_attention(q, k, v, allowed=allowed, bias=values, dropout=self.dropout_now)

    def attend_packed(self, q: Tensor, k: Tensor, v: Tensor, documents: Segments) -> Tensor:
        return fused_packed(q, k, v, documents, causal=self.causal, dropout=self.dropout_now)

    def attend_more(self, q, k, v, state: KeyValues, mask, bias, at: Place):
        state = state.put(at, k, v, mask, at.i)
        end = at.i + k.shape[2]
        i, j = torch.arange(at.i, end, device=q.device)[:, None], at.first(end)[None]
        keys, values, valid = state.read(at, end)
        allowed = (j <= i)[None, None] if valid is None else (j <= i)[None, None] & valid[:, None, None]
        logits = None if bias is None else bias(i[None, None], j[None, None])
        return softmax_attention(q, keys, values, allowed=allowed, bias=logits), state

    def attend_next(self, q, k, v, state: KeyValues, mask, bias, at: Place):
        state = state.put(at, k, v, mask, at.i)
        return state.attend(q, at, at.i + 1, bias, lambda slots: slots), state


register(
    "full",
    FullAttention,
    naive=naive,
    paper="Vaswani et al. 2017, Attention Is All You Need (1706.03762)",
    cost="L^2",
    cross=True,
    bias=True,
)
