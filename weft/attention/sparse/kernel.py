"""Fused kernels of `sparse` with pattern="strided": forward and backward as one PyTorch operator.

    out_i = Σ_j softmax_j(q_i · k_j / √D) v_j          over |i - j| ≤ m, and (i - j) % m = 0; j ≤ i if causal

The kernels for near keys and for the columns of a grid share one softmax. On a grid with rows of m tokens, the second
set is the query's own column. The adjacent cells of the column are m tokens away and already in the window, so the
column part covers cells at a distance of two or more. The plain version in `__init__.py` is the reference.
"""

from __future__ import annotations

from torch import Tensor

from ...core.blocks import ceil_div
from ...core.precision import autocast
from ...core.tiles import as_flags, for_operator, near_rows
from ...kernels.band.kernel import attend_near, check, empty_outputs, near_gradients
from ...kernels.grouped import gradients, sum_to_groups
from ...kernels.lines.kernel import Lines, Rule, attend_lines, line_key_gradients, line_query_gradients
from ...kernels.operator import Operator

LEAST_LENGTH = 256  # the shortest measured; the kernels beat the plain version from here on: docs/kernels.md


def strided(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, block_size: int, causal: bool,
    key: Tensor | None = None, threshold: int = 0,
) -> Tensor:  # fmt: skip
    """q, k and v (B, H, L, D), mask (B, L) -> (B, H, L, D)."""
    q, k, v = autocast(q, k, v)
    return _operator(q, k, v, for_operator(mask), key, block_size, causal, threshold)


def _forward(q, k, v, mask, key, block_size, causal, threshold):
    check(q, k, v)
    near = 0, block_size, 0 if causal else block_size, causal
    out, lse = attend_near(q, k, v, mask, *near, threshold=threshold, key=key)
    lines, rule = _columns(q, block_size, causal)
    if lines.cells > 2:
        q, k, v = (near_rows(x) for x in (q, k, v))
        attend_lines(q, k, v, _flags(mask), out, lse, lines, rule, key, threshold, more=True)
    return out, lse


def _backward(dout, q, k, v, mask, key, out, lse, block_size, causal, threshold):
    (dk, by_head_k), (dv, by_head_v) = gradients(k, q), gradients(v, q)
    near = 0, block_size, 0 if causal else block_size, causal
    given = dout, q, k, v, mask, out, lse, by_head_k, by_head_v
    dq, delta = near_gradients(*given, *near, threshold=threshold, key=key)
    lines, rule = _columns(q, block_size, causal)
    if lines.cells > 2:
        dout, q, k, v, out = (near_rows(x) for x in (dout, q, k, v, out))
        keys = k, v, _flags(mask)
        line_query_gradients(q, *keys, out, dout, lse, delta, dq, lines, rule, key, threshold, more=True)
        line_key_gradients(q, *keys, dout, lse, delta, by_head_k, by_head_v, lines, rule, key, threshold, more=True)
    sum_to_groups(by_head_k, dk)
    sum_to_groups(by_head_v, dv)
    return dq, dk, dv


def _columns(q: Tensor, m: int, causal: bool) -> tuple[Lines, Rule]:
    return Lines.of("column", ceil_div(q.shape[2], m), m), "well_before" if causal else "apart"


def _flags(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else as_flags(mask)


_operator = Operator(
    "strided",
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? key, int block_size, bool causal, int threshold",
    _forward,
    empty_outputs,
    _backward,
    outputs=2,
)
