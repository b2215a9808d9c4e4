"""Sparse Sinkhorn attention: each block attends to itself and to a learned, sorted mixture of blocks.

Tay et al., Sparse Sinkhorn Attention, https://arxiv.org/abs/2002.11296

    s_n = Σ_{j in block n} k_j              summary of block n
    R = softmax_{n'}(s_n W)_{n'}            W learned, (D, blocks): which block is sorted to position n
    k~_n = Σ_{n'} R_{n n'} k_{n'}           per position within the block; v~ likewise
    out_n = Attn(q_n, k_n, v_n) + Attn(q_n, k~_n, v~_n)

`iterations` > 0 replaces the softmax by Sinkhorn normalisation, which makes R doubly stochastic. Blocks without a real
token are never a source. A slot within the block is masked if no source has a token there.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.blocks import ceil_div, from_blocks, pad_length, to_blocks, valid_keys
from ..core.contract import Attention, PositionBias, hide
from ..core.dense import dense_attention, dense_softmax, positions, real_tokens
from ..core.dispatch import Kernel
from ..core.dropout import dropout_key
from ..core.registry import register
from ..core.softmax import softmax_attention
from ..kernels.band import kernel
from ..kernels.sorted_blocks.kernel import longest_block, sorted_blocks


def naive(
    attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bias: PositionBias | None = None
) -> Tensor:
    """The published code ignores the output of the sort network; here it is used and trained."""
    (i, j), L, m = positions(q, k), k.shape[2], attn.block_size
    n = ceil_div(L, m)
    k, v, real = hide(k, mask), hide(v, mask), real_tokens(k, mask)
    member = j // m == torch.arange(n, device=q.device)[:, None]  # (n, L)
    source = (member & real[:, None]).any(-1)[:, None, None]  # (B, 1, 1, n)
    R = dense_softmax(member.to(k.dtype) @ k @ attn.sort[:, :n], source)
    for _ in range(attn.iterations):  # columns, over the blocks with a token; then rows
        R = R / (R * source.mT).sum(-2, keepdim=True).where(source, 1)
        R = R / R.sum(-1, keepdim=True).where(source.any(-1, keepdim=True), 1)
    slot = j % m == torch.arange(m, device=q.device)[:, None]  # (m, L)
    to_slot = R[..., j[0] // m][:, :, i[:, 0] // m, None] * slot  # (B, H, L, m, L): weights of block i//m for each slot
    sorted_k, sorted_v, filled = to_slot @ k[:, :, None], to_slot @ v[:, :, None], (slot & real[:, None]).any(-1)
    logits = (sorted_k @ q[..., None])[..., 0] / q.shape[-1] ** 0.5
    other = (dense_softmax(logits, filled[:, None, None])[..., None] * sorted_v).sum(-2)
    return dense_attention(attn, q, k, v, mask, None, i // m == j // m) + other


class SinkhornAttention(Attention):
    def __init__(self, *, block_size: int = 20, max_blocks: int | None = None, iterations: int = 0, **contract):
        super().__init__(**contract)
        if block_size < 1 or iterations < 0:
            raise ValueError(f"block_size must be at least 1 and iterations at least 0, got {block_size}, {iterations}")
        if max_blocks is not None and max_blocks < 1:
            raise ValueError(f"max_blocks must be at least 1, or None to cover max_length, got {max_blocks}")
        assert self.max_length is not None
        self.block_size, self.iterations = block_size, iterations
        self.max_blocks = ceil_div(self.max_length, block_size) if max_blocks is None else max_blocks
        self.sort = nn.Parameter(torch.empty(self.head_dim, self.max_blocks))
        nn.init.xavier_uniform_(self.sort)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: PositionBias | None) -> Tensor:
        L = q.shape[2]
        q, k, v = (to_blocks(x, self.block_size) for x in (q, k, v))
        real, k_sorted, v_sorted, filled = self.sorted_blocks(k, v, mask, L)
        own_keys = None if real is None else real[:, :, :, None]
        other_keys = None if filled is None else filled[:, :, None, None]
        own = softmax_attention(q, k, v, allowed=own_keys, dropout=self.dropout_now)
        other = softmax_attention(q, k_sorted, v_sorted, allowed=other_keys, dropout=self.dropout_now)
        return from_blocks(own + other, L)

    def sorted_blocks(
        self, k: Tensor, v: Tensor, mask: Tensor | None, L: int
    ) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
        """k and v (B, H, n or more, m, D) -> real tokens (B or 1, 1, n, m), sorted keys and values (B, H, n, m, D), and
        the slots for which some block has a token, (B or 1, 1, m). Flags are None if all are set."""
        n = ceil_div(L, self.block_size)
        more = k.shape[2] - n
        self.check_blocks(n)
        real, has_token, filled = self.flags(mask, L, k.device)
        # A sum may overflow in half precision.
        blocks = k[:, :, :n].sum(3, dtype=torch.promote_types(k.dtype, torch.float32))
        logits = torch.einsum("bhnd,de->bhne", blocks, self.sort[:, :n].to(blocks.dtype))
        R = place(logits, has_token, self.iterations).to(k.dtype)
        R = F.pad(R, (0, more)) if more else R
        k_sorted, v_sorted = (torch.unflatten(R @ x.flatten(3), 3, x.shape[3:]) for x in (k, v))
        return real, k_sorted, v_sorted, filled

    def check_blocks(self, n: int) -> None:
        if n > self.max_blocks:
            raise ValueError(
                f"{n} blocks of {self.block_size} are over max_blocks={self.max_blocks}; create sinkhorn with a larger "
                "max_length"
            )

    def flags(
        self, mask: Tensor | None, L: int, device: torch.device
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Real tokens (B or 1, 1, n, m), blocks with a token (B or 1, 1, n) and slots for which some block has a token
        (B or 1, 1, m); None if all are set."""
        m, n = self.block_size, ceil_div(L, self.block_size)
        valid = valid_keys(mask, L, n * m, device)
        real = None if valid is None else valid.view(-1, 1, n, m)
        # Without a mask, every block has a token, and if there are several, so has every slot.
        has_token = None if mask is None or real is None else real.any(-1)
        filled = None if real is None or mask is None and n > 1 else real.any(2)
        return real, has_token, filled


def run_kernel(attn: SinkhornAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: None) -> Tensor:
    (B, _, L, D), m = q.shape, attn.block_size
    n = ceil_div(L, m)
    attn.check_blocks(n)
    if not attn.iterations and m <= longest_block(D, q.element_size()):
        has_token = filled = None
        if mask is not None or n == 1:  # otherwise every block and every slot has a token
            has_token, filled = attn.flags(mask, L, q.device)[1:]
        sources = None if has_token is None else _sources(has_token)[:, 0]
        slots = None if filled is None else filled.expand(B, 1, m)[:, 0]
        key, threshold = dropout_key(attn, q)
        return sorted_blocks(q, k, v, attn.sort, mask, sources, slots, block_size=m, key=key, threshold=threshold)
    # Matrix products are several times faster if rows have a multiple of 8 elements.
    padded = ceil_div(n, 8) * 8 * m
    k_blocks, v_blocks = (to_blocks(pad_length(x, padded), m) for x in (k, v))
    _, k_sorted, v_sorted, filled = attn.sorted_blocks(k_blocks, v_blocks, mask, L)
    slots = None if filled is None else filled.expand(B, n, m).flatten(1)
    (key, threshold), (other_key, _) = dropout_key(attn, q), dropout_key(attn, q)
    own = kernel.blocks(q, k, v, mask, block_size=m, causal=False, key=key, threshold=threshold)
    q, k, v = pad_length(q, n * m), from_blocks(k_sorted, n * m), from_blocks(v_sorted, n * m)
    options: dict[str, Any] = {"block_size": m, "causal": False, "key": other_key, "threshold": threshold}
    return own + kernel.blocks(q, k, v, slots, **options)[:, :, :L]


def _sources(has_token: Tensor) -> Tensor:
    """The blocks to mix. An empty sequence has no source. It uses all blocks, whose keys and values are zero."""
    return has_token | ~has_token.any(-1, keepdim=True)


def place(logits: Tensor, has_token: Tensor | None, iterations: int) -> Tensor:
    """Weights over the blocks with a token (None: all), per row; doubly stochastic after the Sinkhorn iterations."""
    source = None if has_token is None else _sources(has_token)

    def hide_others(x: Tensor, dim: int) -> Tensor:
        return x if source is None else x.masked_fill(~source.unsqueeze(dim), torch.finfo(x.dtype).min)

    x = hide_others(logits, -2)
    for _ in range(iterations):
        x = x - x.logsumexp(-1, keepdim=True)
        x = hide_others(x - hide_others(x, -1).logsumexp(-2, keepdim=True), -2)
    return x.softmax(-1)


register(
    "sinkhorn",
    SinkhornAttention,
    naive=naive,
    paper="Tay et al. 2020, Sparse Sinkhorn Attention (2002.11296)",
    cost="L*block + (L/block)^2",
    learned=True,
    needs_max_length=True,
    causal=False,
    not_causal="it summarises whole blocks before sorting them; use 'local' or 'combiner-fixed'",
    kernel=Kernel(run_kernel, least_length=kernel.LEAST_LENGTH, dropout=True, grouped=lambda attn: True),
)
