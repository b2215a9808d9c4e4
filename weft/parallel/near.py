"""Mechanisms that attend to near tokens and a few far ones: a rank fetches the tokens around its part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.contract import PositionBias
from ..core.joint import Part, Rows, joint_attention
from ..core.partitions import fixed_columns, own_block
from .context import Context, sharded
from .softmax import merge, partial_attention

Reach = Callable[[int, int], tuple[int, int]]  # (start, stop) of a part -> (first, last + 1) token that it needs


def whole_blocks(m: int, causal: bool, length: int) -> Reach:
    """From the start of the first block; to the end of the last one unless causal."""
    return lambda start, stop: (start // m * m, stop if causal else min(-(-stop // m) * m, length))


def around(context: Context, name: str, reach: Reach, *tensors: Tensor) -> list[Tensor]:
    """Tensors (B, H, part, X) -> (B, H, reach, X)."""
    plan = context.plan(name, context.tokens, lambda r: range(*reach(*context.bounds[r : r + 2])))
    return context.move(plan, *tensors)


def flags_around(context: Context, reach: Reach, mask: Tensor | None, q: Tensor) -> Tensor:
    """The mask (B, reach); all True without one."""
    lo, hi = reach(context.start, context.stop)
    if mask is None:
        return torch.ones(q.shape[0], hi - lo, dtype=torch.bool, device=q.device)
    return context.everywhere(mask)[:, lo:hi]


class Moved:
    """A position bias of tokens whose positions in the whole sequence are `at`."""

    def __init__(self, bias: Any, at: Tensor):
        self.bias, self.at = bias, at
        self.shared_heads = getattr(bias, "shared_heads", False)
        if isinstance(getattr(bias, "heads", None), int):
            self.heads = bias.heads

    def __call__(self, i: Tensor, j: Tensor) -> Tensor:
        return self.bias(self.at[i], self.at[j])


@sharded("local")
def local(
    context: Context, attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: PositionBias | None
) -> Tensor:
    m = attn.block_size
    reach = whole_blocks(m, attn.causal, context.length)
    lo, hi = reach(context.start, context.stop)
    k, v = around(context, f"blocks {m} {attn.causal}", reach, k, v)
    mask = None if mask is None else flags_around(context, reach, mask, q)
    return _own(attn, q, k, v, mask, bias, torch.arange(lo, hi, device=q.device), context.start - lo)


def _own(attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Any, at: Tensor, first: int) -> Tensor:
    """Run the mechanism on the tokens at positions `at`; the queries of this rank start at number `first`."""
    n = q.shape[2]
    q = F.pad(q, (0, 0, first, k.shape[2] - first - n))
    return attn(q, k, v, mask, None if bias is None else Moved(bias, at))[:, :, first : first + n]


@sharded("longformer")
def longformer(
    context: Context, attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: PositionBias | None
) -> Tensor:
    """The first g tokens go in front of the window: every token sees them, so their distance does not matter."""
    L, g = context.length, min(attn.global_tokens, context.length)

    def window(r: int) -> list[int]:
        start, stop = context.bounds[r : r + 2]
        return [*range(g), *range(max(g, start - attn.left), max(g, min(stop + attn.right, L)))]

    plan = context.plan(f"window {attn.left} {attn.right} {g}", context.tokens, window)
    mine = torch.tensor(window(context.rank), device=q.device)
    whole = None if mask is None else context.everywhere(mask)
    near_k, near_v = context.move(plan, k, v)
    near = None if whole is None else whole[:, mine]
    # Queries at global positions are in front, the others start after them.
    front, first = (
        min(max(g - context.start, 0), q.shape[2]),
        g + max(context.start - max(g, context.start - attn.left), 0),
    )
    n, total = q.shape[2], len(mine)
    ahead = F.pad(q[:, :, :front], (0, 0, min(context.start, g), 0))
    ahead = F.pad(ahead, (0, 0, 0, first - ahead.shape[2]))
    padded = torch.cat([ahead, F.pad(q[:, :, front:], (0, 0, 0, total - first - (n - front)))], 2)
    out = attn(padded, near_k, near_v, near, None if bias is None else Moved(bias, mine))
    at = min(context.start, g)
    out = torch.cat([out[:, :, at : at + front], out[:, :, first : first + n - front]], 2)
    if not g or attn.causal:
        return out
    return _global_rows(context, attn, q, k, v, mask, bias, out, g)


def _global_rows(
    context: Context, attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Any, out: Tensor, g: int
) -> Tensor:
    """The global tokens attend to all tokens: each rank computes its share, then all shares are combined."""
    everybody = range(context.ranks)
    (top,) = context.move(context.plan(f"first {g}", context.tokens, lambda r: range(g)), q)
    values = None
    if bias is not None:
        at = torch.arange(context.start, context.stop, device=q.device)
        values = bias(torch.arange(g, device=q.device)[None, None, :, None], at[None, None, None])
    allowed = None if mask is None else mask[:, None, None]
    share = torch.cat(partial_attention(top, k, v, allowed, values, attn.dropout_now), -1)  # (B, H, g, D + 1)
    plan = context.plan("shares", lambda r: range(r, r + 1), lambda r: everybody)
    (shares,) = context.move(plan, share.flatten(2)[:, :, None])
    parts = [torch.unflatten(s, 2, (g, -1)).split([q.shape[-1], 1], -1) for s in shares.unbind(2)]
    whole, _ = merge([(a, b) for a, b in parts])
    mine = whole[:, :, context.start : min(g, context.stop)].to(out.dtype)
    return torch.cat([mine, out[:, :, mine.shape[2] :]], 2)


@sharded("sparse")
def sparse(
    context: Context, attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: PositionBias | None
) -> Tensor:
    if attn.pattern != "fixed" or attn.cls:
        raise ValueError(
            "context parallelism supports sparse with pattern='fixed' and cls=False: the strided pattern reads every "
            "token of every other rank; use pattern='fixed' or 'longformer'"
        )
    L, B, n, device = context.length, q.shape[0], q.shape[2], q.device
    m, causal = attn._block(L), attn.causal or attn.one_way
    reach = whole_blocks(m, causal, L)
    lo, hi = reach(context.start, context.stop)
    columns = fixed_columns(m, attn.columns, attn.leading_column and attn.columns < m)

    def far(r: int) -> list[int]:
        last = (context.bounds[r + 1] - 1) // m if causal else -(-L // m)
        return [s * m + c for s in range(last) for c in columns if s * m + c < L]

    near_k, near_v = around(context, f"blocks {m} {causal}", reach, k, v)
    far_k, far_v = context.move(context.plan(f"columns {m} {columns} {causal}", context.tokens, far), k, v)
    at = torch.tensor(far(context.rank), dtype=torch.long, device=device)
    whole = torch.ones(B, L, dtype=torch.bool, device=device) if mask is None else context.everywhere(mask)
    layout = Rows(m)
    blocks_k, blocks_v = layout.arrange(near_k), layout.arrange(near_v)
    real = layout.arrange(whole[:, None, lo:hi, None])[..., 0]  # (B, 1, blocks, m)
    blocks = blocks_k.shape[2]
    block = lo // m + torch.arange(blocks, device=device)
    own = own_block(m, causal, device) & real[:, :, :, None]
    others = at // m < block[:, None] if causal else at // m != block[:, None]
    others = (others & whole[:, None, None, at])[:, :, :, None].expand(B, 1, blocks, m, len(at))
    keys, values = (
        torch.cat([x, y[:, :, None].expand(-1, -1, blocks, -1, -1)], 3)
        for x, y in ((blocks_k, far_k), (blocks_v, far_v))
    )
    part = Part(layout, keys, values, torch.cat([own, others], -1))
    if bias is not None:
        i = (block[:, None] * m + torch.arange(m, device=device)).clamp(max=L - 1)[None, None]
        j = torch.cat([i, at.expand(1, 1, blocks, -1)], -1)
        part.bias = bias(i[..., None], j[:, :, :, None])
    first = context.start - lo
    padded = F.pad(q, (0, 0, first, near_k.shape[2] - first - n))
    return joint_attention(padded, [part], dropout=attn.dropout_now)[:, :, first : first + n]
