"""Resample the real tokens of each sample to a fixed number of slots.

For a sample with L real tokens, slot i of n is the real token

    nearest   floor(i L / n)
    linear    (i + ½) L / n - ½, interpolated between its two neighbours
    area      the mean of floor(i L / n) … ceil((i + 1) L / n) - 1
    2d        nearest in rows and in columns, for tokens of a row-major h x w image
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.precision import precise
from ...core.sharding import current

RESAMPLINGS = ("nearest", "linear", "area", "2d")


def resample(x: Tensor, n: int, valid: Tensor | None = None, how: str = "nearest") -> tuple[Tensor, Tensor | None]:
    """x (B, T, D) -> (B, n, D), and a mask (B,) of samples with real tokens, or None if all have some.

    Under context parallelism, x is this rank's part, and all ranks get the slots of the whole sequence.
    """
    context = current()
    if valid is None:
        alive, order = None, None
        here = torch.full((), x.shape[1], device=x.device)
        if context is None and x.shape[1] == n:
            return x, None
    else:
        here = valid.sum(-1, keepdim=True)
        # Real tokens first, in order: slots then index only real tokens, without a loop over samples.
        order = torch.argsort(~valid, dim=-1, stable=True)
        x = x.masked_fill(~valid[..., None], 0)
    before, L = here, here
    if context is not None:  # real tokens before x, and of the whole sequence
        context.agree(x.shape[1], x.device)
        if valid is None:
            before, L = torch.full_like(here, context.start), torch.full_like(here, context.length)
        else:
            counts = context.each(here)
            before, L = counts[:, : context.rank].sum(1), counts.sum(1)
    if valid is not None:
        alive = L[:, 0] > 0
    slots = _slots(x, n, how, order, L, None if context is None else (before, here))
    if context is not None:
        slots = torch.unflatten(context.each(slots.flatten(1)).sum(1), 1, slots.shape[1:])
    return slots, alive


def _slots(x: Tensor, n: int, how: str, order: Tensor | None, L: Tensor, part: tuple[Tensor, Tensor] | None) -> Tensor:
    """The slots of sequences with L real tokens. If x is only a part of them, with (real tokens before it, real tokens
    in it), what it contributes: 0 to slots of other parts."""
    slot = torch.arange(n, device=x.device)

    def token(at: Tensor) -> Tensor:
        if part is None:
            return _take(x, at, order)
        before, here = part
        at = at - before
        inside = (at >= 0) & (at < here)
        return _take(x, torch.where(inside, at, 0), order).masked_fill(~inside[..., None], 0)

    if how == "nearest":
        return token(slot * L // n)
    if how == "linear":
        halves = ((2 * slot + 1) * L - n).clamp(min=0)  # the position, in units of 1 / (2 n) token
        low = halves // (2 * n)
        weight = (halves - low * 2 * n).to(x.dtype)[..., None] / (2 * n)
        return torch.lerp(token(low), token((low + 1).minimum((L - 1).clamp(min=0))), weight)
    first, end = slot * L // n, ((slot + 1) * L + n - 1) // n
    every = torch.arange(x.shape[1], device=x.device)
    # Of the first 0, 1, ... tokens. Half precision is too short for differences of such sums.
    sums = F.pad(precise(_take(x, every, order)).cumsum(1), (0, 0, 1, 0))
    count = (end - first).clamp(min=1).to(sums.dtype)
    if part is not None:
        first, end = ((at - part[0]).clamp(min=0).minimum(part[1]) for at in (first, end))
    return ((_take(sums, end, None) - _take(sums, first, None)) / count[..., None]).to(x.dtype)


def resample_grid(x: Tensor, source: tuple[int, int], target: tuple[int, int], prefix: int = 0) -> Tensor:
    """x (B, prefix + h w, D) -> (B, prefix + h' w', D): nearest row and column; the prefix is kept."""
    (h, w), (rows, columns) = source, target
    i = torch.arange(rows, device=x.device) * h // rows
    j = torch.arange(columns, device=x.device) * w // columns
    index = (i[:, None] * w + j).flatten() + prefix
    return torch.cat([x[:, :prefix], x[:, index]], 1)


def _take(x: Tensor, index: Tensor, order: Tensor | None) -> Tensor:
    """x (B, T, D) at index (n,) or (B, n), counted along `order` if given."""
    if index.dim() == 1:
        index = index.expand(x.shape[0], -1)
    if order is not None:
        index = order.gather(1, index)
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))
