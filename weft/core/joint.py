"""One softmax over keys from several layouts of the sequence.

On a grid, a query may attend to its row and to its column. Each is a batched matrix product in its own layout. The
logits are then put back in token order and share one normaliser:

    out_i = Σ_parts Σ_{j ∈ part(i)} exp(q_i · k_j / √D) v_j / Z_i
    Z_i   = Σ_parts Σ_{j ∈ part(i)} exp(q_i · k_j / √D)

With a single layout this is PyTorch's fused attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .blocks import from_blocks, to_blocks
from .softmax import softmax_attention


class Layout(Protocol):
    """Arranges queries in G groups of Q queries that share their keys."""

    def arrange(self, x: Tensor) -> Tensor:
        """(B, H, L, X) -> (B, H, G, Q, X)"""
        ...

    def restore(self, x: Tensor, length: int) -> Tensor:
        """(B, H, G, Q, X) -> (B, H, L, X)"""
        ...


@dataclass
class Rows:
    """Blocks of `size` consecutive tokens."""

    size: int

    def arrange(self, x: Tensor) -> Tensor:
        return to_blocks(x, self.size)

    def restore(self, x: Tensor, length: int) -> Tensor:
        return from_blocks(x, length)


@dataclass
class Columns:
    """Columns of the grid whose rows have `size` tokens."""

    size: int

    def arrange(self, x: Tensor) -> Tensor:
        return to_blocks(x, self.size).transpose(2, 3)

    def restore(self, x: Tensor, length: int) -> Tensor:
        return from_blocks(x.transpose(2, 3), length)


@dataclass
class BackwardRows:
    """Blocks of `size` tokens, counted from the end of the sequence."""

    size: int

    def arrange(self, x: Tensor) -> Tensor:
        return to_blocks(x.flip(2), self.size)

    def restore(self, x: Tensor, length: int) -> Tensor:
        return from_blocks(x, length).flip(2)


@dataclass
class Part:
    """Keys and values (B, H, G, K, D) for the groups of a layout; `allowed` and `bias` broadcast to (B, H, G, Q, K).

    Groups before `first` attend to no key of this part; its tensors do not contain them.
    """

    layout: Layout
    k: Tensor
    v: Tensor
    allowed: Tensor | None = None
    bias: Tensor | None = None
    first: int = 0

    def arrange(self, x: Tensor) -> Tensor:
        """(B, H, L, X) -> (B, H, G, Q, X), without the groups before `first`."""
        return self.layout.arrange(x)[:, :, self.first :]

    def whole(self, x: Tensor, unseen: float = 0.0) -> Tensor:
        """Add the groups before `first` to x (B, H, G, Q, X), filled with `unseen`."""
        return F.pad(x, (0, 0, 0, 0, self.first, 0), value=unseen) if self.first else x

    def restore(self, x: Tensor, length: int, unseen: float = 0.0) -> Tensor:
        """(B, H, G, Q, X) -> (B, H, L, X)"""
        return self.layout.restore(self.whole(x, unseen), length)


def join_allowed(*pairs: tuple[Tensor | None, int], device: torch.device) -> Tensor | None:
    """Concatenate on the last axis; None means "all keys". `pairs` are (allowed, number of keys)."""
    if all(allowed is None for allowed, _ in pairs):
        return None
    given = [torch.ones(1, 1, 1, 1, K, dtype=torch.bool, device=device) if a is None else a for a, K in pairs]
    front = torch.broadcast_shapes(*(a.shape[:-1] for a in given))
    return torch.cat([a.expand(*front, K) for a, (_, K) in zip(given, pairs, strict=True)], -1)


def joint_attention(q: Tensor, parts: list[Part], *, dropout: float = 0.0, may_be_empty: bool = True) -> Tensor:
    """Attention of q (B, H, L, D) over all parts with one softmax; zeros for queries without any key.

    `may_be_empty=False` asserts that every query has a key, which skips the check.
    """
    if all(part.layout is parts[0].layout for part in parts):
        together = side_by_side(parts)
        rows = together.layout.arrange(q)
        out = softmax_attention(
            rows,
            together.k,
            together.v,
            allowed=together.allowed,
            bias=together.bias,
            dropout=dropout,
            may_be_empty=may_be_empty,
        )
        return together.layout.restore(out, q.shape[2])
    return mean_attention(q, [parts], dropout=dropout, may_be_empty=may_be_empty)


def mean_attention(q: Tensor, mixture: list[list[Part]], *, dropout: float = 0.0, may_be_empty: bool = True) -> Tensor:
    """Mean of the joint attention over each list of parts. Parts that lists share are computed once."""
    L = q.shape[2]
    parts = list({id(part): part for parts in mixture for part in parts}.values())
    place = {id(part): index for index, part in enumerate(parts)}
    lists = [[place[id(part)] for part in parts] for parts in mixture]
    biased = any(part.bias is not None for part in parts)  # a bias may forbid every key
    dtype = torch.promote_types(q.dtype, torch.float32)  # half precision is summed and normalised in float32
    scaled = q.to(dtype) * q.shape[-1] ** -0.5
    arranged = {id(part.layout): part.layout.arrange(scaled).contiguous() for part in parts}
    logits = []
    for part in parts:
        s = arranged[id(part.layout)][:, :, part.first :] @ part.k.to(dtype).transpose(-1, -2)
        if part.bias is not None:
            s = s + part.bias.to(dtype)
            if part.allowed is not None:  # a bias may be NaN outside `allowed`
                s = s.masked_fill(~part.allowed, float("-inf"))
        elif part.allowed is not None:
            s += minus_infinity_outside(part.allowed, dtype)
        logits.append(part.restore(s, L, float("-inf")))
    shares: dict[int, Tensor] = {}
    for members in lists:
        joint = torch.cat([logits[i] for i in members], -1)
        alive = None
        if may_be_empty or biased:
            # A query without keys attends to all keys and is zeroed: no NaN forward, no gradient backward.
            alive = joint.detach().amax(-1, keepdim=True) != float("-inf")
            joint = joint.masked_fill(~alive, 0)
        p = F.dropout(joint.softmax(-1), dropout)
        p = p if alive is None else p.masked_fill(~alive, 0)
        for i, share in zip(members, p.split([logits[i].shape[-1] for i in members], -1), strict=True):
            shares[i] = shares[i] + share if i in shares else share
    out = part_output(parts[0], shares[0], dtype)
    for i, part in enumerate(parts[1:], 1):
        out = out + part_output(part, shares[i], dtype)
    return (out / len(lists) if len(lists) > 1 else out).to(q.dtype)


def part_output(part: Part, p: Tensor, dtype: torch.dtype) -> Tensor:
    return part.restore(part.arrange(p) @ part.v.to(dtype), p.shape[2])


def side_by_side(parts: list[Part]) -> Part:
    """Merge parts that share a layout into one."""
    if len(parts) == 1:
        return parts[0]
    assert all(part.bias is None and part.first == 0 for part in parts)
    k, v = torch.cat([part.k for part in parts], 3), torch.cat([part.v for part in parts], 3)
    allowed = join_allowed(*((part.allowed, part.k.shape[3]) for part in parts), device=k.device)
    return Part(parts[0].layout, k, v, allowed)


def minus_infinity_outside(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where allowed, -inf elsewhere. Adding it masks the logits at no cost in the backward pass."""
    return torch.zeros((), dtype=dtype, device=allowed.device).where(allowed, float("-inf"))


def token_positions(layout: Layout, length: int, device: torch.device) -> Tensor:
    """Position of every query of a layout, (1, 1, G, Q)."""
    return layout.arrange(torch.arange(length, device=device).view(1, 1, -1, 1))[..., 0]


def valid_in(layout: Layout, mask: Tensor | None, length: int, size: int, device: torch.device) -> Tensor | None:
    """Boolean (B or 1, 1, G, Q), True for real tokens of a layout; None if all are real."""
    if mask is None:
        if length % size == 0:
            return None
        mask = torch.ones(1, length, dtype=torch.bool, device=device)
    return layout.arrange(mask[:, None, :, None])[..., 0]
