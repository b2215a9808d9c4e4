"""Fused kernels of `combiner-fixed`: forward and backward as one PyTorch operator.

    out_i = (Σ_{j in own block, j ≤ i} e^{q_i·k_j/√D} v_j + Σ_{s other block} e^{q_i·kbar_s/√D} vbar_s) / Z_i
    kbar_s = pool_j k_j      qbar_s = pool_j q_j      vbar_s = Σ_j softmax_j(qbar_s·k_j/√D) v_j       over the block's
                                                                                                       valid tokens

The plain version in `__init__.py` is the reference, and these kernels must equal it.
Triton is imported only when a kernel runs, so this module can be imported anywhere.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ....core.blocks import ceil_div
from ....core.tiles import (
    Block,
    Tiles,
    as_flags,
    block_width,
    empty_rows,
    for_operator,
    next_power_of_two,
    precision,
    rows_contiguous,
    strides,
    tile_table,
    tiles_for,
)
from ....kernels.band.kernel import check
from ....kernels.grouped import gradients, sum_to_groups
from ....kernels.launch import launch
from ....kernels.operator import Operator

POOLS = ("max", "mean", "sum")
LEAST_LENGTH = 256  # measured: the kernels are faster than the plain version from here on; docs/kernels.md

# Measured with benchmarks/gpu_tune.py; docs/kernel-development.md.
TILES = tile_table(
    {
        "summarise": ((32, 0, 4, 3), (32, 0, 8, 3), (16, 0, 4, 3), (16, 0, 8, 3)),
        # and keep statistics for the backward
        "summarise and keep": ((32, 0, 4, 3), (32, 0, 8, 3), (16, 0, 4, 3), (16, 0, 8, 3)),
        "attend": ((64, 32, 4, 3), (64, 32, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1)),
        # 168 registers: three programs per multiprocessor
        "span gradients": ((32, 64, 4, 3, 168), (64, 64, 8, 2), (32, 32, 4, 2), (32, 32, 4, 1)),
        "key gradients": ((32, 64, 4, 3), (64, 64, 8, 2), (32, 32, 4, 1), (32, 32, 4, 1)),
        "query gradients": ((64, 32, 4, 3), (64, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 1)),
    }
)
# Blocks up to 128 tokens: benchmarks/results/gpu_floor.json.
TILES["summarise short blocks", 64, 2] = Tiles(32, 0, 2, 3)
TILES["summarise and keep short blocks", 64, 2] = Tiles(16, 0, 2, 4)


def combiner_fixed(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, block_size: int, pool: str, causal: bool,
    table: Tensor | None = None, longest: int = 0, key: Tensor | None = None, threshold: int = 0,
) -> Tensor:  # fmt: skip
    """Run the mechanism on q, k, v (B, H, L, D) and mask (B, L) with the kernels. Packed documents need the `table` of
    their blocks, and none may be longer than `longest`; `key` and `threshold` are those of `dropout_key`."""
    keep = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return _operator(q, k, v, for_operator(mask), table, key, block_size, pool, causal, keep, threshold, longest)


def _forward(q, k, v, mask, table, key, block_size, pool, causal, keep, threshold, longest):
    """`keep` stores the block statistics for the backward."""
    from .forward import attend, summarise

    check(q, k, v)
    if pool not in POOLS:
        raise ValueError(f"the kernel supports the pools {', '.join(POOLS)}, got {pool!r}; use backend='torch'")
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    q, k, v = (rows_contiguous(x) for x in (q, k, v))
    B, H, L, D = q.shape
    rows, n = _blocks(q, table, block_size)
    BH = rows * H
    out, block = outputs = _outputs(q, table, block_size, keep)
    lse, kbar, vbar, local, stats = _kept(q, table, block_size, keep).split(block)
    packed, table = table is not None, q if table is None else table
    width = block_width(D)
    scale = math.log2(math.e) / math.sqrt(D)
    has_mask = mask is not None
    flags = as_flags(mask) if has_mask else q
    if n > 1:
        short = " short blocks" * (block_size <= 128 and D <= 64 and q.element_size() == 2)
        t = tiles(("summarise and keep" if keep else "summarise") + short, block_size, q)
        launch(
            summarise, (n * BH,),
            q, k, v, flags, table, kbar, vbar, local, stats, *strides(q), *strides(k), *strides(v), BH, H, L, n, scale,
            m=block_size, D=D, BLOCK_D=width, ROWS=t.queries, POOL=pool, HAS_MASK=has_mask, KEEP=keep,
            STAGES=t.stages, GROUP=H // k.shape[1], PACKED=packed, **t.launch(),
        )  # fmt: skip
    t = tiles("attend", block_size, q)
    launch(
        attend, (n * ceil_div(block_size, t.queries) * BH,),
        q, k, v, flags, table, kbar, vbar, local, q if key is None else key, out, lse,
        *strides(q), *strides(k), *strides(v), *strides(out),
        BH, H, L, n, threshold, scale, m=block_size, D=D, BLOCK_D=width, BQ=t.queries, BK=t.keys, SPANS=n > 1,
        CAUSAL=causal, HAS_MASK=has_mask, PRECISION=precision(q), DROPOUT=key is not None,
        GROUP=H // k.shape[1], PACKED=packed, **t.launch(),
    )  # fmt: skip
    return outputs


def _outputs(q: Tensor, table: Tensor | None, block_size: int, keep: bool) -> tuple[Tensor, Tensor]:
    return empty_rows(q), _kept(q, table, block_size, keep).empty(q)


def _blocks(q: Tensor, table: Tensor | None, block_size: int) -> tuple[int, int]:
    """Rows and blocks per row. The blocks of packed documents count as one row."""
    return (q.shape[0], ceil_div(q.shape[2], block_size)) if table is None else (1, table.shape[0])


def _kept(q: Tensor, table: Tensor | None, block_size: int, keep: bool) -> Block:
    """The log2 normalisers of out, and for each block the summary key and value, local log2 normaliser, statistics."""
    B, H, L, D = q.shape
    rows, n = _blocks(q, table, block_size)
    return Block(
        (
            ((B, H, L), torch.float32),
            ((rows, H, n, D), q.dtype),
            ((rows, H, n, D), q.dtype),
            ((rows, H, n), torch.float32),
            ((rows, H, n if keep else 0, 4, D), torch.float32),
        )
    )


def _backward(dout, q, k, v, mask, table, key, out, block, block_size, pool, causal, keep, threshold, longest):
    from ....kernels.rows import row_products
    from .backward import collect, key_gradients, query_gradients, span_gradients

    if not keep:
        raise RuntimeError("weft::combiner_fixed was called with keep=False; the backward requires keep=True")
    lse, kbar, vbar, local, stats = _kept(q, table, block_size, keep).split(block)
    dq, (dk, by_head_k), (dv, by_head_v) = empty_rows(q), gradients(k, q), gradients(v, q)
    dout, q, k, v = (rows_contiguous(x) for x in (dout, q, k, v))
    B, H, L, D = q.shape
    rows, n = _blocks(q, table, block_size)
    BH, width, group = rows * H, block_width(D), H // k.shape[1]
    packed, table = table is not None, q if table is None else table
    logit_scale = 1 / math.sqrt(D)
    scale = math.log2(math.e) * logit_scale
    has_mask = mask is not None
    flags = as_flags(mask) if has_mask else q
    shape = {"m": block_size, "D": D, "BLOCK_D": width, "CAUSAL": causal}
    options = {**shape, "HAS_MASK": has_mask, "PRECISION": precision(q), "DROPOUT": key is not None}
    key = q if key is None else key
    delta = torch.empty_like(lse)
    by_keys, by_queries = tiles("key gradients", block_size, q), tiles("query gradients", block_size, q)
    key_tiles = ceil_div(block_size, by_keys.keys)
    dkbar = dvbar = mean_dalpha = weighted = lse  # not read if there is only one block
    if n > 1:
        spans = min(n, ceil_div(longest, block_size)) if packed else n  # of a sequence
        chunk, chunks = packed_chunks(longest, block_size) if packed else query_chunks(L)
        part_k = q.new_empty(BH, chunks, n, D, dtype=torch.float32)
        part_v = torch.empty_like(part_k)
        t = tiles("span gradients", spans, q)
        span_tiles = ceil_div(spans, t.keys)
        launch(
            span_gradients, (span_tiles * (n if packed else chunks) * BH,),
            q, out, dout, table, kbar, vbar, local, lse, key, delta, part_k, part_v,
            *strides(q), *strides(out), *strides(dout),
            BH, H, L, n, span_tiles, chunk, chunks, threshold, scale, logit_scale,
            BQ=t.queries, BS=t.keys, **options, PACKED=packed, **t.launch(),
        )  # fmt: skip
        dkbar, dvbar = part_k.new_empty(BH, n, D), part_k.new_empty(BH, n, D)
        mean_dalpha = part_k.new_empty(BH, n)
        weighted = part_k.new_empty(BH, n, key_tiles, D)
        launch(
            collect, (n * BH,),
            part_k, part_v, table, vbar, stats, dkbar, dvbar, mean_dalpha, BH, n, chunk, chunks,
            CHUNKS=next_power_of_two(chunks), **shape, PACKED=packed, num_warps=2 if width <= 64 else 4,
        )  # fmt: skip
    else:
        launch(
            row_products, (ceil_div(L, 64) * B * H,),
            out, dout, delta, *strides(out), *strides(dout), B * H, H, L, D=D, BLOCK_D=width, ROWS=64, num_warps=4
        )  # fmt: skip
    t = by_keys
    launch(
        key_gradients, (n * key_tiles * BH,),
        q, k, v, flags, table, dout, stats, kbar, local, lse, delta, key, dkbar, dvbar, mean_dalpha, weighted,
        by_head_k, by_head_v,
        *strides(q), *strides(k), *strides(v), *strides(dout), *strides(by_head_k), *strides(by_head_v),
        BH, H, L, n, threshold, scale, logit_scale, BQ=t.queries, BK=t.keys, SPANS=n > 1, POOL=pool, GROUP=group,
        PACKED=packed,
        **options, **t.launch(),
    )  # fmt: skip
    t = by_queries
    launch(
        query_gradients, (n * ceil_div(block_size, t.queries) * BH,),
        q, k, v, flags, table, dout, stats, kbar, vbar, local, lse, delta, key, mean_dalpha, weighted, dq,
        *strides(q), *strides(k), *strides(v), *strides(dout), *strides(dq),
        BH, H, L, n, threshold, scale, logit_scale, BQ=t.queries, BK=t.keys, PARTS=key_tiles,
        PART_ROWS=next_power_of_two(key_tiles), SPANS=n > 1, POOL=pool, GROUP=group, PACKED=packed,
        **options, **t.launch(),
    )  # fmt: skip
    sum_to_groups(by_head_k, dk)
    sum_to_groups(by_head_v, dv)
    return dq, dk, dv


_operator = Operator(
    "combiner_fixed",
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? table, Tensor? key, int block_size, str pool, bool causal,"
    " bool keep, int threshold, int longest",
    _forward,
    lambda q, k, v, mask, table, key, block_size, pool, causal, keep, *rest: _outputs(q, table, block_size, keep),
    _backward,
    outputs=2,
)


def tiles(kernel: str, most: int, q: Tensor) -> Tiles:
    """Entry of the table, limited to `most`: the number of tokens in a block, or of summaries if query tiles cross
    blocks. A tile has at least 16 rows, the minimum of a matrix unit."""
    t = tiles_for(TILES, kernel, q.shape[3], q.element_size())
    most = max(16, next_power_of_two(most))
    queries = t.queries if kernel == "span gradients" else min(t.queries, most)
    return replace(t, queries=queries, keys=min(t.keys, most))


def query_chunks(L: int) -> tuple[int, int]:
    """Length and number (up to 32) of the query chunks whose gradients are summed separately. They depend only on L, so
    the gradient of a sequence does not depend on the rest of the batch."""
    chunk = max(1024, ceil_div(ceil_div(L, 32), 128) * 128)
    return chunk, ceil_div(L, chunk)


def packed_chunks(longest: int, block_size: int) -> tuple[int, int]:
    """The same for packed documents, in whole blocks."""
    blocks = ceil_div(max(256, ceil_div(longest, 32)), block_size)
    return blocks * block_size, ceil_div(longest, blocks * block_size)
