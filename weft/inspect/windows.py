"""Where the tokens of an attention window are in the image, as in Swin: found by gradients, for any way of cutting.

Each query of a window depends on one token x_t of the layer's input. With f the sum of all queries, and F the same sum
with query s multiplied by s,  ∂F/∂x_t = s · ∂f/∂x_t  for the s that comes from x_t.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]  # a module and its arguments


class Windows(NamedTuple):
    grid: tuple[int, int]  # height and width of the token image
    tokens: Tensor  # (windows, L): the token of the image at each place, row by row; -1 for padding


def windows_of(attn: nn.Module, q: Tensor, images: int, callers: Sequence[Call]) -> Windows | None:
    """The windows that a module around `attn` cuts out of token images; None if there are none, or if it is not clear.

    `callers` are the modules around `attn`, outermost first, in the call that gave `attn` the queries `q`.
    """
    for module, args, kwargs in reversed(callers):
        x = args[0] if args else None
        if not isinstance(x, Tensor) or len(x) != images or x.shape[-1] != q.shape[1] * q.shape[3]:
            continue
        grid = x.shape[1:3] if x.dim() == 4 else _size(x, (*args[1:], *kwargs.values()))
        if grid is not None:
            whole = len(q) == images and q.shape[2] == prod(grid)
            return None if whole else _traced(module, attn, q, x, (int(grid[0]), int(grid[1])), args[1:], kwargs)
    return None


def _size(x: Tensor, given: Sequence[Any]) -> Sequence[int] | None:
    """The argument that is the height and width of the tokens x (B, T, dim)."""
    pairs = (a for a in given if isinstance(a, (tuple, list)) and len(a) == 2 and all(isinstance(n, int) for n in a))
    return next((pair for pair in pairs if x.dim() == 3 and prod(pair) == x.shape[1]), None)


def _traced(
    module: nn.Module, attn: nn.Module, q: Tensor, x: Tensor, grid: tuple[int, int], args: Any, kwargs: Any
) -> Windows | None:
    seen: list[Tensor] = []
    hook = attn.register_forward_pre_hook(
        lambda _, given, named: seen.append(given[0] if given else named["q"]), with_kwargs=True
    )
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        module(x, *args, **kwargs)
        hook.remove()
        f = seen[0].sum((1, 3))  # (windows, L)
        if not f.requires_grad:
            return None  # learned queries
        numbers = [torch.arange(n, device=f.device) for n in f.shape]
        sums = [f.sum(), (f * numbers[0][:, None]).sum(), (f * numbers[1]).sum()]
        gradients = [torch.autograd.grad(f, x, retain_graph=True, materialize_grads=True)[0] for f in sums]
        one, *numbered = (g.flatten(0, -2).double() for g in gradients)
    found = torch.stack([(g * one).sum(-1) / one.square().sum(-1) for g in numbered])
    exact = found.nan_to_num(-1).round()
    slots = (exact[0] * f.shape[1] + exact[1]).long()
    clear = (found - exact).abs().max() < 0.1 and slots.min() >= 0 and slots.max() < f.numel()
    if not clear or len(slots.unique()) < len(slots):
        return None  # tokens were mixed before they were cut into windows
    tokens = torch.full((f.numel(),), -1)
    tokens[slots.cpu()] = torch.arange(len(slots)) % prod(grid)
    return Windows(grid, tokens.view(f.shape))
