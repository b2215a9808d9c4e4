"""Samples drawn on the GPU: nothing to compute on the CPU, to copy or to wait for.

The distributions are those of `sampling.py` and `sampling_2d.py`. The 1-D samplers sort there; a kernel does not need
to: window w gets the sources whose keys lie between two order statistics of s + σ ε_s, which are found by counting.
Keys are distinct integers: the value in fixed point, followed by the position. The 2-D sampler runs the sweeps of a
chain in one program. The noise is a function of a number from the GPU's generator and of the position. So
`torch.manual_seed` reproduces a run, activation checkpointing, which restores that generator, repeats a sample, and a
CUDA graph draws a new one at every replay. The samples differ from those of the same seed on the CPU.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ...core import dispatch
from ...core.blocks import ceil_div
from ...core.staging import operator
from ...core.tiles import next_power_of_two
from ...kernels.launch import Taped, launch
from .sampling import causal_noise, rank_of
from .sampling_2d import COLUMN_BITS, FRESH_SWEEPS, POOL, _pool

WIDEST = 2.0**30  # largest σ, in positions
FRACTION = 6  # bits for fractions of a position; ties go to the later position
BLOCK = 4096  # sources per step, in 16 warps
MOST_KEYS = 2**30  # the kernels count them with 32 bits


def can_draw(device: torch.device, length: int, sigma: float | None) -> bool:
    if device.type != "cuda" or torch.version.hip is not None or not dispatch._INSTALLED:
        return False
    return length < 2**24 and (sigma is None or sigma < WIDEST)


@operator(
    "weft::draw_device_key",
    "(Tensor x) -> Tensor",
    lambda x: torch.empty(1, dtype=torch.int64, device=x.device),
    tags=(torch.Tag.nondeterministic_seeded,),
)
def draw_device_key(x: Tensor) -> Tensor:
    """A key (1,) from the generator of x's device. An operator, so that compiled code draws the key of eager code."""
    return torch.randint(2**62, (1,), device=x.device)


@operator(
    "weft::sample_windows_on_device",
    "(Tensor key, int windows, int size, int kept, float? sigma, bool gaussian, bool causal, bool per_rank) -> Tensor",
    lambda key, windows, size, kept, *_: torch.empty(windows, kept, dtype=torch.int32, device=key.device),
)
def sample_windows_on_device(
    key: Tensor, windows: int, size: int, kept: int, sigma: float | None, gaussian: bool, causal: bool, per_rank: bool
) -> Tensor:
    """Sources (W, kept), int32, in increasing order: `kept` of the P that `sample_windows` draws."""
    return _windows((key,), (windows, size, kept, sigma, gaussian, causal, rank_of(per_rank)))[0]


@operator(
    "weft::sample_grid_on_device",
    "(Tensor key, int height, int width, int rows, int columns, int channels, int kept, float sigma_y, float sigma_x,"
    " bool causal, int window, int shift, bool per_rank) -> Tensor",
    lambda key, height, width, rows, columns, channels, kept, *_: torch.empty(
        ceil_div(height, rows) * ceil_div(width, columns), kept, dtype=torch.int32, device=key.device
    ),
)
def sample_grid_on_device(
    key: Tensor,
    height: int,
    width: int,
    rows: int,
    columns: int,
    channels: int,
    kept: int,
    sigma_y: float,
    sigma_x: float,
    causal: bool,
    window: int,
    shift: int,
    per_rank: bool,
) -> Tensor:
    """Sources (W, kept), int32, in increasing order: those that `sample_placement` puts on the slots of windows of
    rows x columns cells of `channels` tokens, or `kept` of them. height · width · channels marks empty slots. If
    causal, each row of windows has its own chain."""
    sizes = (height, width, rows, columns, channels, kept)
    return _grid((key,), (*sizes, sigma_y, sigma_x, causal, window, shift, rank_of(per_rank)))[0]


@operator(
    "weft::noise_on_device",
    "(Tensor key, int count, bool per_rank) -> Tensor",
    lambda key, count, per_rank: torch.empty(count, dtype=torch.float32, device=key.device),
)
def noise_on_device(key: Tensor, count: int, per_rank: bool) -> Tensor:
    """`count` numbers from U(0, 1)."""
    return _noise((key,), (count, rank_of(per_rank)))[0]


def sample_windows(tensors, options) -> tuple[Tensor]:
    from .choose import choose, sort_keys

    (key,), (windows, size, kept, sigma, gaussian, causal, rank) = tensors, options
    longest = windows * size
    count = causal_noise(windows, size) if causal else longest
    if count > MOST_KEYS:
        raise ValueError(
            f"a causal sample of {windows:,} windows of {size:,} tokens takes {count:,} random keys, and a GPU draws "
            f"up to {MOST_KEYS:,}; use fewer windows"
        )
    low_bits = (longest - 1).bit_length()
    spread = -1 if sigma is None else round(sigma * 2**FRACTION)
    # Normal numbers are below 6 in magnitude, see `normals`.
    bits = 32 if sigma is None else (longest * 2**FRACTION + 13 * spread).bit_length()
    sources = key.new_empty(windows, size, dtype=torch.int32)
    keys = key.new_empty(count)
    launch(
        sort_keys, (ceil_div(count, 1024),),
        key, keys, count, 0, size, spread, low_bits, rank,
        CAUSAL=causal, BIASED=sigma is not None, GAUSSIAN=gaussian, FRACTION=FRACTION, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    launch(
        choose, (windows,),
        keys, sources, windows, size, ceil_div(bits + low_bits, 8) * 8,
        CAUSAL=causal, BLOCK=BLOCK, num_warps=16,
    )  # fmt: skip
    return (_thinned(key, sources, kept, 2 * count, rank),)


def _place(tensors, options) -> tuple[Tensor]:
    from .place import owned, place, thresholds

    (key,), (height, width, rows, columns, channels, kept, *sigma, causal, window, shift, rank) = tensors, options
    cells, band, across = height * width, rows if causal else height, ceil_div(width, columns)
    windows, size = ceil_div(height, rows) * across, rows * columns * channels
    chains = _chains(height, width, tuple(sigma), band, window, shift, key.device)
    bands = len(chains)
    state, owner = key.new_empty(2, bands, cells, dtype=torch.int32).unbind()
    sources = key.new_empty(windows, size, dtype=torch.int32)
    least = key.new_empty(bands, FRESH_SWEEPS, 2, cells, dtype=torch.int16)
    launch(
        thresholds, (ceil_div(least.numel(), 1024),),
        key, least, least.numel(), cells, width, sigma[0] ** 2, sigma[1] ** 2, window, shift, rank,
        BLOCK=1024, num_warps=4,
    )  # fmt: skip
    block = min(8192, max(1024, next_power_of_two(cells // 2)))  # all pairs of a half sweep, if possible
    launch(
        place, (bands,),
        key, chains, least, state, owner, POOL, height, width, band, rank,
        rows, columns, across, SWEEPS=FRESH_SWEEPS, BLOCK=block, num_warps=block // 256, num_stages=1,
    )  # fmt: skip
    launch(owned, (windows,), owner, sources, cells, size, channels, CAUSAL=causal, BLOCK=2048, num_warps=8)
    return (_thinned(key, sources, kept, (2 * FRESH_SWEEPS * bands + 1) * cells, rank),)


def _thinned(key: Tensor, sources: Tensor, kept: int, start: int, rank: int) -> Tensor:
    """`kept` sources of each window, drawn with the random numbers from `start` on."""
    from .choose import sort_keys, thin

    windows, size = sources.shape
    if kept == size:
        return sources
    count = windows * size
    keys, some = key.new_empty(count), sources.new_empty(windows, kept)
    low_bits = (count - 1).bit_length()
    launch(
        sort_keys, (ceil_div(count, 1024),),
        key, keys, count, start, size, -1, low_bits, rank,
        CAUSAL=False, BIASED=False, GAUSSIAN=False, FRACTION=FRACTION, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    bits = ceil_div(32 + low_bits, 8) * 8
    launch(thin, (windows,), keys, sources, some, size, kept, bits, BLOCK=BLOCK, num_warps=16)
    return some


@lru_cache(maxsize=32)
def _chains(
    height: int, width: int, sigma: tuple[float, float], band: int, window: int, shift: int, device: torch.device
) -> Tensor:
    """The warmed-up chains of `sampling_2d` on the device, (bands, chains, height, width)."""
    pools = _pool(height, width, sigma, band, window, shift)
    chains = np.zeros((len(pools), POOL, height, width), np.int32)
    for chain, pool in zip(chains, pools, strict=True):
        chain[:, : pool.shape[1]] = pool // width << COLUMN_BITS | pool % width
    return torch.from_numpy(chains).to(device)


def _uniform(tensors, options) -> tuple[Tensor]:
    from .choose import uniform

    (key,), (count, rank) = tensors, options
    out = key.new_empty(count, dtype=torch.float32)
    launch(uniform, (ceil_div(count, 1024),), key, out, count, rank, BLOCK=1024, num_warps=4)
    return (out,)


_windows, _grid, _noise = Taped(sample_windows), Taped(_place), Taped(_uniform)
