"""Samples drawn on the GPU, in two kernels: nothing to compute on the CPU, to copy or to wait for.

The distribution is that of `sampling.py`, whose samplers sort. A kernel does not need to: window w gets the sources
whose keys lie between two order statistics of s + σ ε_s, which are found by counting. Keys are distinct integers: the
value in fixed point, followed by the position. The noise is a function of a number from the GPU's generator and of the
position. So `torch.manual_seed` reproduces a run, activation checkpointing, which restores that generator, repeats a
sample, and a CUDA graph draws a new one at every replay. The samples differ from those of the same seed on the CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core import dispatch
from ...core.blocks import ceil_div
from ...core.staging import operator
from ...kernels.launch import Taped, launch
from .sampling import causal_noise, rank_of

WIDEST = 2.0**30  # largest σ, in positions
FRACTION = 6  # bits for fractions of a position; ties go to the later position
BLOCK = 4096  # sources per step


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
    "(Tensor key, int windows, int size, float? sigma, bool gaussian, bool causal, bool per_rank) -> Tensor",
    lambda key, windows, size, *_: torch.empty(windows, size, dtype=torch.int32, device=key.device),
)
def sample_windows_on_device(
    key: Tensor, windows: int, size: int, sigma: float | None, gaussian: bool, causal: bool, per_rank: bool
) -> Tensor:
    """Sources (W, P), int32, in increasing order; the arguments are those of `sample_windows`."""
    return _draw((key,), (windows, size, sigma, gaussian, causal, rank_of(per_rank)))[0]


def _sample(tensors, options) -> tuple[Tensor]:
    from .choose import choose, sort_keys

    (key,), (windows, size, sigma, gaussian, causal, rank) = tensors, options
    longest = windows * size
    count = causal_noise(windows, size) if causal else longest
    low_bits = (longest - 1).bit_length()
    spread = -1 if sigma is None else round(sigma * 2**FRACTION)
    # Normal numbers are below 6 in magnitude, see `normals`.
    bits = 32 if sigma is None else (longest * 2**FRACTION + 13 * spread).bit_length()
    sources = key.new_empty(windows, size, dtype=torch.int32)
    keys = key.new_empty(count)
    launch(
        sort_keys, (ceil_div(count, 1024),),
        key, keys, count, size, spread, low_bits, rank,
        CAUSAL=causal, BIASED=sigma is not None, GAUSSIAN=gaussian, FRACTION=FRACTION, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    launch(
        choose, (windows,),
        keys, sources, windows, size, ceil_div(bits + low_bits, 4) * 4, low_bits,
        CAUSAL=causal, BLOCK=min(BLOCK, 1 << low_bits) if low_bits else 1, num_warps=16,
    )  # fmt: skip
    return (sources,)


_draw = Taped(_sample)
