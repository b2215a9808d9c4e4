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
from ...core.tiles import block_width, empty_rows, flags_or, for_operator, near_rows, precision, strides
from ..band.kernel import check, empty_outputs
from ..grouped import gradients, sum_to_groups
from ..launch import launch
from ..lines.kernel import scales
from ..operator import Operator

T, WIDE_T = 64, 32  # positions per tile, in half precision and in float32
U = 16  # the most spans in earlier tiles
LONGEST = WIDE_T << U


def lacks(attn: Any, *qkv: Tensor) -> str:
    if qkv and qkv[0].shape[2] > LONGEST:
        return f"the kernel supports up to {LONGEST} tokens, got {qkv[0].shape[2]}"
    return ""


def last_token_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool, key: Tensor | None = None, threshold: int = 0
) -> Tensor:
    """q, k and v (B, H, L, D), mask (B, L), dropout from `dropout_key` -> (B, H, L, D). A span is represented by its
    token nearest to the query."""
    q, k, v = autocast(q, k, v)
    return _operator(q, k, v, for_operator(mask), key, causal, threshold)


def _forward(q, k, v, mask, key, causal, threshold):
    check(q, k, v)
    out, lse = empty_outputs(q)
    q, k, v = (near_rows(x) for x in (q, k, v))
    flags = flags_or(mask, q)
    for reverse in (False,) if causal else (False, True):
        attend_spans(q, k, v, flags, k, v, flags, key, out, lse, mask is not None, reverse, threshold)
    return out, lse


def attend_spans(
    q: Tensor, k: Tensor, v: Tensor, flags: Tensor, kbar: Tensor, vbar: Tensor, some: Tensor, key: Tensor | None,
    out: Tensor, lse: Tensor, has_mask: bool, reverse: bool, threshold: int,
) -> None:  # fmt: skip
    """Write out and lse: the token itself and the spans before it; with `reverse`, add the spans after it."""
    from .forward import attend

    sizes, options = tile_sizes(q, has_mask)
    launch(
        attend, (ceil_div(q.shape[2], options["T"]) * sizes[0],),
        q, k, v, flags, kbar, vbar, some, q if key is None else key, out, lse,
        *strides(q), *strides(k), *strides(v), *strides(kbar), *strides(vbar), *strides(out), *sizes, threshold,
        scales(q)[0], REVERSE=reverse, MORE=reverse, DROPOUT=key is not None, **_shared(q, k, kbar), **options,
        num_warps=4, num_stages=1,
    )  # fmt: skip


def _backward(dout, q, k, v, mask, key, out, lse, causal, threshold):
    dq, (dk, by_head_k), (dv, by_head_v) = empty_rows(q), gradients(k, q), gradients(v, q)
    dout, q, k, v = (near_rows(x) for x in (dout, q, k, v))
    flags = flags_or(mask, q)
    delta, parts = torch.empty_like(lse), empty_parts(q)
    given, grads = (q, k, v, flags, k, v, flags, key, out, dout, lse), (dq, by_head_k, by_head_v, by_head_k, by_head_v)
    for reverse in (False,) if causal else (False, True):
        span_gradients(*given, delta, *grads, parts, mask is not None, reverse, threshold, summaries=False)
    sum_to_groups(by_head_k, dk)
    sum_to_groups(by_head_v, dv)
    return dq, dk, dv


def span_gradients(
    q: Tensor, k: Tensor, v: Tensor, flags: Tensor, kbar: Tensor, vbar: Tensor, some: Tensor, key: Tensor | None,
    out: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, dkbar: Tensor,
    dvbar: Tensor, parts: Tensor, has_mask: bool, reverse: bool, threshold: int, *, summaries: bool,
) -> None:  # fmt: skip
    """Write the gradients of `attend_spans`, which are separate for tokens and spans with `summaries`. With `reverse`,
    add to those of tokens."""
    from . import backward

    sizes, options = tile_sizes(q, has_mask)
    n, D = ceil_div(q.shape[2], options["T"]), q.shape[3]
    launch(
        backward.gradients, (n * sizes[0],),
        q, k, v, flags, kbar, vbar, some, q if key is None else key, out, dout, lse, delta, dq, dk, dv, dkbar, dvbar,
        parts,
        *strides(q), *strides(k), *strides(v), *strides(kbar), *strides(vbar), *strides(out), *strides(dout),
        *strides(dq), *strides(dk), *strides(dv), *strides(dkbar), *strides(dvbar), *sizes, n, threshold, *scales(q),
        REVERSE=reverse, MORE=reverse, DROPOUT=key is not None, **_shared(q, k, kbar), SUMMARIES=summaries, **options,
        num_warps=8 if D > 64 else 4, num_stages=1,
    )  # fmt: skip
    if n > 1:
        launch(
            backward.collect, ((n - 1) * sizes[0],),
            parts, dkbar, dvbar, *strides(dkbar), *strides(dvbar), *sizes, n, D=D, BLOCK_D=block_width(D),
            T=options["T"], U=U, ROWS=16, REVERSE=reverse, num_warps=4,
        )  # fmt: skip


def _shared(q: Tensor, k: Tensor, kbar: Tensor) -> dict[str, int]:
    """How many heads of q share a head of k, and of kbar."""
    return {"GROUP": q.shape[1] // k.shape[1], "SPAN_GROUP": q.shape[1] // kbar.shape[1]}


def empty_parts(q: Tensor) -> Tensor:
    """Memory for what each tile sends to the spans of earlier tiles."""
    (BH, _, L), options = tile_sizes(q, False)
    return q.new_empty(BH, ceil_div(L, options["T"]), 2, U, q.shape[3], dtype=torch.float32)


def tile_sizes(q: Tensor, has_mask: bool) -> tuple[tuple[int, int, int], dict[str, Any]]:
    B, H, L, D = q.shape
    tile = WIDE_T if q.element_size() == 4 else T
    options = {"D": D, "BLOCK_D": block_width(D), "T": tile, "U": U, "PRECISION": precision(q)}
    return (B * H, H, L), {**options, "HAS_MASK": has_mask}


_operator = Operator(
    "last_token_attention",
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? key, bool causal, int threshold",
    _forward,
    empty_outputs,
    _backward,
    outputs=2,
)
