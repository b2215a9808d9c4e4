"""LogSparse attention: a token attends to log L other tokens.

Li et al., Enhancing the Locality and Breaking the Memory Bottleneck of Transformer on Time Series Forecasting,
https://arxiv.org/abs/1907.00235, in two forms:

    spans     {i} and the last token of every dyadic span of i (partitions.py), as in Combiner, 2107.05768
    powers    {i} and {i - 2^p : p = 0, 1, ...}, as in the paper

The bidirectional form adds the mirror image. Combiner-logsparse attends to the whole spans.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.contract import PositionBias
from ..core.decoding_state import Place
from ..core.dense import dense_attention, positions
from ..core.dispatch import Kernel
from ..core.dropout import dropout_key
from ..core.joint import BackwardRows, Layout, Part, Rows, joint_attention, token_positions, valid_in
from ..core.partitions import LogSpans
from ..core.precision import gathered
from ..core.registry import register
from ..core.state import KeepsAll, KeyValues, attend_to
from ..kernels.log_spans import kernel

BLOCK = 16  # tokens processed together; the result does not depend on it


def naive(
    attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bias: PositionBias | None = None
) -> Tensor:
    i, j = positions(q, k)
    b = torch.arange(k.shape[2].bit_length(), device=q.device)[:, None, None]

    def before(i: Tensor, j: Tensor) -> Tensor:
        if attn.offsets == "powers":
            return (i - j == 1 << b).any(0)
        return ((i >> b & 1 == 1) & (j == (i >> (b + 1) << (b + 1)) + (1 << b) - 1)).any(0)

    after = before(k.shape[2] - 1 - i, k.shape[2] - 1 - j)  # the mirror image; `legal` removes it if causal
    return dense_attention(attn, q, k, v, mask, bias, (i == j) | before(i, j) | after)


class LogSparseAttention(KeepsAll):
    """`offsets` is "spans" or "powers"."""

    def __init__(self, *, offsets: str = "spans", **contract: Any):
        super().__init__(**contract)
        if offsets not in ("spans", "powers"):
            raise ValueError(f"offsets must be 'spans' or 'powers', got {offsets!r}")
        self.offsets = offsets

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: PositionBias | None) -> Tensor:
        if self.offsets == "powers":
            return _powers(q, k, v, mask, bias, self.causal, self.dropout_now)
        parts = [last_tokens(Rows(BLOCK), k, v, mask, bias, own=True)]
        if not self.causal:
            parts.append(last_tokens(BackwardRows(BLOCK), k, v, mask, bias, own=False))
        return joint_attention(q, parts, dropout=self.dropout_now, may_be_empty=mask is not None)

    def pattern_for(self, length: int) -> Hashable:
        return None if self.causal or self.offsets == "powers" else length

    def attend_next(self, q, k, v, state: KeyValues, mask, bias, at: Place):
        state = state.put(at, k, v, mask, at.i)
        b = at.first((at.i if at.known else at.capacity - 1).bit_length())
        if self.offsets == "powers":
            earlier = at.i - (1 << b)
            exists = earlier >= 0
        else:
            i = at.tensor
            earlier, exists = (i >> (b + 1) << (b + 1)) + (1 << b) - 1, (i >> b) & 1 == 1
        seen, allowed = torch.cat([at.tensor.view(1), earlier]), F.pad(exists, (1, 0), value=True)
        return attend_to(q, state, at, seen, allowed, bias), state


def last_tokens(
    layout: Layout, k: Tensor, v: Tensor, mask: Tensor | None, bias: PositionBias | None, *, own: bool
) -> Part:
    """The last token of every span; `own` adds the token itself."""
    L = k.shape[2]
    at = token_positions(layout, L, k.device)
    spans = LogSpans(at.shape[2], BLOCK, k.device)
    real = valid_in(layout, mask, L, BLOCK, k.device)

    def with_nodes(x: Tensor) -> Tensor:
        """Blocks (.., n, m, X) -> (.., n, keys, X): the block's own tokens, its local nodes, its upper nodes."""
        upper = gathered(x[:, :, :, -1], lambda last: last.index_select(2, spans.last_upper.flatten()))
        upper = torch.unflatten(upper, 2, spans.last_upper.shape)
        return torch.cat([x, x[:, :, :, spans.last_local], upper], 3)

    allowed = log_allowed(spans, own)
    if real is not None:
        allowed = allowed & with_nodes(real[..., None])[..., 0][:, :, :, None]
    values = None if bias is None else bias(at[..., None], with_nodes(at[..., None])[..., 0][:, :, :, None])
    return Part(layout, with_nodes(layout.arrange(k)), with_nodes(layout.arrange(v)), allowed, values)


def log_allowed(spans: LogSpans, own: bool) -> Tensor:
    """(1, 1, n, m, keys): own tokens, local nodes, upper nodes."""
    direct = spans.sees_previous | spans.sees_self if own else spans.sees_previous
    return torch.cat([direct.expand(spans.pair.shape[0], -1, -1), spans.sees_nodes], 2)[None, None]


def _powers(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: PositionBias | None, causal: bool, dropout: float
) -> Tensor:
    """One shifted product per power of two: L log L, without a gathered copy of the keys."""
    L, dtype = q.shape[2], torch.promote_types(q.dtype, torch.float32)
    scaled, k, values = q.to(dtype) * q.shape[-1] ** -0.5, k.to(dtype), v.to(dtype)
    back = [0] + [1 << p for p in range((L - 1).bit_length())]
    shifts = back if causal else back + [-s for s in back[1:]]
    at = torch.arange(L, device=q.device)
    logits = []
    for s in shifts:
        i, j = (slice(s, None), slice(0, L - s)) if s >= 0 else (slice(0, L + s), slice(-s, None))
        x = (scaled[:, :, i] * k[:, :, j]).sum(-1)
        if bias is not None:
            x = x + bias(at[i].view(1, 1, -1), at[j].view(1, 1, -1)).to(dtype)
        if mask is not None:
            x = x.masked_fill(~mask[:, None, j], float("-inf"))
        logits.append(F.pad(x, (s, 0) if s >= 0 else (0, -s), value=float("-inf")))
    joint = torch.stack(logits, -1)
    alive = joint.detach().amax(-1, keepdim=True) != float("-inf")
    p = F.dropout(joint.masked_fill(~alive, 0).softmax(-1), dropout)
    out = torch.zeros_like(values)
    for index, s in enumerate(shifts):
        i, j = (slice(s, None), slice(0, L - s)) if s >= 0 else (slice(0, L + s), slice(-s, None))
        mine = p[:, :, i, index, None] * values[:, :, j]
        out = out + F.pad(mine, (0, 0, s, 0) if s >= 0 else (0, 0, 0, -s))
    return out.masked_fill(~alive, 0).to(q.dtype)


def run_kernel(attn: LogSparseAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: None) -> Tensor:
    key, threshold = dropout_key(attn, q)
    return kernel.last_token_attention(q, k, v, mask, causal=attn.causal, key=key, threshold=threshold)


def lacks(attn: LogSparseAttention, *qkv: Tensor) -> str:
    return "only offsets='spans' has a kernel" if attn.offsets == "powers" else kernel.lacks(attn, *qkv)


register(
    "logsparse",
    LogSparseAttention,
    naive=naive,
    paper="Li et al. 2019, Enhancing the Locality and Breaking the Memory Bottleneck of Transformer (1907.00235)",
    cost="L*log(L)",
    bias=True,
    length_dependent="bidirectional spans after a token are counted from the end of the sequence",
    kernel=Kernel(run_kernel, lacks, dropout=True, grouped=lambda attn: True),
)
