"""Fused kernels for Linformer: forward and backward as one PyTorch operator.

Every token is read twice: once for the slots, in chunks that are then added in order, and once for its own row. The
probabilities over the slots are computed again in the backward. Triton is imported only when a kernel runs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...core.blocks import ceil_div
from ...core.tiles import block_width, empty_rows, precision, rows_contiguous, strides
from ...kernels.launch import launch
from ...kernels.linear_sum.kernel import chunks, total
from ...kernels.operator import Operator

LARGEST = 8192  # elements of the padded slots of a head, rank times head size; half of it in float32
PROGRAMS = 1024  # about the number of programs for the gradients of keys


def lacks(attn: Any, *qkv: Tensor) -> str:
    rank, most = attn.kernel.shape[1], LARGEST // 2 if qkv and qkv[0].dtype == torch.float32 else LARGEST
    if block_width(rank) * block_width(attn.head_dim) > most:
        return (
            f"the kernel supports rank * head_dim, each rounded up to a power of two, up to {LARGEST} "
            f"({LARGEST // 2} in float32), got {rank} * {attn.head_dim}"
        )
    return ""


def attend_slots(q: Tensor, k: Tensor, v: Tensor, F: Tensor, key: Tensor | None, threshold: int) -> Tensor:
    """q (B, H, Lq, D), k and v (B, H or fewer, Lk, D), F (max_length, rank). Padded keys and values are zero."""
    return _operator(q, k, v, F, key, threshold)


def _forward(q, k, v, F, key, threshold):
    from .forward import attend, slot_sums

    q, k, v, F = (rows_contiguous(x) for x in (q, k, v, F))
    out, slots = _outputs(q, k, F)
    (B, H, L, D), (_, key_H, key_L, _), (chunk, n) = q.shape, k.shape, chunks(k.shape[2])
    parts = slots.new_empty(B * key_H, n, slots.shape[2])
    options = _options(q, F)
    launch(
        slot_sums, (n * B * key_H,),
        k, v, F, parts, *strides(k), *strides(v), F.stride(0), B * key_H, key_H, key_L, n, chunk, **options,
    )  # fmt: skip
    total(parts, None, slots)
    launch(
        attend, (ceil_div(L, options["ROWS"]) * B * H,),
        q, slots, q if key is None else key, out, *strides(q), *strides(out), B * H, H, L, threshold, 1 / math.sqrt(D),
        **options, GROUP=H // key_H, DROPOUT=key is not None,
    )  # fmt: skip
    return out, slots


def _outputs(q: Tensor, k: Tensor, F: Tensor) -> tuple[Tensor, Tensor]:
    """out, and the slots of the keys and values of each head."""
    size = 2 * F.shape[1] * q.shape[3]
    return empty_rows(q), q.new_empty(*k.shape[:2], ceil_div(size, 16) * 16, dtype=torch.float32)


def _backward(dout, q, k, v, F, key, out, slots, threshold):
    from .backward import key_gradients, query_gradients

    dq, dk, dv, dF = (empty_rows(x) for x in (q, k, v, F))
    dout, q, k, v, F = (rows_contiguous(x) for x in (dout, q, k, v, F))
    (B, H, L, D), (_, key_H, key_L, _), (longest, rank) = q.shape, k.shape, F.shape
    chunk, n = chunks(L)
    parts = slots.new_empty(B * H, n, slots.shape[2])
    dslots = torch.empty_like(slots)
    options = _options(q, F)
    launch(
        query_gradients, (n * B * H,),
        q, slots, q if key is None else key, dout, dq, parts, *strides(q), *strides(dout), *strides(dq),
        B * H, H, L, n, chunk, threshold, 1 / math.sqrt(D),
        **options, GROUP=H // key_H, DROPOUT=key is not None,
    )  # fmt: skip
    total(parts, None, dslots, H // key_H)
    tiles = ceil_div(longest, options["ROWS"])
    shares = min(B * key_H, ceil_div(PROGRAMS, tiles))
    dF_parts = slots.new_empty(1, shares, longest * rank)
    launch(
        key_gradients, (tiles * shares,),
        k, v, F, dslots, dk, dv, dF_parts, *strides(k), *strides(v), F.stride(0), *strides(dk), *strides(dv),
        B * key_H, key_H, key_L, shares, longest, **options,
    )  # fmt: skip
    total(dF_parts, None, dF)
    return dq, dk, dv, dF


def _options(q: Tensor, F: Tensor) -> dict[str, Any]:
    D, rank = q.shape[3], F.shape[1]
    half = q.element_size() == 2
    size = block_width(rank) * block_width(D)
    return {
        "R": rank,
        "BLOCK_R": block_width(rank),
        "D": D,
        "BLOCK_D": block_width(D),
        "ROWS": 64 if half and block_width(D) <= 128 else 32,
        "PART": ceil_div(2 * rank * D, 16) * 16,
        "PRECISION": precision(q),
        "num_warps": 4 if size <= 4096 else 8,
        "num_stages": (3 if size <= 4096 else 2) if half else 1,
    }


_operator = Operator(
    "linformer",
    "Tensor q, Tensor k, Tensor v, Tensor F, Tensor? key, int threshold",
    _forward,
    lambda q, k, v, F, *rest: _outputs(q, k, F),
    _backward,
    outputs=2,
    gradients=(0, 1, 2, 3),
)
