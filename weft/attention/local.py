"""Local attention within contiguous, non-overlapping blocks.

Parmar et al., Image Transformer, https://arxiv.org/abs/1802.05751; as in the Long Range Arena

    out_i = Σ_j softmax_j(q_i · k_j / √D) v_j          over j with ⌊j/m⌋ = ⌊i/m⌋ (and j ≤ i if causal)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.blocks import both, from_blocks, to_blocks, valid_keys
from ..core.contract import Attention, PositionBias
from ..core.decoding_state import Place
from ..core.dense import dense_attention, positions
from ..core.dispatch import Kernel
from ..core.dropout import dropout_key
from ..core.registry import register
from ..core.segments import Segments
from ..core.softmax import softmax_attention
from ..core.state import KeyValues
from ..core.tiles import next_power_of_two
from ..kernels.band import kernel
from ..kernels.steps.kernel import Step, slots_step


def naive(
    attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bias: PositionBias | None = None
) -> Tensor:
    i, j = positions(q, k)
    m = attn.block_size
    return dense_attention(attn, q, k, v, mask, bias, i // m == j // m)


class LocalAttention(Attention):
    def __init__(self, *, block_size: int = 50, **contract):
        super().__init__(**contract)
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.block_size = block_size

    @property
    def separate_blocks(self) -> int:  # type: ignore[override]
        return self.block_size

    @property
    def reach(self) -> int:
        return self.block_size

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: PositionBias | None) -> Tensor:
        L, m = q.shape[2], min(self.block_size, q.shape[2])
        q, k, v = (to_blocks(x, m) for x in (q, k, v))
        n = q.shape[2]
        valid = valid_keys(mask, L, n * m, q.device)
        allowed = None if valid is None else valid.view(-1, 1, n, 1, m)
        if self.causal:
            past = torch.ones(m, m, dtype=torch.bool, device=q.device).tril()
            allowed = both(past[None, None, None], allowed)
        at = torch.arange(n * m, device=q.device).clamp(max=L - 1).view(1, 1, n, m)  # padding uses the last position
        values = None if bias is None else bias(at[..., None], at[..., None, :])
        out = softmax_attention(q, k, v, allowed=allowed, bias=values, dropout=self.dropout_now)
        return from_blocks(out, L)

    def empty_state(self, k: Tensor, capacity: int) -> KeyValues:
        return KeyValues.empty(k, min(self.block_size, capacity))

    def state_after(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, capacity: int) -> KeyValues:
        first = k.shape[2] - k.shape[2] % self.block_size
        mask = None if mask is None else mask[:, first:]
        return KeyValues.of(k[:, :, first:], v[:, :, first:], mask, min(self.block_size, capacity))

    def attend_next(self, q, k, v, state: KeyValues, mask, bias, at: Place):
        slot = at.i % self.block_size  # the slots after it belong to the previous block
        state = state.put(at, k, v, mask, slot)
        return state.attend(q, at, slot + 1, bias, lambda slots: at.i - slot + slots), state


def run_kernel(attn: LocalAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: None) -> Tensor:
    key, threshold = dropout_key(attn, q)
    options: dict[str, Any] = {"block_size": attn.block_size, "causal": attn.causal}
    return kernel.blocks(q, k, v, mask, **options, key=key, threshold=threshold)


def run_packed(
    attn: LocalAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, documents: Segments
) -> Tensor:
    m = min(attn.block_size, next_power_of_two(documents.longest))  # few values: launches are recorded by it
    key, threshold = dropout_key(attn, q)
    options: dict[str, Any] = {"block_size": m, "causal": attn.causal, "table": documents.table(m)}
    return kernel.blocks(q, k, v, mask, **options, key=key, threshold=threshold)


def step_of(attn: LocalAttention, state: KeyValues) -> Step | None:
    return slots_step(state, "block", attn.block_size)


register(
    "local",
    LocalAttention,
    naive=naive,
    paper="Parmar et al. 2018, Image Transformer (1802.05751)",
    cost="L*block",
    bias=True,
    kernel=Kernel(
        run_kernel,
        least_length=kernel.LEAST_LENGTH,
        dropout=True,
        grouped=lambda attn: True,
        packed=run_packed,
        step=step_of,
    ),
)
