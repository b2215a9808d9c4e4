"""One token of decoding in one launch: `slots_step` (slots.py) and `sums_step` (sums.py).

Both change the buffers of a state in place, have no gradients, and read the position from a tensor. Triton is imported
only when a kernel runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...core.state import KeyValues
from ...core.tiles import as_flags, block_width, next_power_of_two, precision, rows_contiguous
from ..launch import launch
from ..operator import Bound, InPlace

TILE = 16384  # elements of a tile, processed by WARPS
WARPS = 8
MOST_SLOTS = 4096  # one program per head reads them all; from here on, plain attention splits them over more programs
MOST_FEATURES = 4096

Step = Callable[[Tensor, Tensor, Tensor, Tensor | None, int | Tensor], Tensor]  # q, k, v (B, H, 1, D), mask (B,), i


def slots_step(
    tokens: KeyValues,
    form: str,
    m: int,
    *,
    ahead: int = 0,
    far: KeyValues | None = None,
    queries: Tensor | None = None,
    key_features: Tensor | None = None,
    count: Tensor | None = None,
    pool: str = "",
) -> Step | None:
    """The step of a state with these tensors, those of `token_to_slots`. None if there is no kernel for it."""
    slots = tokens.slots if far is None else max(tokens.slots, far.k.shape[-2])
    summaries = (None, None, None) if far is None else (far.k, far.v, far.valid)
    buffers = tokens.k, tokens.v, tokens.valid, *summaries, queries, key_features, count
    if slots > MOST_SLOTS or not in_order(*buffers):
        return None
    return Bound(_slots, buffers, (form, m, ahead, pool), position)


def sums_step(
    memory: Tensor,
    features: str,
    epsilon: float = 0.0,
    *,
    top: Tensor | None = None,
    plain: Tensor | None = None,
    projection: Tensor | None = None,
) -> Step | None:
    """The step of a state with these tensors, those of `token_to_sums`. None if there is no kernel for it."""
    if memory.shape[2] > MOST_FEATURES or not in_order(memory, top, plain, projection):
        return None
    return Bound(_sums, (memory, top, plain, projection), (features, epsilon))


def in_order(*buffers: Tensor | None) -> bool:
    return all(x is None or x.is_contiguous() for x in buffers)


_counted: dict[torch.device, Tensor] = {}  # 0, 0, 1, 1, 2, 2, ...


def position(i: int | Tensor, device: torch.device) -> tuple[Tensor, int]:
    """A tensor with the position, and where in it. A known position is read from a table, which needs no copy and no
    launch. Its entries are 16 bytes apart, because Triton compiles kernels for aligned pointers separately."""
    if isinstance(i, Tensor):
        return i, 0
    table = _counted.get(device)
    if table is None or len(table) <= 2 * i:
        count = max(65536, next_power_of_two(i + 1))
        table = _counted[device] = torch.arange(2 * count, device=device) // 2
    return table, 2 * i


def _run_slots(
    q, k, v, mask, place, keys, values, valid, far_keys, far_values, far_valid, queries, key_features, count,
    form, m, ahead, pool,
):  # fmt: skip
    from .slots import token_to_slots

    B, H, _, D = q.shape
    q, k, v = (rows_contiguous(x) for x in (q, k, v))
    out = _like(q)
    far = 0 if far_keys is None else far_keys.shape[-2]
    flags = [as_flags(x) if x is not None else out for x in (valid, far_valid)]
    others = [out if x is None else x for x in (far_keys, far_values, queries, key_features, count)]
    width = block_width(D)
    options: dict[str, Any] = {"FORM": form, "POOL": pool, "HAS_MASK": mask is not None, "D": D}
    options |= {"BLOCK_D": width, "SLOTS": min(TILE // width, max(16, next_power_of_two(max(keys.shape[2], far))))}
    options |= {"TILE": max(16, min(64, TILE // 2 // width // keys.element_size())), "PRECISION": precision(keys)}
    launch(
        token_to_slots, (B * H,),
        q, k, v, out if mask is None else as_flags(mask), place,
        keys, values, flags[0], *others[:2], flags[1], *others[2:], out,
        *_strides(q), *_strides(k), *_strides(v),
        H, keys.shape[2], far, m, ahead, math.log2(math.e) / math.sqrt(D), **options,
        num_warps=WARPS, num_stages=1,
    )  # fmt: skip
    return (out,)


def _run_sums(q, k, v, mask, memory, top, plain, projection, features, epsilon):
    from .sums import token_to_sums

    B, H, _, D = q.shape
    q, k, v = (rows_contiguous(x) for x in (q, k, v))
    out, F = _like(q), memory.shape[2]
    others = [out if x is None else x for x in (top, plain, projection)]
    width = block_width(F)
    warps = WARPS if width < 256 else 2 * WARPS
    options: dict[str, Any] = {"FEATURES": features, "HAS_MASK": mask is not None, "SHRINK": D**-0.25, "D": D, "F": F}
    options |= {"BLOCK_F": width, "COLUMNS": min(block_width(D), max(4, 1024 * warps // width))}
    launch(
        token_to_sums, (B * H,),
        q, k, v, out if mask is None else as_flags(mask), memory, *others, out,
        *_strides(q), *_strides(k), *_strides(v), H, epsilon, **options,
        num_warps=warps, num_stages=1,
    )  # fmt: skip
    return (out,)


def _strides(x: Tensor) -> tuple[int, int]:
    return x.stride(0), x.stride(1)


def _like(q: Tensor) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


_slots = InPlace(
    "slots_step",
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor place, Tensor(a!) keys, Tensor(b!) values, Tensor(c!) valid,"
    " Tensor(d!)? far_keys, Tensor(e!)? far_values, Tensor(f!)? far_valid, Tensor(g!)? queries,"
    " Tensor(h!)? key_features, Tensor(i!)? count, str form, int m, int ahead, str pool",
    _run_slots,
    lambda q, *rest: _like(q),
)
_sums = InPlace(
    "sums_step",
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor(a!) memory, Tensor(b!)? top, Tensor(c!)? plain,"
    " Tensor? projection, str features, float epsilon",
    _run_sums,
    lambda q, *rest: _like(q),
)
