"""Fused kernels of `subsampled`: forward and backward as one PyTorch operator.

    out_t = Σ_{s ∈ S_w(t)} softmax_s(q_t · k_s / √D - slope |t - s|) v_s        over the allowed s (real; ≤ t if causal)

and v of the nearest allowed token for a target without an allowed source. The plain version in `gather.py` is the
reference, and these kernels must equal it. Sources are read in place, without a gather.
Triton is imported only when a kernel runs, so this module can be imported anywhere.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ...core.blocks import ceil_div
from ...core.precision import autocast
from ...core.softmax import fused
from ...core.staging import operator, send
from ...core.tiles import (
    Block,
    Tiles,
    block_width,
    empty_rows,
    next_power_of_two,
    precision,
    rows_contiguous,
    strides,
    tile_table,
    tiles_for,
)
from ...kernels.band.kernel import check as check_tensors
from ...kernels.grouped import gradients, sum_to_groups
from ...kernels.launch import launch
from ...kernels.operator import Operator
from .device import sample_windows

LEAST_LENGTH = 1024  # faster than full attention from here on; for shorter sequences don't sample: docs/kernels.md
COLLECTED = 64  # tokens per program of `collect`
LEAST_WINDOW = 2048  # targets per window from which on `whole_windows` is faster: benchmarks/results/gpu_floor.json
MANY = 8192  # sources per window: the targets no longer fit in the cache, so larger key tiles are faster

# Tuned for half precision and head_dim 64.
TILES = tile_table(
    {
        "attend": ((128, 64, 8, 3, 128), (128, 64, 8, 3), (64, 32, 4, 2), (32, 32, 4, 1)),
        "query gradients": ((128, 64, 8, 3, 128), (64, 64, 4, 2), (32, 32, 4, 2), (32, 32, 4, 1)),
        "key gradients": ((32, 64, 4, 3, 128), (32, 64, 4, 2), (32, 32, 4, 1), (32, 32, 4, 1)),
    }
)
TILES["key gradients of many", 64, 2] = Tiles(32, 128, 8, 3, 128)


def subsampled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sources: Tensor,
    *,
    size: int,
    targets: Tensor | None = None,
    causal: bool = False,
    mask: Tensor | None = None,
    nearest: Tensor | None = None,
    alibi: bool = False,
    stand_in: bool = True,
    once: bool = False,
    key: Tensor | None = None,
    threshold: int = 0,
) -> Tensor:
    """`sampled_attention` on q, k, v (B, H, L, D) and sources (W, S). k and v may have fewer heads. Windows are runs of
    `size` tokens, or given by `targets` (W, size). k and v must be zero where `mask` is False.

    `nearest` (B, L), only with a mask: the token to use for targets without an allowed source. stand_in=False asserts
    that there is no such target; once=True asserts that no source appears twice. Dropout is from `dropout_key`.
    """
    q, k, v = autocast(q, k, v)
    if sources.dtype != torch.int32:  # not drawn on the device
        sources = place_indices(sources, q.device, mask is None)  # with a mask, `seen_through` sorts them
    if targets is not None:
        targets = place_indices(targets, q.device, False)
    sources = sources[None]
    if mask is not None:
        assert nearest is not None
        sources, nearest = seen_through(mask, sources), nearest.to(torch.int32)
    options = (size, causal, alibi, stand_in or mask is not None, once, threshold)
    return _operator(q, k, v, sources, targets, nearest, key, *options)


def seen_through(mask: Tensor, sources: Tensor) -> Tensor:
    """(B, W, S): the sources of each sequence, without those masked by its mask (B, L)."""
    L = mask.shape[1]
    real = mask[:, sources[0].clamp(max=L - 1).long()]
    return torch.where(real, sources, L).sort(-1).values


@operator(
    "weft::place_indices",
    "(Tensor indices, Device device, bool ordered) -> Tensor",
    lambda indices, device, ordered: torch.empty(indices.shape, dtype=torch.int32, device=device),
)
def place_indices(indices: Tensor, device: torch.device, ordered: bool) -> Tensor:
    """Copy to the device as int32; `ordered` sorts each row. The copy from the CPU does not block. On the CPU, NumPy
    sorts integers many times faster than PyTorch."""
    if indices.is_cuda:
        indices = indices.to(torch.int32, copy=True)
        return indices.sort(-1).values if ordered else indices
    array = indices.numpy().astype(np.int32)
    return send(torch.from_numpy(np.sort(array) if ordered else array), device)


def _forward(q, k, v, sources, targets, nearest, key, size, causal, alibi, stand_in, once, threshold):
    from .forward import attend, count_before

    check(q, k, v, sources)
    q, k, v = (rows_contiguous(x) for x in (q, k, v))
    B, H, L, D = q.shape
    _, W, S = sources.shape
    out, block = outputs = _outputs(q, sources)
    lse, first = _kept(q, sources).split(block)
    launch(
        count_before, (sources.shape[0] * W, ceil_div(L + 1, 256)),
        sources, first, L, S, STEPS=S.bit_length(), ROWS=256, num_warps=4
    )  # fmt: skip
    t = tiles("attend", size, S, q)
    launch(
        attend, (W * ceil_div(size, t.queries) * B * H,),
        q, k, v, sources, first, sources if targets is None else targets, sources if nearest is None else nearest,
        slopes(H, q.device) if alibi else q, q if key is None else key, out, lse,
        *strides(q), *strides(k), *strides(v), *strides(out),
        B * H, H, L, W, size, S, threshold, math.log2(math.e) / math.sqrt(D), D=D, BLOCK_D=block_width(D), BQ=t.queries,
        BK=t.keys, CAUSAL=causal, HAS_MASK=nearest is not None, ALIBI=alibi, STAND_IN=stand_in,
        GRID=targets is not None, PRECISION=precision(q), GROUP=H // k.shape[1], DROPOUT=key is not None, **t.launch(),
    )  # fmt: skip
    return outputs


def _outputs(q: Tensor, sources: Tensor) -> tuple[Tensor, Tensor]:
    return empty_rows(q), _kept(q, sources).empty(q)


def _kept(q: Tensor, sources: Tensor) -> Block:
    """The log2 normalisers of out, infinite for targets without a sampled source; and the number of sources of each
    window before each position."""
    B, H, L, _ = q.shape
    return Block((((B, H, L), torch.float32), ((*sources.shape[:2], L + 1), torch.int32)))


def _backward(
    dout, q, k, v, sources, targets, nearest, key, out, block, size, causal, alibi, stand_in, once, threshold
):
    from ...kernels.rows import clear
    from .backward import collect, key_gradients, query_gradients

    once = once and not stand_in
    lse, first = _kept(q, sources).split(block)
    dq = empty_rows(q)
    B, H, L, D = q.shape
    _, W, S = sources.shape
    (dk, by_head_k), (dv, by_head_v) = gradients(k, q), gradients(v, q)
    if once and W * S < L:  # the kernels write only the sampled tokens
        for x in (by_head_k, by_head_v):
            launch(clear, (ceil_div(x.numel(), 4096),), x, x.numel(), COLUMNS=4096, num_warps=8)
    dout, q, k, v = (rows_contiguous(x) for x in (dout, q, k, v))
    BH, width = B * H, block_width(D)
    logit_scale = 1 / math.sqrt(D)
    scale = math.log2(math.e) * logit_scale
    table = sources if targets is None else targets
    slope = slopes(H, q.device) if alibi else q
    shape = {"D": D, "BLOCK_D": width, "CAUSAL": causal, "HAS_MASK": nearest is not None, "PRECISION": precision(q)}
    options = {**shape, "ALIBI": alibi, "GRID": targets is not None, "GROUP": H // k.shape[1]}
    options["DROPOUT"], drops = key is not None, q if key is None else key
    delta = torch.empty_like(lse)
    t = tiles("query gradients", size, S, q)
    launch(
        query_gradients, (W * ceil_div(size, t.queries) * BH,),
        q, k, v, sources, first, table, slope, drops, out, dout, lse, delta, dq,
        *strides(q), *strides(k), *strides(v), *strides(out), *strides(dout), *strides(dq),
        BH, H, L, W, size, S, threshold, scale, logit_scale, BQ=t.queries, BK=t.keys, **options, **t.launch(),
    )  # fmt: skip
    # Rounded to the dtype of q like the gradient itself; heads are adjacent because concurrent programs write them.
    part_k, part_v = (by_head_k, by_head_v) if once else q.new_empty(2, B, W * S, H, D).transpose(2, 3).unbind()
    t = tiles("key gradients", size, S, q)
    launch(
        key_gradients, (W * ceil_div(S, t.keys) * BH,),
        q, k, v, sources, first, table, slope, drops, dout, lse, delta, part_k, part_v,
        *strides(q), *strides(k), *strides(v), *strides(dout), *strides(part_k), *strides(part_v),
        BH, H, L, W, size, S, threshold, scale, logit_scale, BQ=t.queries, BK=t.keys, ONCE=once, **options,
        **t.launch(),
    )  # fmt: skip
    if not once:
        n = ceil_div(L, COLLECTED)
        launch(
            collect, (n * BH,),
            part_k, part_v, first, *((first, first) if nearest is None else (nearest, owned(nearest, n))),
            lse, dout, by_head_k, by_head_v, *strides(part_k), *strides(dout), *strides(by_head_k), *strides(by_head_v),
            BH, H, L, W, size, S, n, ROWS=COLLECTED, STAND_IN=stand_in, **shape, num_warps=4,
        )  # fmt: skip
    sum_to_groups(by_head_k, dk)
    sum_to_groups(by_head_v, dv)
    return dq, dk, dv


_operator = Operator(
    "subsampled",
    "Tensor q, Tensor k, Tensor v, Tensor sources, Tensor? targets, Tensor? nearest, Tensor? key, int size,"
    " bool causal, bool alibi, bool stand_in, bool once, int threshold",
    _forward,
    lambda q, k, v, sources, *rest: _outputs(q, sources),
    _backward,
    outputs=2,
)


def drawn(
    q: Tensor, k: Tensor, v: Tensor, seed: Tensor, key: Tensor | None, sample: tuple, alibi: bool, stand_in: bool,
    threshold: int,
) -> tuple:  # fmt: skip
    """The sample of windows that are runs of tokens, with this key `seed` and options of `device.sample_windows`, and
    `subsampled` without a mask, as one operator -> out and sources (W, S)."""
    q, k, v = autocast(q, k, v)
    return _drawn(q, k, v, seed, key, *sample, alibi, stand_in, threshold)


def _draw_forward(q, k, v, seed, key, windows, size, kept, sigma, gaussian, causal, rank, alibi, stand_in, threshold):
    (sources,) = sample_windows((seed,), (windows, size, kept, sigma, gaussian, causal, rank))
    options = size, causal, alibi, stand_in, not causal, threshold
    out, block = _forward(q, k, v, sources[None], None, None, key, *options)
    return out, sources, block


def _draw_outputs(q, k, v, seed, key, windows, size, kept, *options):
    sources = seed.new_empty(windows, kept, dtype=torch.int32)
    out, block = _outputs(q, sources[None])
    return out, sources, block


def _draw_backward(
    dout, q, k, v, seed, key, out, sources, block,
    windows, size, kept, sigma, gaussian, causal, rank, alibi, stand_in, threshold,
):  # fmt: skip
    options = size, causal, alibi, stand_in, not causal, threshold
    return _backward(dout, q, k, v, sources[None], None, None, key, out, block, *options)


_drawn = Operator(
    "drawn_attention",
    "Tensor q, Tensor k, Tensor v, Tensor seed, Tensor? key, int windows, int size, int kept, float? sigma,"
    " bool gaussian, bool causal, int rank, bool alibi, bool stand_in, int threshold",
    _draw_forward,
    _draw_outputs,
    _draw_backward,
    outputs=3,
    returned=2,
)


def whole_windows(q: Tensor, k: Tensor, v: Tensor, sources: Tensor) -> Tensor:
    """`subsampled` if every target attends to all sources of its window, sources (W, S) are each token once, and
    W · S = L: PyTorch's attention on gathered keys and values. cuDNN needs five matrix products for each pair in the
    backward, `subsampled` seven."""
    q, k, v = autocast(q, k, v)
    (B, H, L, D), (W, S) = q.shape, sources.shape
    k, v = _sorted(k, v, sources)
    q, k, v = (x.transpose(1, 2).reshape(B * W, S, H, D).transpose(1, 2) for x in (q, k, v))
    return fused(q, k, v).transpose(1, 2).reshape(B, L, H, D).transpose(1, 2)


def _move(k: Tensor, v: Tensor, row: Tensor, new_k: Tensor, new_v: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    from ...kernels.rows import move_rows

    k, v = rows_contiguous(k), rows_contiguous(v)
    B, H, L, D = k.shape
    launch(
        move_rows, (ceil_div(L, 64) * B * H,), k, v, new_k, new_v, row,
        *strides(k), *strides(v), *strides(new_k), *strides(new_v), B * H, H, L,
        D=D, BLOCK_D=block_width(D), ROWS=64, BACK=back, num_warps=4,
    )  # fmt: skip
    return new_k, new_v


def _empty_sorted(k: Tensor, v: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    B, H, L, D = k.shape
    return k.new_empty(B, L, H, D).transpose(1, 2), k.new_empty(B, L, H, D).transpose(1, 2)


_sorted = Operator(
    "sorted_keys",
    "Tensor k, Tensor v, Tensor row",
    lambda k, v, row: _move(k, v, row, *_empty_sorted(k, v, row), False),
    _empty_sorted,
    lambda dk, dv, k, v, row, *sorted: _move(dk, dv, row, empty_rows(k), empty_rows(v), True),
    outputs=2,
    returned=2,
    differentiable=(0, 1),
    gradients=(0, 1),
)


def owned(nearest: Tensor, n: int) -> Tensor:
    """(B, n + 1): the targets whose nearest token is in tile c are [owned[c], owned[c + 1])."""
    starts = torch.arange(n + 1, dtype=torch.int32, device=nearest.device) * COLLECTED
    return torch.searchsorted(nearest, starts.expand(len(nearest), -1).contiguous(), out_int32=True)


@functools.lru_cache(maxsize=32)
def slopes(heads: int, device: torch.device) -> Tensor:
    """ALiBi slopes for logits to base 2."""
    from ...core.positions import alibi_slopes

    return (alibi_slopes(heads, device) * math.log2(math.e)).float()


def check(q: Tensor, k: Tensor, v: Tensor, sources: Tensor) -> None:
    check_tensors(q, k, v)
    if sources.dtype != torch.int32 or sources.dim() != 3 or sources.device != q.device:
        raise ValueError(
            f"the kernel needs int32 sources (B or 1, W, S) from `place_indices` on {q.device}; "
            f"got {sources.dtype} {tuple(sources.shape)} on {sources.device}"
        )


def tiles(kernel: str, size: int, samples: int, q: Tensor) -> Tiles:
    """Entry of the table, limited to the targets and sources of a window. A tile has at least 16 rows, the minimum of a
    matrix unit."""
    t = tiles_for(TILES, kernel, q.shape[3], q.element_size())
    if samples >= MANY:
        t = TILES.get((f"{kernel} of many", max(64, block_width(q.shape[3])), q.element_size()), t)
    queries, keys = (max(16, next_power_of_two(x)) for x in (size, samples))
    return replace(t, queries=min(t.queries, queries), keys=min(t.keys, keys))
