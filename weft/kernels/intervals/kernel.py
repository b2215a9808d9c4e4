"""Fused kernels for attention within runs of a sequence sorted by group: `routing` and `reformer`.

    out_i = Σ_orders Σ_{j ∈ run(i)} e^{q_i·k_j/√D} v_j / Z_i          Z_i over all orders

Every order (one; for Reformer, one per round of hashing) sorts the tokens by group and cuts each group into runs of
`size`. A token attends to its run and, with `back`, to the run before it in its group; `others`: to itself only if it
has no other key. The kernels read and write the tokens in place, through the sorted order, so no tensor is copied and
no run is padded. The plain versions in `weft/attention/` are the reference. Triton is imported only when a kernel runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...core.blocks import ceil_div
from ...core.precision import autocast
from ...core.tiles import (
    Tiles,
    block_width,
    empty_rows,
    flags_or,
    for_operator,
    near_rows,
    next_power_of_two,
    precision,
    strides,
    tile_table,
    tiles_for,
)
from ..band.kernel import check, empty_outputs
from ..grouped import empty_by_head, sum_to_groups
from ..launch import launch
from ..lines.kernel import scales
from ..operator import Operator

TILES = tile_table(
    {
        "attend": ((64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1)),
        "query gradients": ((64, 32, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 1)),
        "key gradients": ((32, 64, 4, 3, 168), (32, 64, 4, 2), (32, 32, 4, 1), (32, 32, 4, 1)),
    }
)
Tables = tuple[Tensor, Tensor, Tensor]  # token, group and start, of `order_tables`
MOST_GROUPS = 256  # `sort_by_group` compares each token with every group
TILE = 256  # tokens


@dataclass(frozen=True)
class Orders:
    """Tokens sorted by group, R times. The group `groups` is for masked tokens, which attend to nothing."""

    tables: Tensor  # int32, of `order_tables`
    groups: int

    @classmethod
    def of(cls, group: Tensor, groups: int) -> Orders:
        """`group` is (R, B, H, L) with values in [0, groups]. The sort is stable: a group is in order of position."""
        ordered, token = torch.sort(group, dim=-1, stable=True)
        edges = torch.arange(groups + 1, dtype=group.dtype, device=group.device)
        start = torch.searchsorted(ordered, edges.expand(*group.shape[:-1], -1).contiguous(), out_int32=True)
        return cls(torch.cat([x.flatten().to(torch.int32) for x in (token, ordered, start)]), groups)


def order_tables(tables: Tensor, sizes: Sequence[int], groups: int) -> Tables:
    """The token in each slot and its group, (R, B, H, L), and the first slot of each group, (R, B, H, groups + 1)."""
    B, H, L = sizes
    R = tables.numel() // (B * H * (2 * L + groups + 1))
    token, group, start = tables.split([R * B * H * n for n in (L, L, groups + 1)])
    return token.view(R, B, H, L), group.view(R, B, H, L), start.view(R, B, H, groups + 1)


def empty_tables(x: Tensor, R: int, H: int, groups: int) -> Tensor:
    """Memory for the tables of R orders of H heads of x (B, heads, L, D)."""
    return x.new_empty(R * x.shape[0] * H * (2 * x.shape[2] + groups + 1), dtype=torch.int32)


def sort_by_group(group: Tensor, tables: Tensor, groups: int) -> None:
    """Write the tables of a stable sort of group (R, B, H, L), by counting."""
    from .sort import count_groups, first_slots, place_tokens

    R, B, H, L = group.shape
    token, ordered, start = order_tables(tables, (B, H, L), groups)
    tiles, chunk, n = ceil_div(L, TILE), min(32, next_power_of_two(groups + 1)), R * B * H
    counts = start.new_empty(n, tiles, groups + 1)
    sizes = {"TILE": TILE, "CHUNK": chunk}
    launch(count_groups, (n, tiles), group, counts, L, tiles, groups, **sizes, num_warps=4)
    launch(first_slots, (n,), counts, start, tiles, groups, TILES=32, CHUNK=chunk, num_warps=4)
    launch(place_tokens, (n, tiles), group, counts, token, ordered, L, tiles, groups, **sizes, num_warps=4)


def group_dtype(groups: int) -> torch.dtype:
    """The narrowest is the fastest to sort."""
    return torch.int16 if groups < 2**15 else torch.int32


def nearest(
    x: Tensor, directions: Tensor, mask: Tensor | None, *, groups: int, signed: bool = False
) -> tuple[Tensor, Tensor]:
    """x (B, H, L, D), or with fewer heads, directions (R, H, C, D) -> (R, B, H, L): the direction with the largest
    product, `groups` if masked. `signed`: of [directions; -directions]; then also 1 / |x|, (B, H, L)."""
    (x,) = autocast(x)
    return _nearest(x.detach(), directions.detach(), for_operator(mask), groups, signed)


def _assign(x, directions, mask, groups, signed):
    group, inv = _groups(x, directions, mask, groups, signed)
    x = near_rows(x)
    assign_groups(x, directions, flags_or(mask, x), mask is not None, group, inv, groups, signed)
    return group, inv


def assign_groups(
    x: Tensor, directions: Tensor, flags: Tensor, has_mask: bool, group: Tensor, inv: Tensor, groups: int, signed: bool
) -> None:
    """Write group, and inv if `signed`."""
    from .assign import nearest

    B, _, L, D = x.shape
    R, H, C, _ = directions.shape
    launch(
        nearest, (ceil_div(L, 64) * B * H, R), x, flags, directions, group, inv, *strides(x), *directions.stride(),
        B * H, H, L, C, groups, D=D, BLOCK_D=block_width(D), ROWS=64, BC=min(64, max(16, next_power_of_two(C))),
        SIGNED=signed, HAS_MASK=has_mask, HEADS=H // x.shape[1], num_warps=4, num_stages=2,
    )  # fmt: skip


def _groups(x: Tensor, directions: Tensor, mask: Tensor | None, groups: int, signed: bool) -> tuple[Tensor, Tensor]:
    (B, _, L, _), (R, H, *_) = x.shape, directions.shape
    group = x.new_empty(R, B, H, L, dtype=group_dtype(groups))
    return group, x.new_empty(B, H, L if signed else 0, dtype=torch.float32)


_nearest = Operator(
    "nearest",
    "Tensor x, Tensor directions, Tensor? mask, int groups, bool signed",
    _assign,
    _groups,
    lambda *arguments: (),  # a group has no gradient
    outputs=2,
    returned=2,
    differentiable=(),
    gradients=(),
)


def group_sums(x: Tensor, orders: Orders, heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x (B, H, L, D) -> for each head and group of the first order, the sum of x / |x| over the batch, (H, groups, D),
    and the number of tokens, (H, groups)."""
    (x,) = autocast(x)
    return _group_sums(x.detach(), orders.tables, heads, orders.groups, str(dtype).removeprefix("torch."))


def _sum_groups(x, tables, H, groups, dtype):
    total, count = _sums(x, tables, H, groups, dtype)
    sum_groups(near_rows(x), tables, H, groups, total, count, 32)
    return total, count


def sum_groups(x: Tensor, tables: Tensor, H: int, groups: int, total: Tensor, count: Tensor, rows: int) -> None:
    from .assign import group_sums

    B, _, L, D = x.shape
    token, _, start = order_tables(tables, (B, H, L), groups)
    launch(
        group_sums, (groups * H,), x, token, start, total, count, *strides(x), B, H, L, groups,
        D=D, BLOCK_D=block_width(D), ROWS=rows, HEADS=H // x.shape[1], num_warps=4,
    )  # fmt: skip


def _sums(x: Tensor, tables: Tensor, H: int, groups: int, dtype: str) -> tuple[Tensor, Tensor]:
    total = x.new_empty(H, groups, x.shape[3], dtype=getattr(torch, dtype))
    return total, total.new_empty(H, groups)


_group_sums = Operator(
    "group_sums",
    "Tensor x, Tensor tables, int heads, int groups, str dtype",
    _sum_groups,
    _sums,
    lambda *arguments: (),  # no gradient reaches a centroid
    outputs=2,
    returned=2,
    differentiable=(),
    gradients=(),
)


def interval_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    orders: Orders,
    *,
    size: int,
    causal: bool,
    back: bool = False,
    others: bool = False,
    inv: Tensor | None = None,
    key: Tensor | None = None,
    threshold: int = 0,
) -> Tensor:
    """q, k and v (B, H, L, D), dropout from `dropout_key` -> (B, H, L, D). Without k, the keys are the queries times
    `inv` = 1 / |q|, (B, H, L)."""
    q, v = autocast(q, v)
    k = None if k is None else autocast(k)[0]
    return operator(q, k, v, inv, orders.tables, key, orders.groups, size, causal, back, others, threshold)


def _forward(q, k, v, inv, tables, key, groups, size, causal, back, others, threshold):
    out, lse = empty_outputs(q)
    _attend(q, k, v, inv, tables, key, out, lse, groups, size, causal, back, others, threshold)
    return out, lse


def _attend(q, k, v, inv, tables, key, out, lse, groups, size, causal, back, others, threshold):
    check(q, v if k is None else k, v)
    of_call = q, k, v, groups, size, causal, back, others, key, threshold
    q, v = near_rows(q), near_rows(v)
    k, inv = (q, inv) if k is None else (near_rows(k), lse)
    for number, order in enumerate(zip(*order_tables(tables, q.shape[:3], groups), strict=True)):
        attend_runs(q, k, v, inv, order, out, lse, run_settings(*of_call, number), more=number > 0)


def _backward(dout, q, k, v, inv, tables, key, out, lse, groups, size, causal, back, others, threshold):
    dq, dk, dv = _gradients(q, k, v)
    by_head_v = dv if v.shape[1] == q.shape[1] else empty_by_head(v, q)
    by_head_k = dk if k is None or k.shape[1] == q.shape[1] else empty_by_head(k, q)
    delta = torch.empty_like(lse)
    of_call = q, k, v, groups, size, causal, back, others, key, threshold
    dout, q, v, out = (near_rows(x) for x in (dout, q, v, out))
    k, inv, to_keys = (q, inv, dq) if k is None else (near_rows(k), lse, by_head_k)
    for number, order in enumerate(zip(*order_tables(tables, q.shape[:3], groups), strict=True)):
        settings, more = run_settings(*of_call, number), number > 0
        run_query_gradients(q, k, v, inv, order, out, dout, lse, delta, dq, settings, more=more)
        run_key_gradients(q, k, v, inv, order, dout, lse, delta, to_keys, by_head_v, settings, more=more)
    sum_to_groups(by_head_k, dk)
    sum_to_groups(by_head_v, dv)
    return dq, dk, dv


def _gradients(q: Tensor, k: Tensor | None, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_rows(q), q.new_empty(0) if k is None else empty_rows(k), empty_rows(v)


Settings = tuple[dict[str, Any], Tensor, tuple[int, ...]]  # of `run_settings`


def run_settings(
    q: Tensor, k: Tensor | None, v: Tensor, groups: int, size: int, causal: bool, back: bool = False,
    others: bool = False, key: Tensor | None = None, threshold: int = 0, number: int = 0,
) -> Settings:  # fmt: skip
    """Options, the key of the dropout of order `number` or any tensor, and sizes."""
    B, H, L, D = q.shape
    options = {"D": D, "BLOCK_D": block_width(D), "PRECISION": precision(q), "SHARED": k is None}
    options |= {"HEADS": H // v.shape[1], "BACK": back, "CAUSAL": causal, "OTHERS": others}
    options["DROPOUT"] = key is not None
    earlier = 0 if key is None else number * B * H
    return options, q if key is None else key, (H, L, groups, min(size, L), threshold, earlier)


# Launches, for one order. `inv` is read only if keys are normalised queries.


def attend_runs(
    q: Tensor, k: Tensor, v: Tensor, inv: Tensor, tables: Tables, out: Tensor, lse: Tensor, settings: Settings, *,
    more: bool,
) -> None:  # fmt: skip
    """Write out and lse; with `more`, continue from their values."""
    from .forward import attend

    options, key, sizes = settings
    t, programs, tile = _launch("attend", q)
    launch(
        attend, programs,
        q, k, v, inv, *tables, key, out, lse,
        *strides(q), *strides(k), *strides(v), *strides(out), *sizes, scales(q)[0],
        MORE=more, **options, **tile, **t.launch(),
    )  # fmt: skip


def run_query_gradients(
    q: Tensor, k: Tensor, v: Tensor, inv: Tensor, tables: Tables, out: Tensor, dout: Tensor, lse: Tensor, delta: Tensor,
    dq: Tensor, settings: Settings, *, more: bool,
) -> None:  # fmt: skip
    """Write dq and delta; with `more`, add to dq and read delta."""
    from .backward import query_gradients

    options, key, sizes = settings
    t, programs, tile = _launch("query gradients", q)
    launch(
        query_gradients, programs,
        q, k, v, inv, *tables, key, out, dout, lse, delta, dq,
        *strides(q), *strides(k), *strides(v), *strides(out), *strides(dout), *strides(dq), *sizes, *scales(q),
        MORE=more, **options, **tile, **t.launch(),
    )  # fmt: skip


def run_key_gradients(
    q: Tensor, k: Tensor, v: Tensor, inv: Tensor, tables: Tables, dout: Tensor, lse: Tensor, delta: Tensor, dk: Tensor,
    dv: Tensor, settings: Settings, *, more: bool,
) -> None:  # fmt: skip
    """Write dk and dv; with `more`, add to them."""
    from .backward import key_gradients

    options, key, sizes = settings
    t, programs, tile = _launch("key gradients", q)
    launch(
        key_gradients, programs,
        q, k, v, inv, *tables, key, dout, lse, delta, dk, dv,
        *strides(q), *strides(k), *strides(v), *strides(dout), *strides(dk), *strides(dv), *sizes, *scales(q),
        MORE=more, **options, **tile, **t.launch(),
    )  # fmt: skip


def _launch(kernel: str, q: Tensor) -> tuple[Tiles, tuple[int], dict[str, int]]:
    """Tiles and number of programs of a kernel."""
    B, H, L, D = q.shape
    t = tiles_for(TILES, kernel, D, q.element_size())
    rows = t.keys if kernel == "key gradients" else t.queries
    return t, (ceil_div(L, rows) * B * H,), {"BQ": t.queries, "BK": t.keys}


operator = Operator(
    "interval_attention",
    "Tensor q, Tensor? k, Tensor v, Tensor? inv, Tensor tables, Tensor? key, int groups, int size, bool causal,"
    " bool back, bool others, int threshold",
    _forward,
    empty_outputs,
    _backward,
    outputs=2,
    fake_backward=_gradients,
)


def hashed_attention(
    q: Tensor, v: Tensor, rotations: Tensor, mask: Tensor | None, *, buckets: int, size: int, causal: bool,
    key: Tensor | None = None, threshold: int = 0,
) -> Tensor:  # fmt: skip
    """Reformer: `nearest` to rotations (R, H, D, buckets / 2), the sort and `interval_attention` as one operator."""
    q, v = autocast(q, v)
    return _hashed(q, v, rotations, for_operator(mask), key, buckets, size, causal, threshold)


def _hash_forward(q, v, rotations, mask, key, buckets, size, causal, threshold):
    out, lse, inv, tables = _hash_outputs(q, v, rotations, mask, key, buckets, size, causal, threshold)
    group, x = q.new_empty(rotations.shape[0], *q.shape[:3], dtype=group_dtype(buckets)), near_rows(q)
    assign_groups(x, rotations.mT, flags_or(mask, q), mask is not None, group, inv, buckets, True)
    sort_by_group(group, tables, buckets)
    _attend(q, None, v, inv, tables, key, out, lse, buckets, size, causal, True, True, threshold)
    return out, lse, inv, tables


def _hash_outputs(q, v, rotations, mask, key, buckets, size, causal, threshold):
    out, lse = empty_outputs(q)
    return out, lse, torch.empty_like(lse), empty_tables(q, rotations.shape[0], q.shape[1], buckets)


def _hash_backward(dout, q, v, rotations, mask, key, out, lse, inv, tables, buckets, size, causal, threshold):
    dq, _, dv = _backward(dout, q, None, v, inv, tables, key, out, lse, buckets, size, causal, True, True, threshold)
    return dq, dv


_hashed = Operator(
    "hashed_attention",
    "Tensor q, Tensor v, Tensor rotations, Tensor? mask, Tensor? key, int buckets, int size, bool causal,"
    " int threshold",
    _hash_forward,
    _hash_outputs,
    _hash_backward,
    outputs=4,
    gradients=(0, 1),
)
