"""Fused kernels of `sparse` with pattern="strided": forward and backward as one PyTorch operator.

    out_i = Σ_j softmax_j(q_i · k_j / √D) v_j          over |i - j| ≤ m, and (i - j) % m = 0; j ≤ i if causal

The kernels for near keys and for the columns of a grid share one softmax. On a grid with rows of m tokens, the second
set is the query's own column. The adjacent cells of the column are m tokens away and already in the window, so the
column part covers cells at a distance of two or more. The plain version in `__init__.py` is the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.blocks import ceil_div
from ...core.precision import autocast
from ...core.tiles import as_flags, empty_rows, for_operator, rows_contiguous
from ...kernels.band.kernel import attend_near, check, near_gradients
from ...kernels.lines.kernel import Lines, Rule, attend_lines, line_key_gradients, line_query_gradients

LEAST_LENGTH = 256  # the shortest measured; the kernels beat the plain version from here on: docs/kernels.md


def strided(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, block_size: int, causal: bool) -> Tensor:
    """q, k and v (B, H, L, D), mask (B, L) -> (B, H, L, D)."""
    q, k, v = autocast(q, k, v)
    return torch.ops.weft.strided(q, k, v, for_operator(mask), block_size, causal)[0]


@torch.library.custom_op(
    "weft::strided",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? mask, int block_size, bool causal) -> (Tensor, Tensor)",
)
def _forward(q, k, v, mask, block_size, causal):
    check(q, k, v, "none")
    out, lse = attend_near(q, k, v, mask, 0, block_size, 0 if causal else block_size, causal)
    lines, rule = _columns(q, block_size, causal)
    if lines.cells > 2:
        q, k, v = (rows_contiguous(x) for x in (q, k, v))
        attend_lines(q, k, v, _flags(mask), out, lse, lines, rule, more=True)
    return out, lse


@_forward.register_fake
def _(q, k, v, mask, block_size, causal):
    return empty_rows(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op(
    "weft::strided_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor out, Tensor lse, int block_size,"
    " bool causal) -> (Tensor, Tensor, Tensor)",
)
def _backward(dout, q, k, v, mask, out, lse, block_size, causal):
    right = 0 if causal else block_size
    dq, dk, dv, delta = near_gradients(dout, q, k, v, mask, out, lse, 0, block_size, right, causal)
    lines, rule = _columns(q, block_size, causal)
    if lines.cells > 2:
        dout, q, k, v, out = (rows_contiguous(x) for x in (dout, q, k, v, out))
        keys = k, v, _flags(mask)
        line_query_gradients(q, *keys, out, dout, lse, delta, dq, lines, rule, more=True)
        line_key_gradients(q, *keys, dout, lse, delta, dk, dv, lines, rule, more=True)
    return dq, dk, dv


@_backward.register_fake
def _(dout, q, k, v, mask, out, lse, block_size, causal):
    return empty_rows(q), empty_rows(k), empty_rows(v)


def _columns(q: Tensor, m: int, causal: bool) -> tuple[Lines, Rule]:
    return Lines.of("column", ceil_div(q.shape[2], m), m), "well_before" if causal else "apart"


def _flags(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else as_flags(mask)


def _save(ctx, inputs, output):
    q, k, v, mask, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, mask, *output)
    ctx.set_materialize_grads(False)


def _grad(ctx, dout, _):
    if dout is None:
        return (None,) * 6
    return *torch.ops.weft.strided_backward(dout, *ctx.saved_tensors, *ctx.options), None, None, None


_forward.register_autograd(_grad, setup_context=_save)
