"""Fused kernels for attention to the token itself and to the dyadic spans before it: `logsparse`.

    out_i = Σ_j softmax_j(q_i · k_j / √D) v_j          over i and the last token of every span before i (partitions.py)

The bidirectional form adds the first token of every span after i, counted from the end of the sequence. The plain
version in `weft/attention/logsparse.py` is the reference. Triton is imported only when a kernel runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.blocks import ceil_div
from ...core.precision import autocast
from ...core.tiles import block_width, empty_rows, flags_or, for_operator, precision, rows_contiguous, strides
from ..band.kernel import check, too_long
from ..launch import launch
from ..lines.kernel import scales
from ..operator import Operator

T, WIDE_T = 64, 32  # positions per tile, in half precision and in float32
U = 16  # the most spans in earlier tiles
LONGEST = WIDE_T << U


def lacks(attn: Any, *qkv: Tensor) -> str:
    if qkv and qkv[0].shape[2] > LONGEST:
        return f"the kernel supports up to {LONGEST} tokens, got {qkv[0].shape[2]}"
    return too_long(attn, *qkv)


def last_token_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
    """q, k and v (B, H, L, D), mask (B, L) -> (B, H, L, D). A span is represented by its token nearest to the query."""
    q, k, v = autocast(q, k, v)
    return _operator(q, k, v, for_operator(mask), causal)


def _forward(q, k, v, mask, causal):
    from .forward import attend

    check(q, k, v, "none")
    out, lse = _outputs(q)
    q, k, v = (rows_contiguous(x) for x in (q, k, v))
    flags = flags_or(mask, q)
    sizes, options = _sizes(q, mask)
    for reverse in (False,) if causal else (False, True):
        launch(
            attend, (ceil_div(q.shape[2], options["T"]) * sizes[0],),
            q, k, v, flags, out, lse, *strides(q), *strides(k), *strides(v), *strides(out), *sizes, scales(q)[0],
            REVERSE=reverse, MORE=reverse, **options, num_warps=4, num_stages=1,
        )  # fmt: skip
    return out, lse


def _outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    return empty_rows(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _backward(dout, q, k, v, mask, out, lse, causal):
    from .backward import collect, gradients

    dq, dk, dv, delta = empty_rows(q), empty_rows(k), empty_rows(v), torch.empty_like(lse)
    dout, q, k, v, out = (rows_contiguous(x) for x in (dout, q, k, v, out))
    flags = flags_or(mask, q)
    sizes, options = _sizes(q, mask)
    n = ceil_div(q.shape[2], options["T"])
    parts = lse.new_empty(sizes[0], n, 2, U, q.shape[3])
    for reverse in (False,) if causal else (False, True):
        launch(
            gradients, (n * sizes[0],),
            q, k, v, flags, out, dout, lse, delta, dq, dk, dv, parts,
            *strides(q), *strides(k), *strides(v), *strides(out), *strides(dout),
            *strides(dq), *strides(dk), *strides(dv), *sizes, n, *scales(q),
            REVERSE=reverse, MORE=reverse, **options, num_warps=8 if q.shape[3] > 64 else 4, num_stages=1,
        )  # fmt: skip
        if n > 1:
            launch(
                collect, ((n - 1) * sizes[0],),
                parts, dk, dv, *strides(dk), *strides(dv), *sizes, n, D=q.shape[3], BLOCK_D=block_width(q.shape[3]),
                T=options["T"], U=U, ROWS=16, REVERSE=reverse, num_warps=4,
            )  # fmt: skip
    return dq, dk, dv


def _sizes(q: Tensor, mask: Tensor | None) -> tuple[tuple[int, int, int], dict[str, Any]]:
    B, H, L, D = q.shape
    tile = WIDE_T if q.element_size() == 4 else T
    options = {"D": D, "BLOCK_D": block_width(D), "T": tile, "U": U, "PRECISION": precision(q)}
    return (B * H, H, L), {**options, "HAS_MASK": mask is not None}


_operator = Operator(
    "last_token_attention",
    "Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal",
    _forward,
    lambda q, *rest: _outputs(q),
    _backward,
    outputs=2,
)
