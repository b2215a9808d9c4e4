"""Fused kernels of `combiner-logsparse`: forward and backward as one PyTorch operator.

    out_i = (e^{q_i·k_i/√D} v_i + Σ_s e^{q_i·kbar_s/√D} vbar_s) / Z_i          over the dyadic spans s before i
    kbar_s = pool_j k_j      qbar_s = pool_j q_j      vbar_s = Σ_j softmax_j(qbar_s·k_j/√D) v_j          over the span

Every position is the last of exactly one span, so summaries are stored like tokens, and the kernels of `logsparse`
attend to them. The bidirectional form has a second set of spans, counted from the end of the sequence. The plain
version in `weft/attention/combiner/logsparse.py` is the reference. Triton is imported only when a kernel runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.blocks import ceil_div
from ...core.precision import autocast
from ...core.tiles import Block, block_width, empty_rows, flags_or, for_operator, near_rows, strides
from ..band.kernel import check
from ..grouped import gradients, sum_to_groups
from ..launch import launch
from ..lines.kernel import scales
from ..operator import Operator
from .kernel import WIDE_T, T, U, attend_spans, empty_parts, span_gradients, tile_sizes
from .kernel import lacks as lacks_spans

POOLS = ("max", "mean", "sum")


def span_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, pool: str, causal: bool, key: Tensor | None = None,
    threshold: int = 0,
) -> Tensor:  # fmt: skip
    """q, k and v (B, H, L, D), mask (B, L), dropout from `dropout_key` -> (B, H, L, D). Spans are dropped whole."""
    q, k, v = autocast(q, k, v)
    return _operator(q, k, v, for_operator(mask), key, pool, causal, threshold)


def _tree(q: Tensor) -> tuple[int, int, int]:
    """Tiles, levels of the tree above them, and nodes of all levels."""
    n = ceil_div(q.shape[2], WIDE_T if q.element_size() == 4 else T)
    return n, n.bit_length(), sum(n >> level for level in range(n.bit_length()))


def _kept(q: Tensor, causal: bool) -> Block:
    """The log2 normalisers of out, and for each direction qbar, kbar, vbar, its log2 normalisers, the number of tokens
    in each span, and the pools of the tree."""
    B, H, L, D = q.shape
    of_spans = ((B, H, L, D), q.dtype)
    tree = ((2, B * H, _tree(q)[2], D), torch.float32)
    each = (of_spans, of_spans, of_spans, ((B, H, L), torch.float32), ((B, L), torch.float32), tree)
    return Block((((B, H, L), torch.float32), *each * (1 if causal else 2)))


def _outputs(q: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    return empty_rows(q), _kept(q, causal).empty(q)


def _forward(q, k, v, mask, key, pool, causal, threshold):
    from .summaries import collect_values, pool_blocks, pool_tiles, span_values

    check(q, k, v)
    out, block = outputs = _outputs(q, causal)
    q, k, v = (near_rows(x) for x in (q, k, v))
    lse, *kept = _kept(q, causal).split(block)
    has_mask = mask is not None
    flags = flags_or(mask, q)
    (BH, H, L), options = tile_sizes(q, has_mask)
    (n, levels, nodes), D, tile, group = _tree(q), q.shape[3], options["T"], H // k.shape[1]
    counts = lse.new_empty(q.shape[0], n)
    parts, norms = lse.new_empty(BH, n, levels, D), lse.new_empty(BH, n, levels)
    for reverse in (False,) if causal else (False, True):
        qbar, kbar, vbar, local, count, tree = kept[6:] if reverse else kept[:6]
        shape = {"D": D, "BLOCK_D": block_width(D), "T": tile, "REVERSE": reverse}
        launch(
            pool_tiles, (n * BH, 2),
            q, k, flags, qbar, kbar, count, tree, counts, *strides(q), *strides(k), BH, H, L, n, nodes,
            LEVELS=tile.bit_length() - 1, POOL=pool, HAS_MASK=has_mask, GROUP=group, **shape,
            num_warps=8 if D > 64 else 4,
        )  # fmt: skip
        if n > 1:
            launch(
                pool_blocks, ((nodes - n) * BH, 2),
                qbar, kbar, count, tree, counts, BH, H, L, n, nodes, levels, ROWS=16, POOL=pool, **shape, num_warps=4,
            )  # fmt: skip
        launch(
            span_values, (n * BH,),
            qbar, k, v, flags, vbar, local, parts, norms, *strides(k), *strides(v), BH, H, L, n, levels, scales(q)[0],
            REVERSE=reverse, GROUP=group, **options, num_warps=4, num_stages=1,
        )  # fmt: skip
        launch(
            collect_values, (n * BH,),
            parts, norms, vbar, local, BH, L, n, levels, U=U, ROWS=16, **shape, num_warps=4,
        )  # fmt: skip
        attend_spans(q, k, v, flags, kbar, vbar, count, key, out, lse, has_mask, reverse, threshold)
    return outputs


def _backward(dout, q, k, v, mask, key, out, block, pool, causal, threshold):
    from .summary_gradients import collect_queries, pool_gradients, value_gradients

    dq, (dk, by_head_k), (dv, by_head_v) = empty_rows(q), gradients(k, q), gradients(v, q)
    lse, *kept = _kept(q, causal).split(block)
    dout, q, k, v = (near_rows(x) for x in (dout, q, k, v))
    has_mask = mask is not None
    flags = flags_or(mask, q)
    (BH, H, L), options = tile_sizes(q, has_mask)
    (n, levels, nodes), D, tile, group = _tree(q), q.shape[3], options["T"], H // k.shape[1]
    warps = 8 if D > 64 else 4
    delta, parts, of_queries = torch.empty_like(lse), empty_parts(q), lse.new_empty(BH, n, levels, D)
    dqbar, dkbar, dvbar = (q.new_empty(q.shape) for _ in range(3))
    for reverse in (False,) if causal else (False, True):
        qbar, kbar, vbar, local, count, tree = kept[6:] if reverse else kept[:6]
        shape = {"D": D, "BLOCK_D": block_width(D), "T": tile, "REVERSE": reverse}
        span_gradients(
            q, k, v, flags, kbar, vbar, count, key, out, dout, lse, delta, dq, by_head_k, by_head_v,
            dkbar, dvbar, parts, has_mask, reverse, threshold, summaries=True,
        )  # fmt: skip
        launch(
            value_gradients, (n * BH,),
            qbar, k, v, flags, vbar, local, dvbar, dqbar, by_head_k, by_head_v, of_queries,
            *strides(k), *strides(v), *strides(by_head_k), *strides(by_head_v), BH, H, L, n, levels, *scales(q),
            REVERSE=reverse, GROUP=group, **options, num_warps=warps, num_stages=1,
        )  # fmt: skip
        launch(
            collect_queries, (n * BH,), of_queries, dqbar, BH, L, n, levels, U=U, ROWS=16, **shape, num_warps=4
        )  # fmt: skip
        launch(
            pool_gradients, (n * BH, 2),
            q, k, flags, count, tree, dqbar, dkbar, dq, by_head_k,
            *strides(q), *strides(k), *strides(dq), *strides(by_head_k),
            BH, H, L, n, nodes, levels,
            LEVELS=tile.bit_length() - 1, POOL=pool, HAS_MASK=has_mask, GROUP=group, **shape, num_warps=warps,
        )  # fmt: skip
    sum_to_groups(by_head_k, dk)
    sum_to_groups(by_head_v, dv)
    return dq, dk, dv


_operator = Operator(
    "combiner_logsparse",
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? key, str pool, bool causal, int threshold",
    _forward,
    lambda q, k, v, mask, key, pool, causal, threshold: _outputs(q, causal),
    _backward,
    outputs=2,
)


def lacks(attn: Any, *qkv: Tensor) -> str:
    """Return why the kernel cannot run, or "" if it can."""
    if attn.summary.kind not in POOLS:
        return f"the kernel supports the summaries {', '.join(POOLS)}, got {attn.summary.kind}"
    return lacks_spans(attn, *qkv)
