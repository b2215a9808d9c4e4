"""Resample the real tokens of each sample to a fixed number of slots.

For a sample with L real tokens, slot i of n is the real token

    nearest   floor(i L / n)
    linear    (i + ½) L / n - ½, interpolated between its two neighbours
    area      the mean of floor(i L / n) … ceil((i + 1) L / n) - 1
    2d        nearest in rows and in columns, for tokens of a row-major h x w image
"""

from __future__ import annotations

import torch
from torch import Tensor

RESAMPLINGS = ("nearest", "linear", "area", "2d")


def resample(x: Tensor, n: int, valid: Tensor | None = None, how: str = "nearest") -> tuple[Tensor, Tensor | None]:
    """x (B, T, D) -> (B, n, D), and a mask (B,) of samples with real tokens, or None if all have some."""
    B, T, _ = x.shape
    slot = torch.arange(n, device=x.device)
    if valid is None:
        alive, order = None, None
        L = torch.full((), T, device=x.device)
        if T == n:
            return x, None
    else:
        L = valid.sum(-1, keepdim=True)
        alive = L[:, 0] > 0
        # Real tokens first, in order: slots then index only real tokens, without a loop over samples.
        order = torch.argsort(~valid, dim=-1, stable=True)
        x = x.masked_fill(~valid[..., None], 0)
    if how == "nearest":
        return _take(x, slot * L // n, order), alive
    if how == "linear":
        halves = ((2 * slot + 1) * L - n).clamp(min=0)  # the position, in units of 1 / (2 n) token
        low = halves // (2 * n)
        weight = (halves - low * 2 * n).to(x.dtype)[..., None] / (2 * n)
        high = (low + 1).minimum((L - 1).clamp(min=0))
        return torch.lerp(_take(x, low, order), _take(x, high, order), weight), alive
    first, end = slot * L // n, ((slot + 1) * L + n - 1) // n
    every = torch.arange(T, device=x.device)
    sums = _take(x, every, order).cumsum(1)
    before = _take(sums, (first - 1).clamp(min=0), None).masked_fill((first == 0)[..., None], 0)
    count = (end - first).clamp(min=1).to(x.dtype)
    return (_take(sums, (end - 1).clamp(min=0), None) - before) / count[..., None], alive


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
