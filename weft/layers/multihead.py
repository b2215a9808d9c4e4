"""Multi-head attention around any registered mechanism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..attention import Attention, make_attention
from ..core.blocks import check_mask
from ..core.contract import PositionBias, hide, quiet_padding
from ..core.decoding_state import DecodingState, next_positions
from ..core.linear import bare
from ..core.packing import packed_first, reads_first
from ..core.positions import Rotary, rotated
from ..core.segments import Segments, documents_of, first_tokens
from ..core.sharding import first_position, refuse
from ..core.unread import connected
from .decoding import DecodingLayer


class MultiheadAttention(DecodingLayer):
    """Projections around a mechanism: `layer(x, mask=None, bias=None)`, x (B, L, dim), mask (B, L).

    `head_dim` does not have to be dim / heads, so the heads may be wider than dim in total. `kv_heads` < `heads` shares
    each key and value head among several query heads. `rope=True` rotates queries and keys by position. `qk_norm=True`
    normalises them first (RMSNorm over a head, with a learned scale), which bounds the logits. Calling with `context=`
    gives cross attention; the mask is then the context's. `attention` is a registered name, with its options as further
    keyword arguments, or a mechanism instance. `segments=` (B, L) numbers packed documents, 0 for padding: attention
    stays within each, and positions start again. `first=True` returns only the first token of each row or document,
    (rows or documents, dim).
    """

    is_cross_attention = False  # True: it is always called with another sequence; adapters cannot see that

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        head_dim: int | None = None,
        kv_heads: int | None = None,
        attention: str | Attention = "full",
        causal: bool = False,
        max_length: int | None = None,
        dropout: float = 0.0,
        rope: bool | float = False,
        qk_norm: bool = False,
        qkv_bias: bool = False,
        out_bias: bool = False,
        context_dim: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ):
        super().__init__()
        if heads < 1 or dim < 1:
            raise ValueError(f"dim and heads must be at least 1, got dim={dim}, heads={heads}")
        if head_dim is None:
            if dim % heads:
                raise ValueError(f"dim={dim} is not divisible by heads={heads}: set head_dim")
            head_dim = dim // heads
        kv_heads = heads if kv_heads is None else kv_heads
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"heads={heads} must be a multiple of kv_heads={kv_heads}")
        self.dim, self.heads, self.head_dim, self.kv_heads, self.causal = dim, heads, head_dim, kv_heads, causal
        if isinstance(attention, str):
            attention = make_attention(
                attention,
                heads=heads,
                head_dim=head_dim,
                causal=causal,
                max_length=max_length,
                dropout=dropout,
                **options,
            )
        else:
            given = {"max_length": max_length, "dropout": dropout or None, **options}
            unread = [name for name, value in given.items() if value is not None]
            if unread:
                raise TypeError(
                    f"{', '.join(unread)} have no effect if attention is a mechanism instance: set them on the instance"
                )
            if (attention.heads, attention.head_dim, attention.causal) != (heads, head_dim, causal):
                raise ValueError(
                    f"the mechanism has heads={attention.heads}, head_dim={attention.head_dim}, "
                    f"causal={attention.causal}; the layer needs {heads}, {head_dim}, {causal}"
                )
        self.attention = attention.to(device=device, dtype=dtype)
        place = {"device": device, "dtype": dtype}
        source = dim if context_dim is None else context_dim
        # A mechanism that does not read q or k (a random synthesizer; shared-QK hashing) needs no projection for it.
        self.q = nn.Linear(dim, heads * head_dim, bias=qkv_bias, **place) if attention.reads_q else None
        self.k = nn.Linear(source, kv_heads * head_dim, bias=qkv_bias, **place) if attention.reads_k else None
        self.v = nn.Linear(source, kv_heads * head_dim, bias=qkv_bias, **place)
        self.out = nn.Linear(heads * head_dim, dim, bias=out_bias, **place)
        if rope and not (attention.reads_q and attention.reads_k):
            raise ValueError(f"{attention.name} does not read both q and k, so rope=True has no effect: use rope=False")
        self.q_norm = nn.RMSNorm(head_dim, **place) if qk_norm and attention.reads_q else None
        self.k_norm = nn.RMSNorm(head_dim, **place) if qk_norm and attention.reads_k else None
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                nn.init.constant_(norm.weight, attention.qk_gain)
        base = 10000.0 if rope is True else float(rope)
        self.rope = Rotary(head_dim, base).to(device=device) if rope else None
        for linear in (self.q, self.k, self.v, self.out):
            if linear is not None:
                nn.init.xavier_uniform_(linear.weight)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)

    def project(
        self, x: Tensor, context: Tensor | None = None, start: int = 0, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q of shape (B, heads, L, head_dim) and k, v with kv_heads; rotated if the layer has rotary positions: those
        of `positions` (B, L), or `start`, `start` + 1, ..."""
        source = x if context is None else context
        if source.shape[-1] != self.v.in_features:
            raise ValueError(
                f"this layer needs a context of width {self.v.in_features} (context_dim), got {source.shape[-1]}: "
                f"call it with context=(B, L, {self.v.in_features})"
            )
        # By token, (B, L, H, D), up to the end: norms and rotations of heads would return (B, H, L, D) memory, and
        # everything after the attention would copy it back.
        v = self._split(self.v(source), self.kv_heads)
        q = self._split(self.q(x), self.heads) if self.q is not None else None
        k = self._split(self.k(source), self.kv_heads) if self.k is not None else None
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norm is not None:
            k = self.k_norm(k)
        if self.rope is not None and q is not None and k is not None:
            if context is not None:
                raise ValueError("rotary positions do not support cross attention: create the layer with rope=False")
            start = start + first_position(x)
            at = torch.arange(start, start + x.shape[1], device=x.device) if positions is None else positions
            table = self.rope.table(at, q.dtype)
            q, k = rotated(q, table), rotated(k, table)
        v = connected(self.attention, q, k, v)
        q = v.new_zeros(*x.shape[:2], self.heads, self.head_dim) if q is None else q
        k = (q if q.shape == v.shape else torch.zeros_like(v)) if k is None else k
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        bias: PositionBias | None = None,
        *,
        context: Tensor | None = None,
        segments: Tensor | Segments | None = None,
        first: bool = False,
    ) -> Tensor:
        self._check(x, context)
        if first:
            return self._first(x, mask, bias, None if segments is None else documents_of(segments, x))
        if segments is not None:
            return self.merge(self.per_document(x, mask, bias, segments, context))
        if context is None:
            x = quiet_padding(x, mask)
        else:
            context = quiet_padding(context, mask)
        return self.merge(self.attention(*self.project(x, context), mask, bias, **self.input(x)))

    def per_document(
        self,
        x: Tensor,
        mask: Tensor | None,
        bias: PositionBias | None,
        segments: Tensor | Segments,
        context: Tensor | None = None,
    ) -> Tensor:
        """The heads (B, H, L, D) of packed documents."""
        if context is not None:
            raise ValueError("segments are for self-attention: remove context=, or pass one document per row")
        documents = documents_of(segments, x)
        x = quiet_padding(x, documents.real(mask))
        qkv = self.project(x, positions=None if self.rope is None else documents.positions)
        return self.attention(*qkv, mask, bias, documents, **self.input(x))

    def _first(self, x: Tensor, mask: Tensor | None, bias: PositionBias | None, documents: Segments | None) -> Tensor:
        attn = self.attention
        refuse("MultiheadAttention(first=True)")
        if mask is not None:
            check_mask(mask, x.shape[:2])
        longest = x.shape[1] if documents is None else documents.longest
        attn.check_length(longest)
        if attn.reach is not None and attn.reach < longest and bias is None:
            if documents is not None:
                x, mask = documents.leading(x, mask, attn.reach)
                documents = None
            else:
                x, mask = x[:, : attn.reach], None if mask is None else mask[:, : attn.reach]
        # Most kernels need the queries of all keys.
        cross = attn.info is not None and attn.info.cross and (attn.fused is None or attn.fused.cross)
        alone = attn.first_sees_all or cross
        if alone and not attn.causal and self.rope is None and bias is None and not self.input(x):
            if documents is not None and mask is None and reads_first(attn, x, documents):
                qkv = self.project(first_tokens(x, documents)[None], x)
                return self.merge(packed_first(attn, *qkv, documents))[0]
            masked = mask is not None
            if documents is not None:
                x, mask = documents.padded_rows(x, mask)  # zero after each document
            token = x[:, :1] if mask is None else quiet_padding(x[:, :1], mask[:, :1])
            x = hide(x[:, None], mask)[:, 0] if masked else x
            if self._absorbs(x):
                return self._absorbed(token, x, mask)
            attend = attn.attend_first if attn.first_sees_all else attn
            return self.merge(attend(*self.project(token, x), mask))[:, 0]
        if documents is not None:
            heads = self.per_document(x, mask, bias, documents)
        else:
            x = quiet_padding(x, mask)
            heads = attn(*self.project(x), mask, bias, **self.input(x))
        return self.out(first_tokens(heads.transpose(1, 2), documents).flatten(1))

    def _absorbs(self, x: Tensor) -> bool:
        """Whether `_absorbed` computes the first token. Not on a GPU, where it has not been timed."""
        plain = all(layer is not None and bare(layer) and layer.bias is None for layer in (self.k, self.v))
        return self.attention.first_sees_all and plain and self.k_norm is None and not x.is_cuda

    def _absorbed(self, token: Tensor, x: Tensor, mask: Tensor | None) -> Tensor:
        """A token that sees all, without the keys and values of all tokens: its heads attend to x itself.

            q · (W_k x_j) = (W_kᵀ q) · x_j        Σ_j a_j W_v x_j = W_v Σ_j a_j x_j
        """
        assert self.k is not None
        (B, _, dim), D, groups = x.shape, self.head_dim, self.kv_heads
        to_keys, to_values = (torch.unflatten(layer.weight, 0, (groups, D)) for layer in (self.k, self.v))
        q = self.project(token)[0].reshape(B, groups, -1, D)
        q = torch.einsum("bgnd,gdc->bgnc", q, to_keys) * (dim / D) ** 0.5  # attention divides by √dim
        seen = self.attention.attend_first(q.reshape(B, 1, self.heads, dim), x[:, None], x[:, None], mask)
        heads = torch.einsum("bgnc,gdc->bgnd", seen.reshape(B, groups, -1, dim), to_values)
        return self.out(heads.flatten(1))

    def merge(self, heads: Tensor) -> Tensor:
        """(B, H, L, D) -> (B, L, dim): concatenate the heads and apply the output projection."""
        return self.out(heads.transpose(1, 2).flatten(2))

    def weights(
        self, x: Tensor, mask: Tensor | None = None, bias: PositionBias | None = None, *, context: Tensor | None = None
    ) -> Tensor:
        """The mechanism's effective (B, H, Lq, Lk) matrix on this input."""
        self._check(x, context)
        return self.attention.weights(*self.project(x, context), mask, bias, **self.input(x))

    def project_next(self, x: Tensor, state: DecodingState | None) -> tuple[Tensor, Tensor, Tensor]:
        positions = None if self.rope is None else next_positions(state, x.shape[1], x.device)
        return self.project(x, positions=positions)

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return torch.unflatten(x, -1, (heads, self.head_dim))

    def _check(self, x: Tensor, context: Tensor | None) -> None:
        self.check_input(x)
        if context is not None and (
            context.dim() != 3 or context.shape[0] != x.shape[0] or context.shape[-1] != self.v.in_features
        ):
            raise ValueError(f"context must be ({x.shape[0]}, L, {self.v.in_features}), got {tuple(context.shape)}")

    def extra_repr(self) -> str:
        return f"dim={self.dim}, heads={self.heads}, head_dim={self.head_dim}, attention={self.attention.name!r}"
