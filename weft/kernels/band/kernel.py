"""Fused kernels for attention to near keys and a few far keys: `local`, `longformer`, and `sparse` with
pattern="fixed".

    out_i = Σ_j softmax_j(q_i · k_j / √D) v_j          over near(i) ∪ extras(i), j ≤ i if causal

    local         near: the block of m tokens                   no extras
    longformer    near: i − left ≤ j ≤ i + right                extras "first": the first C tokens, which see everything
    sparse        near: the block of m tokens                   extras "columns": C places of every other block

The plain versions in `weft/attention/` are the reference, and these kernels must equal them. They read the tokens in
place, without copies of overlapping windows and without a mask of pairs. Blocks that fit into one tile have a separate
backward, `short_blocks.py`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...core.blocks import ceil_div
from ...core.dispatch import DTYPES, LARGEST_HEAD
from ...core.precision import autocast
from ...core.tiles import (
    Tiles,
    block_width,
    empty_rows,
    flags_or,
    for_operator,
    near_rows,
    precision,
    strides,
    tile_table,
    tiles_for,
)
from ..grouped import fits, gradients, sum_to_groups
from ..launch import launch
from ..operator import Operator

EXTRAS = ("none", "first", "columns")
PIECE = 64  # tokens; at least a tile of every kernel
LEAST_LENGTH = 256  # the shortest length measured; the kernels are faster from here on: docs/kernels.md

TILES = tile_table(
    {
        "attend": ((64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1)),
        "query gradients": ((64, 32, 4, 3), (64, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 1)),
        "key gradients": ((32, 64, 4, 3, 128), (32, 64, 4, 2), (32, 32, 4, 1), (32, 32, 4, 1)),
        "extra gradients": ((32, 64, 4, 3), (32, 64, 4, 2), (32, 32, 4, 1), (32, 32, 4, 1)),
        # blocks up to these sizes are one tile
        "block gradients": ((64, 64, 4, 1), (64, 64, 8, 1), (32, 32, 4, 1), (16, 16, 4, 1)),
    }
)


def blocks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, block_size: int, causal: bool,
    table: Tensor | None = None, key: Tensor | None = None, threshold: int = 0,
) -> Tensor:  # fmt: skip
    """`local`. Packed documents need the `table` of their blocks."""
    right = 0 if causal else block_size
    return _band(q, k, v, mask, table, key, block_size, block_size, right, causal, "none", 0, False, threshold)


def window(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, left: int, right: int, first: int, causal: bool,
    table: Tensor | None = None, key: Tensor | None = None, threshold: int = 0,
) -> Tensor:  # fmt: skip
    """`longformer`: the sequence is one block. Packed documents need the `table` of their pieces of PIECE tokens."""
    extras = "first" if first else "none"
    return _band(q, k, v, mask, table, key, 0, left, right, causal, extras, first, False, threshold)


def block_and_columns(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, block_size: int, columns: list[int], causal: bool,
    key: Tensor | None = None, threshold: int = 0,
) -> Tensor:  # fmt: skip
    """`sparse`, fixed; `columns` from `fixed_columns`: the last offsets of a block, and optionally the first."""
    leading = len(columns) < block_size and columns[:1] == [0]
    extras = "columns" if columns else "none"
    right = 0 if causal else block_size
    options = block_size, block_size, right, causal, extras, len(columns), leading, threshold
    return _band(q, k, v, mask, None, key, *options)


def _band(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *given: Any) -> Tensor:
    q, k, v = autocast(q, k, v)
    return _operator(q, k, v, for_operator(mask), *given)


def attend_near(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, block_size: int, left: int, right: int, causal: bool,
    extras: str = "none", count: int = 0, leading: bool = False, threshold: int = 0, table: Tensor | None = None,
    key: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and its log2 normalisers, -inf for queries without keys."""
    from .forward import attend

    out, lse = empty_outputs(q)
    q, k, v = (near_rows(x) for x in (q, k, v))
    B, H, L, D = q.shape
    m, n, left, right, extras, count = _sizes(L, block_size, left, right, extras, count, table)
    BH = B * H if table is None else H
    t = tiles("attend", m, q)
    launch(
        attend, (n * ceil_div(m, t.queries) * BH,),
        q, k, v, flags_or(mask, q), q if table is None else table, q if key is None else key, out, lse,
        *strides(q), *strides(k), *strides(v), *strides(out),
        BH, H, L, m, n, left, right, threshold, math.log2(math.e) / math.sqrt(D),
        BQ=t.queries, BK=t.keys, **_options(q, k, mask, key, causal, extras, count, leading),
        PACKED=_packed(table, block_size), **t.launch(),
    )  # fmt: skip
    return out, lse


def empty_outputs(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """out and its normalisers, for any operator with these arguments."""
    return empty_rows(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def near_gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor, dk: Tensor,
    dv: Tensor, block_size: int, left: int, right: int, causal: bool, extras: str = "none", count: int = 0,
    leading: bool = False, threshold: int = 0, table: Tensor | None = None, key: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Write dk and dv, which have the heads of q, and return dq and delta. Short blocks do not need delta and return
    lse instead."""
    from .backward import extra_gradients, key_gradients, query_gradients
    from .short_blocks import block_gradients

    dq = empty_rows(q)
    dout, q, k, v, out = (near_rows(x) for x in (dout, q, k, v, out))
    B, H, L, D = q.shape
    BH = B * H if table is None else H
    m, n, left, right, extras, count = _sizes(L, block_size, left, right, extras, count, table)
    packed, table = _packed(table, block_size), q if table is None else table
    flags, options = flags_or(mask, q), _options(q, k, mask, key, causal, extras, count, leading)
    key = q if key is None else key
    logit_scale = 1 / math.sqrt(D)
    scale = math.log2(math.e) * logit_scale
    given = (*strides(q), *strides(k), *strides(v), *strides(dout))
    t = tiles("block gradients", m, q)
    if block_size and extras == "none" and m <= t.queries:
        shape = {key: options[key] for key in ("D", "BLOCK_D", "CAUSAL", "HAS_MASK", "PRECISION", "DROPOUT", "GROUP")}
        launch(
            block_gradients, (n * BH,),
            q, k, v, flags, table, key, out, dout, lse, dq, dk, dv,
            *given, *strides(out), *strides(dq), *strides(dk), *strides(dv),
            BH, H, L, m, threshold, scale, logit_scale, ROWS=t.queries, **shape, PACKED=packed != "", **t.launch(),
        )  # fmt: skip
        return dq, lse
    delta = torch.empty_like(lse)
    t = tiles("query gradients", m, q)
    launch(
        query_gradients, (n * ceil_div(m, t.queries) * BH,),
        q, k, v, flags, table, key, out, dout, lse, delta, dq, *given, *strides(out), *strides(dq),
        BH, H, L, m, n, left, right, threshold, scale, logit_scale,
        BQ=t.queries, BK=t.keys, **options, PACKED=packed, **t.launch(),
    )  # fmt: skip
    extra_k = extra_v = lse  # not read if there are no extras
    total, chunks = n * count if extras == "columns" else count, 1
    if extras != "none":
        t = tiles("extra gradients", L, q)
        extra_tiles = ceil_div(total, t.keys)
        chunk, chunks = query_chunks(L, extra_tiles)
        extra_k = q.new_empty(B, H, chunks, total, D, dtype=torch.float32)
        extra_v = torch.empty_like(extra_k)
        launch(
            extra_gradients, (extra_tiles * chunks * BH,),
            q, k, v, flags, key, dout, lse, delta, extra_k, extra_v, *given,
            BH, H, L, m, total, chunk, threshold, scale, BQ=t.queries, BK=t.keys, **options, **t.launch(),
        )  # fmt: skip
    t = tiles("key gradients", m, q)
    launch(
        key_gradients, (n * ceil_div(m, t.keys) * BH,),
        q, k, v, flags, table, key, dout, lse, delta, extra_k, extra_v, dk, dv, *given, *strides(dk), *strides(dv),
        BH, H, L, m, left, right, total, chunks, threshold, scale, logit_scale,
        BQ=t.queries, BK=t.keys, **options, PACKED=packed, **t.launch(),
    )  # fmt: skip
    return dq, delta


def _forward(q, k, v, mask, table, key, block_size, left, right, causal, extras, count, leading, threshold):
    """block_size 0: the whole sequence; count: the first tokens, or the columns of a block."""
    check(q, k, v)
    if extras not in EXTRAS:
        raise ValueError(f"extras must be one of {', '.join(EXTRAS)}, got {extras!r}")
    options = block_size, left, right, causal, extras, count, leading, threshold
    return attend_near(q, k, v, mask, *options, table, key)


def _backward(dout, q, k, v, mask, table, key, out, lse, *options):
    given: Any = (*options, table, key)
    (dk, by_head_k), (dv, by_head_v) = gradients(k, q), gradients(v, q)
    dq, _ = near_gradients(dout, q, k, v, mask, out, lse, by_head_k, by_head_v, *given)
    sum_to_groups(by_head_k, dk)
    sum_to_groups(by_head_v, dv)
    return dq, dk, dv


_operator = Operator(
    "band",
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? table, Tensor? key, int block_size, int left, int right,"
    " bool causal, str extras, int count, bool leading, int threshold",
    _forward,
    empty_outputs,
    _backward,
    outputs=2,
)


def _packed(table: Tensor | None, block_size: int) -> str:
    """What the table lists, for the kernels."""
    return "" if table is None else "blocks" if block_size else "documents"


def _sizes(
    L: int, block_size: int, left: int, right: int, extras: str, count: int, table: Tensor | None
) -> tuple[int, int, int, int, str, int]:
    """Tokens per block, number of blocks, the window, and the actual extras: a single block has no columns of other
    blocks. Windows end at L: the kernels add positions to them, in 32 bits."""
    left, right = min(left, L), min(right, L)
    if table is not None:
        return block_size or PIECE, table.shape[0], left, right, "none", 0
    m = min(block_size or L, L)
    n = ceil_div(L, m)
    if extras == "columns" and n == 1:
        return m, n, left, right, "none", 0
    return m, n, left, right, extras, min(count, L)


def _options(
    q: Tensor, k: Tensor, mask: Tensor | None, key: Tensor | None, causal: bool, extras: str, count: int, leading: bool
) -> dict[str, Any]:
    D = q.shape[3]
    return {
        "D": D,
        "BLOCK_D": block_width(D),
        "C": count,
        "EXTRAS": extras,
        "LEADING": leading and extras != "none",
        "CAUSAL": causal,
        "HAS_MASK": mask is not None,
        "PRECISION": precision(q),
        "DROPOUT": key is not None,
        "GROUP": q.shape[1] // k.shape[1],
    }


def check(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dim() != 4 or not fits(k, q) or v.shape != k.shape:
        raise ValueError(
            f"the kernel needs q, k and v of the same shape (B, H, L, D), got {tuple(q.shape)}, {tuple(k.shape)} "
            f"and {tuple(v.shape)}; use backend='torch'"
        )
    if q.shape[3] > LARGEST_HEAD or q.dtype not in DTYPES:
        raise ValueError(
            f"the kernel supports float32, float16 and bfloat16 with head_dim up to {LARGEST_HEAD}, got {q.dtype} and "
            f"{q.shape[3]}; use backend='torch'"
        )


def tiles(kernel: str, most: int, q: Tensor) -> Tiles:
    return tiles_for(TILES, kernel, q.shape[3], q.element_size(), most)


def query_chunks(L: int, extra_tiles: int) -> tuple[int, int]:
    """Length and number of the query chunks whose gradients for the extras are summed separately: about 32 programs
    per head. They depend only on L and the pattern, so a gradient does not depend on the rest of the batch."""
    wanted = max(1, 32 // extra_tiles)
    chunk = max(512, ceil_div(ceil_div(L, wanted), 64) * 64)
    return chunk, ceil_div(L, chunk)
