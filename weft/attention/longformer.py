"""Longformer: a sliding window and, optionally, a few global tokens.

Beltagy et al., Longformer: The Long-Document Transformer, https://arxiv.org/abs/2004.05150

    out_i = Σ_j softmax_j(q_i · k_j / √D) v_j

    window w, bidirectional   odd w: |i - j| ≤ ⌊w/2⌋;  even w: i - w/2 + 1 ≤ j ≤ i + w/2
    window w, causal          i - w + 1 ≤ j ≤ i
    the first g tokens        attend to all tokens, and all tokens attend to them (with j ≤ i if causal)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.blocks import both, ceil_div, from_blocks, power_of_two, to_blocks
from ..core.contract import Attention, PositionBias
from ..core.decoding_state import Place
from ..core.dense import dense_attention, positions
from ..core.dispatch import Kernel
from ..core.dropout import dropout_key
from ..core.registry import register
from ..core.segments import Segments
from ..core.softmax import softmax_attention
from ..core.state import KeyValues
from ..kernels.band import kernel
from ..kernels.steps.kernel import Step, slots_step


def naive(
    attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bias: PositionBias | None = None
) -> Tensor:
    """The paper has w/2 tokens on each side; for even w the study's code has one less on the left."""
    i, j = positions(q, k)
    w, g = attn.window, attn.global_tokens
    near = i - w < j if attn.causal else (i - (w - 1) // 2 <= j) & (j <= i + w // 2)
    return dense_attention(attn, q, k, v, mask, bias, near | (i < g) | (j < g))


class LongformerAttention(Attention):
    def __init__(self, *, window: int = 512, global_tokens: int = 0, **contract):
        super().__init__(**contract)
        if window < 1 or global_tokens < 0:
            raise ValueError(f"window must be at least 1 and global_tokens at least 0, got {window}, {global_tokens}")
        self.window, self.global_tokens = window, global_tokens

    @property
    def left(self) -> int:
        """Tokens visible to the left."""
        return self.window - 1 if self.causal else (self.window - 1) // 2

    @property
    def right(self) -> int:
        """Tokens visible to the right."""
        return 0 if self.causal else self.window // 2

    @property
    def reach(self) -> int | None:
        return None if self.global_tokens else self.right + 1

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: PositionBias | None) -> Tensor:
        L, g = q.shape[2], min(self.global_tokens, q.shape[2])
        left, right = min(self.left, L - 1), min(self.right, L - 1)
        valid = torch.ones(1, L, dtype=torch.bool, device=q.device) if mask is None else mask

        # Query blocks of m tokens. The keys of a block are the m + left + right tokens around it, as a strided view.
        m = min(power_of_two((left + right) / 2, least=16), L)
        n = ceil_div(L, m)
        around = left, n * m - L + right
        k_win, v_win = (F.pad(x, (0, 0, *around)).unfold(2, m + left + right, m).transpose(-1, -2) for x in (k, v))
        valid_win = F.pad(valid, around).unfold(1, m + left + right, m)[:, None, :, None]
        i = torch.arange(n * m, device=q.device).view(1, 1, n, m, 1)
        j = (i[..., :1, :] - left) + torch.arange(m + left + right, device=q.device)
        allowed = valid_win & (j >= i - left) & (j <= i + right)
        if g:  # global tokens appear once, in front, and are removed from the windows
            allowed = allowed & (j >= g)
            first = torch.arange(g, device=q.device).view(1, 1, 1, 1, g)
            allowed_first = valid[:, None, None, None, :g].expand(-1, 1, n, m, g)
            if self.causal:
                allowed_first = allowed_first & (first <= i)
            allowed = torch.cat([allowed_first, allowed], -1)
            k_win, v_win = (
                torch.cat([x[:, :, None, :g].expand(-1, -1, n, -1, -1), x_win], 3)
                for x, x_win in ((k, k_win), (v, v_win))
            )
            j = torch.cat([first.expand(1, 1, n, 1, g), j], -1)
        values = None if bias is None else bias(i.clamp(max=L - 1), j.clamp(0, L - 1))
        out = softmax_attention(to_blocks(q, m), k_win, v_win, allowed=allowed, bias=values, dropout=self.dropout_now)
        out = from_blocks(out, L)
        if g:
            rows = torch.arange(g, device=q.device)[:, None]
            columns = torch.arange(L, device=q.device)[None]
            seen = both(valid[:, None, None], (columns <= rows)[None, None] if self.causal else None)
            values = None if bias is None else bias(rows[None, None], columns[None, None])
            top = softmax_attention(q[:, :, :g], k, v, allowed=seen, bias=values, dropout=self.dropout_now)
            out = torch.cat([top, out[:, :, g:]], 2)
        return out

    # Decoding: the global tokens in front, then a ring of the latest `window` tokens.

    def empty_state(self, k: Tensor, capacity: int) -> KeyValues:
        return KeyValues.empty(k, min(self.global_tokens + self.window, capacity))

    def state_after(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, capacity: int) -> KeyValues:
        L, g, w = k.shape[2], self.global_tokens, self.window
        slots = min(g + w, capacity)
        if L <= slots:
            return KeyValues.of(k, v, mask, slots)
        s = torch.arange(slots, device=k.device)
        kept = torch.where(s < g, s, L - 1 - (L - 1 - s) % w)
        return KeyValues.of(k[:, :, kept], v[:, :, kept], None if mask is None else mask[:, kept], slots)

    def attend_next(self, q, k, v, state: KeyValues, mask, bias, at: Place):
        g, w, i = self.global_tokens, self.window, at.i
        if at.known:
            slot, count = (i if i < g else g + (i - g) % w), min(i + 1, state.slots)
        else:
            slot, count = torch.where(i < g, i, g + (i - g) % w), i + 1
        state = state.put(at, k, v, mask, slot)
        return state.attend(q, at, count, bias, lambda s: torch.where(s < g, s, i - (i - s) % w)), state


def run_kernel(attn: LongformerAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: None) -> Tensor:
    key, threshold = dropout_key(attn, q)
    sizes: dict[str, Any] = {"left": attn.left, "right": attn.right, "first": attn.global_tokens}
    return kernel.window(q, k, v, mask, **sizes, causal=attn.causal, key=key, threshold=threshold)


def run_packed(
    attn: LongformerAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, documents: Segments
) -> Tensor | None:
    if attn.global_tokens:
        return None
    key, threshold = dropout_key(attn, q)
    sizes: dict[str, Any] = {"left": attn.left, "right": attn.right, "first": 0, "table": documents.table(kernel.PIECE)}
    return kernel.window(q, k, v, mask, **sizes, causal=attn.causal, key=key, threshold=threshold)


def step_of(attn: LongformerAttention, state: KeyValues) -> Step | None:
    return slots_step(state, "ring", attn.window, ahead=attn.global_tokens)


register(
    "longformer",
    LongformerAttention,
    naive=naive,
    paper="Beltagy et al. 2020, Longformer (2004.05150)",
    cost="L*window",
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
