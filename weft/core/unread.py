"""Inputs that a mechanism does not read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Connected(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(v: Tensor, *unread: Tensor) -> Tensor:
        return v.view_as(v)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.unread = [(t.shape, t.dtype) for t in inputs[1:]]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient, *[gradient.new_zeros(shape, dtype=dtype) for shape, dtype in ctx.unread]


def connected(attn: Any, q: Tensor | None, k: Tensor | None, v: Tensor) -> Tensor:
    """v, connected to inputs that the mechanism does not read, so that their projections get zero gradients.

    DistributedDataParallel requires a gradient for every parameter.
    """
    given = (q, attn.reads_q), (k, attn.reads_k)
    unread = [t for t, read in given if t is not None and not read and t.requires_grad]
    return _Connected.apply(v, *unread) if unread else v
