"""Gradients of keys and values that several heads share: written for each head, then summed over each group."""

from __future__ import annotations

from torch import Tensor

from ..core.blocks import ceil_div
from ..core.tiles import FAR, block_width, empty_rows, strides
from .launch import launch


def fits(x: Tensor, q: Tensor) -> bool:
    """Whether x has the shape of q (B, H, L, D), or with a number of heads that divides H."""
    return x.dim() == 4 and (x.shape[0], *x.shape[2:]) == (q.shape[0], *q.shape[2:]) and q.shape[1] % x.shape[1] == 0


def empty_by_head(x: Tensor, q: Tensor) -> Tensor:
    """Empty memory like x (B, heads of x, L, D), but with the heads of q. They are adjacent: concurrent programs write
    them, unless rows would then be too far apart (`far`)."""
    B, H, L, D = *q.shape[:3], x.shape[3]
    if x.shape[1] == H:
        return empty_rows(x)
    return x.new_empty(B, H, L, D) if L * H * D >= FAR else x.new_empty(B, L, H, D).transpose(1, 2)


def gradients(x: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Empty memory for the gradient of x (B, heads of x, L, D), and for what a kernel writes for each head of q. They
    are the same if x has as many heads as q."""
    dx = empty_rows(x)
    return dx, dx if x.shape[1] == q.shape[1] else empty_by_head(x, q)


def sum_to_groups(by_head: Tensor, dx: Tensor) -> None:
    """Sum what the kernel wrote for each head, in float32; nothing to do if it is `dx` itself."""
    from .rows import sum_groups

    if by_head.shape == dx.shape:
        return
    B, H, L, D = dx.shape
    launch(
        sum_groups, (ceil_div(L, 64) * B * H,),
        by_head, dx, *strides(by_head), *strides(dx), B * H, H, L,
        D=D, BLOCK_D=block_width(D), ROWS=64, GROUP=by_head.shape[1] // H, num_warps=4,
    )  # fmt: skip
