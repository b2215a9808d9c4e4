"""1-D samplers of subsampled attention: random sources (keys) for the windows of a sequence.

The Information Pathways Hypothesis, https://arxiv.org/abs/2306.01705

L sources, W windows of P = L / W targets each, σ in positions, ε ~ N(0, 1):

    bidirectional   order = argsort_s(s + σ ε_s), s < L;   window w gets order[wP : (w+1)P]
    causal          for every w, with fresh noise: order = argsort_s(s + σ ε_s), s < (w+1)P;   window w gets the last P
    unbiased        the same with only the noise

The samplers are pure functions of their noise, and the noise is a pure function of a key. Only the key is drawn, from
torch's CPU generator. So `torch.manual_seed` reproduces a run, activation checkpointing (which restores that generator)
repeats the same sample, and a compiled graph draws a new one in each call.

These samplers run on the CPU; `device.py` draws the samples of a GPU. The sort keys are distinct integers for
all windows at once:

    bits of the double (w · gap + s + σ ε_s), w from 1, with s replacing the last log₂ L bits
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ...core.staging import operator

KEYS = 2**32  # number of distinct seeds of a CPU generator
FARTHEST = 9.0  # bound on |ε|: 53 random bits reach at most 8.6
CPU = torch.device("cpu")


def draw_key(generator: torch.Generator | None = None) -> Tensor:
    """Draw a key, (1,), from the given generator or from torch's global one."""
    return torch.randint(KEYS, (1,), generator=generator, device="cpu")


def generator_of(key: Tensor, per_rank: bool) -> torch.Generator:
    """Return the generator for a key; with `per_rank`, a different one on every data-parallel rank."""
    return torch.Generator("cpu").manual_seed((int(key) + rank_of(per_rank) * 0x9E3779B1) % KEYS)


def rank_of(per_rank: bool) -> int:
    distributed = per_rank and torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if distributed else 0


@operator(
    "weft::sample_noise",
    "(Tensor key, int count, bool per_rank) -> Tensor",
    lambda key, count, per_rank: torch.empty(count, dtype=torch.float64, device=CPU),
)
def sample_noise(key: Tensor, count: int, per_rank: bool) -> Tensor:
    """`count` numbers from U(0, 1)."""
    return torch.empty(count, dtype=torch.float64, device=CPU).uniform_(generator=generator_of(key, per_rank))


@operator(
    "weft::sample_windows",
    "(Tensor key, int windows, int size, float? sigma, bool gaussian, bool causal, bool per_rank) -> Tensor",
    lambda key, windows, size, *_: torch.empty(windows, size, dtype=torch.int64, device=CPU),
)
def sample_windows(
    key: Tensor, windows: int, size: int, sigma: float | None, gaussian: bool, causal: bool, per_rank: bool
) -> Tensor:
    """Sources (W, P) with noise from N(0, 1) or U(0, 1); `sigma` in positions, None for no local bias."""
    generator = generator_of(key, per_rank)
    count = causal_noise(windows, size) if causal else windows * size
    if gaussian:  # float32 takes a quarter of the time, and is precise enough
        noise = torch.empty(count, dtype=torch.float32, device=CPU).normal_(generator=generator)
    else:
        noise = torch.empty(count, dtype=torch.float64, device=CPU).uniform_(generator=generator)
    if causal:
        return causal_windows(noise, windows, size, sigma)
    return bidirectional_windows(noise, windows, sigma)


@operator(
    "weft::sample_slots",
    "(Tensor key, int windows, int size, bool per_rank) -> Tensor",
    lambda key, windows, size, per_rank: torch.empty(windows, size, dtype=torch.int64, device=CPU),
)
def sample_slots(key: Tensor, windows: int, size: int, per_rank: bool) -> Tensor:
    """The slots of each window in random order, (W, P)."""
    noise = sample_noise(key, windows * size, per_rank)
    return shuffle(noise, (size,) * windows, None).view(windows, size)


def bidirectional_windows(noise: Tensor, windows: int, sigma: float | None) -> Tensor:
    """Noise (L,) -> sources (W, P), a permutation; `sigma` in positions, None for no local bias."""
    return torch.unflatten(shuffle(noise, (noise.shape[0],), sigma), 0, (windows, -1))


def causal_windows(noise: Tensor, windows: int, size: int, sigma: float | None) -> Tensor:
    """Concatenated noise for the prefixes of all windows, P + 2P + ... + WP values -> sources (W, P)."""
    prefixes = tuple((w + 1) * size for w in range(windows))
    before_and_last = [n for prefix in prefixes for n in (prefix - size, size)]
    parts = shuffle(noise, prefixes, sigma).split(before_and_last)
    return torch.cat(parts[1::2]).view(windows, size)


def causal_noise(windows: int, size: int) -> int:
    """Number of noise values that `causal_windows` reads."""
    return size * windows * (windows + 1) // 2


def shuffle(noise: Tensor, lengths: tuple[int, ...], sigma: float | None) -> Tensor:
    """Random order of the positions of each sequence; each position moves by about `sigma`. The sequences are
    concatenated, like the noise."""
    low_bits = (1 << (max(lengths) - 1).bit_length()) - 1
    keys = np.empty(noise.shape[0], np.int64)
    sort_keys(noise.numpy(), lengths, sigma, low_bits, keys)
    keys.sort()  # NumPy takes a tenth of the time of PyTorch
    return torch.from_numpy(keys).bitwise_and_(low_bits)


def sort_keys(noise: np.ndarray, lengths: tuple[int, ...], sigma: float | None, low_bits: int, out: np.ndarray) -> None:
    """Distinct integers whose order is that of `shuffle`. The low bits of each hold its position."""
    home, position = _places(lengths, sigma)
    key = out.view(np.float64)
    np.multiply(noise, 1.0 if sigma is None else sigma, out=key, dtype=np.float64)
    key += home
    out &= ~low_bits  # positive doubles sort in the same order as their bits
    out |= position


@lru_cache(maxsize=32)
def _places(lengths: tuple[int, ...], sigma: float | None) -> tuple[np.ndarray, np.ndarray]:
    """The value to which the noise of each source is added, and its position. Sequences are far enough apart that they
    never overlap."""
    position = np.concatenate([np.arange(n) for n in lengths])
    sequence = np.repeat(np.arange(1.0, len(lengths) + 1), lengths)
    if sigma is None:
        return sequence * (1 + 2 * FARTHEST), position
    return sequence * (max(lengths) + 2 * FARTHEST * sigma) + position, position
