"""BigBird: a band of blocks, global first and last blocks, and a few random blocks.

Zaheer et al., Big Bird: Transformers for Longer Sequences, https://arxiv.org/abs/2007.14062

    query block b of n:  b = 0, n-1        every block
                         otherwise         {0, b-1, b, b+1, n-1} and r random blocks, drawn once per head and block

with one softmax over the tokens of those blocks. Random blocks are drawn as in the published code: with NumPy's legacy
generator and `seed` (the layer index there), from blocks outside the band and within the first 1,024 tokens.

n, and so the pattern, depends on the length with its padding. `pattern_length` makes it independent: shorter sequences
have the pattern of this length, without the blocks that they lack.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.blocks import ceil_div, from_blocks, pad_length, to_blocks
from ..core.contract import Attention, PositionBias
from ..core.dense import dense_attention, positions
from ..core.dispatch import Kernel
from ..core.dropout import dropout_key
from ..core.precision import gathered
from ..core.registry import register
from ..core.softmax import softmax_attention
from ..core.staging import operator, send
from ..kernels.block_lists.kernel import LEAST_LENGTH, block_list_attention, tables

PLAN_TOKENS = 1024  # the published code draws random blocks from the first 1,024 tokens only


def naive(
    attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bias: PositionBias | None = None
) -> Tensor:
    """Unlike in the published code, any length works, and a block that is selected twice counts once."""
    H, L, m = q.shape[1], attn.pattern_of(q.shape[2]), attn.block_size
    n = ceil_div(L, m)
    i, j = (x // m for x in positions(q, k))
    plan = torch.from_numpy(random_plan(L, m, attn.random_blocks, H, attn.seed)).to(q.device)  # (H, n-2, r)
    drawn = torch.zeros(H, n, n, dtype=torch.bool, device=q.device)
    drawn[:, 1:-1] = (plan[..., None] == torch.arange(n, device=q.device)).any(2)
    on_edge = (i == 0) | (i == n - 1) | (j == 0) | (j == n - 1)
    return dense_attention(attn, q, k, v, mask, bias, on_edge | ((i - j).abs() <= 1) | drawn[:, i, j])


class BigBirdAttention(Attention):
    first_sees_all = True

    def __init__(
        self,
        *,
        block_size: int = 64,
        random_blocks: int = 3,
        seed: int = 0,
        pattern_length: int | None = None,
        **contract: Any,
    ):
        super().__init__(**contract)
        if pattern_length is not None and pattern_length < 1:
            raise ValueError(f"pattern_length must be at least 1, or None for the length itself, got {pattern_length}")
        if block_size < 1 or random_blocks < 0:
            raise ValueError(
                f"block_size must be at least 1 and random_blocks at least 0, got {block_size}, {random_blocks}"
            )
        self.block_size, self.random_blocks, self.seed = block_size, random_blocks, seed
        self.pattern_length = pattern_length

    def pattern_of(self, length: int) -> int:
        """The length that has the pattern of this one."""
        return max(length, self.pattern_length or 0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: PositionBias | None) -> Tensor:
        L, longer = q.shape[2], self.pattern_of(q.shape[2])
        if longer > L:
            mask = torch.ones(1, L, dtype=torch.bool, device=q.device) if mask is None else mask
            within = None if bias is None else lambda i, j: bias(i.clamp(max=L - 1), j.clamp(max=L - 1))
            mask = torch.nn.functional.pad(mask, (0, longer - L))
            q, k, v = (pad_length(x, longer) for x in (q, k, v))
            return self.attend(q, k, v, mask, within)[:, :, :L]
        B, H, L, _ = q.shape
        m = self.block_size
        n = ceil_div(L, m)
        padded = n * m
        valid = torch.ones(1, L, dtype=torch.bool, device=q.device) if mask is None else mask
        everything = torch.arange(L, device=q.device).view(1, 1, 1, L)

        def see_all(rows: Tensor, first: int) -> Tensor:
            i = torch.arange(first, first + rows.shape[2], device=q.device).view(1, 1, -1, 1)
            values = None if bias is None else bias(i, everything)
            return softmax_attention(rows, k, v, allowed=valid[:, None, None], bias=values, dropout=self.dropout_now)

        if n <= 2:  # both blocks are global
            return see_all(q, 0)
        head, tail = see_all(q[:, :, :m], 0), see_all(q[:, :, (n - 1) * m :], (n - 1) * m)

        # (H, n-2, c), -1 for no block
        blocks = send(key_blocks(L, m, self.random_blocks, H, self.seed), q.device)
        c = blocks.shape[-1]
        at = blocks.clamp(min=0)
        every_head = torch.arange(H, device=q.device)[:, None, None]
        k_b, v_b = (gathered(to_blocks(x, m), lambda x: x[:, every_head, at]).flatten(3, 4) for x in (k, v))
        in_plan = (blocks >= 0)[..., None].expand(H, n - 2, c, m).flatten(2)
        real = torch.nn.functional.pad(valid, (0, padded - L)).view(-1, n, m)[:, at].flatten(3)
        allowed = (real & in_plan)[:, :, :, None]
        j = (at[..., None] * m + torch.arange(m, device=q.device)).flatten(2)[None, :, :, None]
        i = torch.arange(m, padded - m, device=q.device).view(1, 1, n - 2, m, 1)
        values = None if bias is None else bias(i.clamp(max=L - 1), j.clamp(max=L - 1))
        q_b = to_blocks(q, m)[:, :, 1:-1]
        middle = softmax_attention(q_b, k_b, v_b, allowed=allowed, bias=values, dropout=self.dropout_now)
        return torch.cat([head, from_blocks(middle, (n - 2) * m), tail], 2)

    def pattern_for(self, length: int) -> Hashable:
        if self.pattern_of(length) == self.pattern_length:
            return None
        return ceil_div(length, self.block_size)


def random_plan(length: int, block_size: int, random_blocks: int, heads: int, seed: int) -> np.ndarray:
    """(heads, n-2, r): the random blocks of query blocks 1..n-2, filled with -1 if fewer than r are eligible."""
    n = ceil_div(length, block_size)
    last = (min(n, PLAN_TOKENS // block_size) if PLAN_TOKENS > 2 * block_size else n) - 1
    generator = np.random.RandomState(seed)
    plan = np.full((heads, max(n - 2, 0), random_blocks), -1)
    for h in range(heads):
        for b in range(1, n - 1):
            if b in (1, 2):
                eligible = [*range(b + 2, last + 1)]
            elif b in (n - 3, n - 2):
                eligible = [*range(1, last - (n - b))]
            else:
                eligible = [*range(1, min(b - 2, last) + 1), *range(b + 2, last + 1)]
            band = {0, b - 1, b, b + 1, n - 1}
            drawn = generator.permutation([x for x in eligible if x <= n - 2 and x not in band])[:random_blocks]
            plan[h, b - 1, : len(drawn)] = drawn
    return plan


@functools.lru_cache(maxsize=64)
def _key_blocks(length: int, block_size: int, random_blocks: int, heads: int, seed: int) -> Tensor:
    """(heads, n-2, 5 + r): all key blocks of query blocks 1..n-2, each once, filled with -1."""
    n = ceil_div(length, block_size)
    plan = random_plan(length, block_size, random_blocks, heads, seed)
    table = torch.full((heads, n - 2, 5 + random_blocks), -1, device="cpu")
    for b in range(1, n - 1):
        band = sorted({0, b - 1, b, b + 1, n - 1})
        table[:, b - 1, : len(band)] = torch.tensor(band)
        table[:, b - 1, 5:] = torch.from_numpy(plan[:, b - 1])
    return table


# A custom operator, so that compiled graphs do not trace NumPy's generator.
@torch.library.custom_op("weft::bigbird_blocks", mutates_args=())
def key_blocks(length: int, block_size: int, random_blocks: int, heads: int, seed: int) -> Tensor:
    return _key_blocks(length, block_size, random_blocks, heads, seed).clone()


@key_blocks.register_fake
def _(length: int, block_size: int, random_blocks: int, heads: int, seed: int) -> Tensor:
    return torch.empty(heads, ceil_div(length, block_size) - 2, 5 + random_blocks, dtype=torch.long, device="cpu")


def run_kernel(attn: BigBirdAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: None) -> Tensor:
    m, L = min(attn.block_size, q.shape[2]), q.shape[2]
    longer = attn.pattern_of(L) if L > m else L  # one block has only itself
    table = block_table(q.detach(), longer, m, attn.random_blocks, attn.seed)
    key, threshold = dropout_key(attn, q)
    return block_list_attention(q, k, v, mask, table, block_size=m, key=key, threshold=threshold)


def _room(n: int, random_blocks: int) -> int:
    """Most pairs of blocks: two query blocks attend to all, the others to a band, both ends and random blocks."""
    return min(2, n) * n + max(n - 2, 0) * (5 + random_blocks)


@operator(
    "weft::bigbird_table",
    "(Tensor q, int pattern_length, int block_size, int random_blocks, int seed) -> Tensor",
    lambda q, longer, m, r, seed: q.new_empty(
        2, q.shape[1], ceil_div(q.shape[2], m) + 1 + _room(ceil_div(q.shape[2], m), r), dtype=torch.int32
    ),
)
def block_table(q: Tensor, pattern_length: int, block_size: int, random_blocks: int, seed: int) -> Tensor:
    """The block lists for `block_list_attention`, on the device of q."""
    key = (q.shape[1], ceil_div(q.shape[2], block_size), pattern_length, block_size, random_blocks, seed)
    if q.is_cuda and torch.cuda.is_current_stream_capturing() and (key, q.device) not in _tables:
        return send(_block_table(*key), q.device)  # memory of a CUDA graph: not to be kept
    if (key, q.device) not in _tables:
        if len(_tables) == 64:
            _tables.clear()
        with torch.inference_mode(False):  # training may read it later
            _tables[key, q.device] = send(_block_table(*key), q.device)
    return _tables[key, q.device]


_tables: dict[Any, Tensor] = {}


def _block_table(heads: int, kept: int, length: int, block_size: int, random_blocks: int, seed: int) -> Tensor:
    """The pattern of this length, of which the sequence has the first `kept` blocks."""
    n = ceil_div(length, block_size)
    b, every = np.arange(n), np.ones(n, int)
    band = [(b, b), (b[1:], b[:-1]), (b[:-1], b[1:])]
    band += [pair for end in (0, n - 1) for pair in ((b, end * every), (end * every, b))]
    plan = random_plan(length, block_size, random_blocks, heads, seed)
    fixed = np.concatenate([i * n + j for i, j in band])
    pairs = []
    for drawn in plan:
        i = np.broadcast_to(np.arange(1, len(drawn) + 1)[:, None], drawn.shape)
        each = np.unique(np.concatenate([fixed, (i * n + drawn)[drawn >= 0]]))
        both = np.stack([each // n, each % n], 1)
        pairs.append(both[(both < kept).all(1)])
    return tables(pairs, kept, _room(kept, random_blocks))


register(
    "bigbird",
    BigBirdAttention,
    naive=naive,
    paper="Zaheer et al. 2020, Big Bird (2007.14062)",
    cost="L*block",
    bias=True,
    causal=False,
    not_causal="its global blocks attend to all tokens; use 'longformer' with global_tokens, or 'combiner-fixed'",
    length_dependent="the last block is global and the random blocks are drawn for the whole length, padding included",
    kernel=Kernel(run_kernel, least_length=LEAST_LENGTH, dropout=True, grouped=lambda attn: True),
)
