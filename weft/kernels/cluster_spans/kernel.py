"""Fused kernels of `combiner-routing`: forward and backward as one PyTorch operator.

    out_i = (Σ_{j in own run} e^{q_i·k_j/√D} v_j + Σ_s e^{q_i·kbar_s/√D} vbar_s) / Z_i          over other runs s
    kbar_j = pool k      qbar_j = pool q      vbar_j = Σ softmax(qbar_j·k/√D) v          over the run of j up to j

A run has a summary at each of its tokens: if causal, queries read the newest one before them, and closed runs at their
last token; otherwise all runs at their last token. The own run and the values vbar are attention within runs, which
`intervals` computes. The plain version in `weft/attention/combiner/routing.py` is the reference. Triton is imported
only when a kernel runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.blocks import ceil_div
from ...core.precision import autocast
from ...core.tiles import Block, block_width, empty_rows, near_rows, next_power_of_two, precision, strides
from ..band.kernel import check
from ..grouped import gradients, sum_to_groups
from ..intervals.clusters import clustered
from ..intervals.kernel import (
    Orders,
    attend_runs,
    order_tables,
    run_key_gradients,
    run_query_gradients,
    run_settings,
)
from ..launch import launch
from ..lines.kernel import scales
from ..operator import Operator

POOLS = ("max", "mean", "sum")
LONGEST_RUN = 1024  # the backward of the pooling holds √LONGEST_RUN rows in registers
T, WIDE_T = 64, 32  # tokens per tile, in half precision and in float32


def span_attention(
    q: Tensor, k: Tensor, v: Tensor, orders: Orders, key: Tensor | None, size: int, pool: str, causal: bool,
    threshold: int,
) -> Tensor:  # fmt: skip
    """q, k and v (B, H, L, D), dropout from `dropout_key` -> (B, H, L, D). `orders` has one order."""
    q, k, v = autocast(q, k, v)
    return _operator(q, k, v, orders.tables, key, orders.groups, size, pool, causal, threshold)


def _sizes(q: Tensor, groups: int, size: int) -> tuple[int, int, int]:
    """Tokens per tile, tiles, and the most runs."""
    tile = WIDE_T if q.element_size() == 4 else T
    return tile, ceil_div(q.shape[2], tile), ceil_div(q.shape[2], size) + groups


def _kept(q: Tensor, groups: int, size: int, causal: bool) -> Block:
    """The log2 normalisers of out, the summaries qbar, kbar, vbar and their log2 normalisers, and the tables of
    `tables.py`: of runs, of tokens, and of the last tokens before each tile."""
    B, H, L, D = q.shape
    _, n, R = _sizes(q, groups, size)
    summaries, norms = ((B, H, L, D), q.dtype), ((B, H, L), torch.float32)
    runs, tokens = ((B, H, R), torch.int32), ((B, H, L), torch.int32)
    before = ((B, H, n if causal else 0, groups), torch.int32)
    return Block((norms, summaries, summaries, summaries, norms, runs, runs, runs, runs, tokens, tokens, before))


def _outputs(q: Tensor, groups: int, size: int, causal: bool) -> tuple[Tensor, Tensor]:
    return empty_rows(q), _kept(q, groups, size, causal).empty(q)


def _forward(q, k, v, tables, key, groups, size, pool, causal, threshold):
    from .forward import attend
    from .pool import pool_runs
    from .tables import describe_tokens, last_before, list_runs

    check(q, k, v)
    out, block = outputs = _outputs(q, groups, size, causal)
    lse, qbar, kbar, vbar, local, *more = _kept(q, groups, size, causal).split(block)
    first, end, last, whole, of, about, before = more
    q, k, v = (near_rows(x) for x in (q, k, v))
    B, H, L, D = q.shape
    token, group, start = order_tables(tables, (B, H, L), groups)
    order = token[0], group[0], start[0]
    (tile, n, R), BH, run = _sizes(q, groups, size), B * H, min(size, L)
    launch(
        list_runs, (BH, ceil_div(R, 128)), order[0], order[2], first, end, last, whole, L, groups, run, R,
        ROWS=128, CAUSAL=causal, num_warps=4,
    )  # fmt: skip
    launch(
        describe_tokens, (BH, ceil_div(L, 256)), *order, of, about, L, groups, run,
        ROWS=256, CAUSAL=causal, num_warps=4,
    )  # fmt: skip
    if causal:
        launch(
            last_before, (BH * groups, ceil_div(n, 128)), order[0], order[2], before, L, n, groups, L.bit_length(),
            T=tile, ROWS=128, num_warps=4,
        )  # fmt: skip
    channels = min(64, block_width(D))
    launch(
        pool_runs, (R * BH * ceil_div(D, channels), 2),
        q, k, order[0], first, end, qbar, kbar, *strides(q), *strides(k), BH, H, L, R,
        D=D, BLOCK_D=channels, CHUNK=16, POOL=pool, HEADS=H // k.shape[1], num_warps=1,
    )  # fmt: skip
    attend_runs(qbar, k, v, lse, order, vbar, local, run_settings(q, k, v, groups, size, True), more=False)
    settings = run_settings(q, k, v, groups, size, causal, key=key, threshold=threshold)
    attend_runs(q, k, v, lse, order, out, lse, settings, more=False)
    launch(
        attend, (n * BH,),
        q, kbar, vbar, of, about, before, last, whole, q if key is None else key, out, lse, *strides(q), *strides(out),
        BH, H, L, n, groups, R, threshold, scales(q)[0], **_options(q, groups, causal), BR=_runs_per_tile(R),
        DROPOUT=key is not None, num_warps=4, num_stages=2,
    )  # fmt: skip
    return outputs


def _backward(dout, q, k, v, tables, key, out, block, groups, size, pool, causal, threshold):
    from .backward import collect_earlier, collect_runs, query_gradients, run_gradients
    from .pool import pool_gradients

    dq, (dk, by_head_k), (dv, by_head_v) = empty_rows(q), gradients(k, q), gradients(v, q)
    lse, qbar, kbar, vbar, local, *more = _kept(q, groups, size, causal).split(block)
    first, end, last, whole, of, about, before = more
    dout, q, k, v = (near_rows(x) for x in (dout, q, k, v))
    B, H, L, D = q.shape
    token, group, start = order_tables(tables, (B, H, L), groups)
    order = token[0], group[0], start[0]
    (tile, n, R), BH = _sizes(q, groups, size), B * H
    delta, local_delta = torch.empty_like(lse), torch.empty_like(lse)
    dqbar, dkbar, dvbar = (q.new_empty(q.shape) for _ in range(3))
    parts = q.new_empty(BH, n if causal else 0, groups, 2, D)
    options, warps = _options(q, groups, causal), 8 if D > 64 else 4
    shape, runs = {"D": D, "BLOCK_D": options["BLOCK_D"]}, _runs_per_tile(R)

    settings = run_settings(q, k, v, groups, size, causal, key=key, threshold=threshold)
    drops = q if key is None else key
    run_query_gradients(q, k, v, lse, order, out, dout, lse, delta, dq, settings, more=False)
    run_key_gradients(q, k, v, lse, order, dout, lse, delta, by_head_k, by_head_v, settings, more=False)
    launch(
        query_gradients, (n * BH,),
        q, kbar, vbar, of, about, before, last, whole, drops, dout, lse, delta, dq, dkbar, dvbar, parts,
        *strides(q), *strides(dout), *strides(dq), BH, H, L, n, groups, R, threshold, *scales(q), **options, BR=runs,
        DROPOUT=key is not None, num_warps=warps, num_stages=1,
    )  # fmt: skip
    if causal and n > 1:
        launch(
            collect_earlier, ((n - 1) * BH, ceil_div(groups, options["BG"])),
            before, about, parts, dkbar, dvbar, BH, L, n, groups, T=tile, BG=options["BG"], **shape, num_warps=4,
        )  # fmt: skip
    chunk = max(1024, ceil_div(ceil_div(L, 32), 128) * 128)
    chunks = ceil_div(L, chunk)
    sums = lse.new_empty(BH, chunks, R, 2, D)
    launch(
        run_gradients, (chunks * ceil_div(R, runs) * BH,),
        q, kbar, vbar, about, last, whole, drops, dout, lse, delta, sums, *strides(q), *strides(dout),
        BH, H, L, R, chunk, chunks, threshold, *scales(q), **shape, T=32, BR=runs, CAUSAL=causal,
        PRECISION=precision(q), DROPOUT=key is not None, num_warps=warps, num_stages=2,
    )  # fmt: skip
    launch(
        collect_runs, (ceil_div(R, 16) * BH,), last, whole, sums, dkbar, dvbar, BH, L, R, chunks, **shape, BR=16,
        num_warps=4,
    )  # fmt: skip
    settings = run_settings(q, k, v, groups, size, True)
    run_query_gradients(qbar, k, v, lse, order, vbar, dvbar, local, local_delta, dqbar, settings, more=False)
    run_key_gradients(qbar, k, v, lse, order, dvbar, local, local_delta, by_head_k, by_head_v, settings, more=True)
    together = max(1, round(size**0.5))  # like `running_max` in combiner/summaries.py, for the same gradients of ties
    channels = min(block_width(D), 64 if together <= 16 else 32)
    launch(
        pool_gradients, (R * BH * ceil_div(D, channels), 2),
        q, k, order[0], first, end, qbar, kbar, dqbar, dkbar, dq, by_head_k,
        *strides(q), *strides(k), *strides(dq), *strides(by_head_k), BH, H, L, R,
        D=D, BLOCK_D=channels, GROUP=together, POOL=pool, HEADS=H // k.shape[1], num_warps=1,
    )  # fmt: skip
    sum_to_groups(by_head_k, dk)
    sum_to_groups(by_head_v, dv)
    return dq, dk, dv


def _options(q: Tensor, groups: int, causal: bool) -> dict[str, Any]:
    D = q.shape[3]
    many = min(64 if D <= 64 and q.element_size() == 2 else 32, max(16, next_power_of_two(groups)))
    return {
        "D": D, "BLOCK_D": block_width(D), "T": WIDE_T if q.element_size() == 4 else T, "BG": many, "CAUSAL": causal,
        "PRECISION": precision(q),
    }  # fmt: skip


def _runs_per_tile(R: int) -> int:
    return 16 if R <= 16 else 32


_operator = Operator(
    "combiner_routing",
    "Tensor q, Tensor k, Tensor v, Tensor tables, Tensor? key, int groups, int size, str pool, bool causal,"
    " int threshold",
    _forward,
    lambda q, k, v, tables, key, groups, size, pool, causal, threshold: _outputs(q, groups, size, causal),
    _backward,
    outputs=2,
)

routed_spans = clustered("routed_spans", "int size, str pool, bool causal, int threshold", _forward, _backward)
