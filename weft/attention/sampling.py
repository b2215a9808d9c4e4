"""Random samples of sources (keys) for the windows of a sequence: the 1-D samplers of subsampled attention.

The Information Pathways Hypothesis, https://arxiv.org/abs/2306.01705

L sources, W windows of P = L / W targets each, σ in positions, ε ~ N(0, 1):

    bidirectional   order = argsort_s(s + σ ε_s), s < L;   window w gets order[wP : (w+1)P]
    causal          for every w, with fresh noise: order = argsort_s(s + σ ε_s), s < (w+1)P;   window w gets the last P
    unbiased        the same with the noise alone

The samplers are plain functions of their noise. The noise is a plain function of a key, and only the key is drawn,
from torch's own CPU generator: so `torch.manual_seed` reproduces a run, activation checkpointing (which restores that
generator) sees the same sample again, CPU and GPU see the same one, and a compiled graph draws afresh at each call.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

KEYS = 2**32  # what a CPU generator distinguishes


def draw_key(generator: torch.Generator | None = None) -> Tensor:
    """A fresh key, (1,): from the given generator, or from torch's global one."""
    return torch.randint(KEYS, (1,), generator=generator, device="cpu")


def generator_of(key: Tensor, per_rank: bool) -> torch.Generator:
    """The generator a key stands for; with `per_rank` another one on every data-parallel rank."""
    rank = 0
    if per_rank and torch.distributed.is_available() and torch.distributed.is_initialized():
        rank = torch.distributed.get_rank()
    return torch.Generator("cpu").manual_seed((int(key) + rank * 0x9E3779B1) % KEYS)


# An operator of its own, because a compiled graph cannot look into a generator but can call an operator that does.
@torch.library.custom_op("weft::sample_noise", mutates_args=())
def sample_noise(key: Tensor, count: int, gaussian: bool, per_rank: bool) -> Tensor:
    """`count` numbers, N(0, 1) or U(0, 1). In double: half precision cannot even hold the positions they displace."""
    generator = generator_of(key, per_rank)
    draw = torch.randn if gaussian else torch.rand
    return draw(count, generator=generator, dtype=torch.float64, device="cpu")


@sample_noise.register_fake
def _(key: Tensor, count: int, gaussian: bool, per_rank: bool) -> Tensor:
    return key.new_empty(count, dtype=torch.float64)


def bidirectional_windows(noise: Tensor, windows: int, sigma: float | None) -> Tensor:
    """Noise (L,) -> sources (W, P), a permutation; `sigma` in positions, None without local bias."""
    return shuffle(noise, sigma).unflatten(0, (windows, -1))


def causal_windows(noise: Tensor, windows: int, size: int, sigma: float | None) -> Tensor:
    """Noise for the prefixes of all windows one after the other, P + 2P + ... + WP values -> sources (W, P)."""
    prefixes = noise.split([(w + 1) * size for w in range(windows)])
    return torch.stack([shuffle(prefix, sigma)[-size:] for prefix in prefixes])


def causal_noise(windows: int, size: int) -> int:
    """How many noise values `causal_windows` reads."""
    return size * windows * (windows + 1) // 2


def shuffle(noise: Tensor, sigma: float | None) -> Tensor:
    """A random order of the positions in which each is displaced by about `sigma`."""
    if sigma is None:
        return ascending(noise)
    return ascending(torch.arange(noise.shape[0], device=noise.device) + sigma * noise)


@torch.library.custom_op("weft::ascending", mutates_args=())
def ascending(x: Tensor) -> Tensor:
    """argsort of (n,): on a CPU by NumPy, which takes a fifth of PyTorch's time."""
    return x.argsort() if x.device.type != "cpu" else torch.from_numpy(np.argsort(x.numpy()))


@ascending.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=torch.int64)


def thin(sources: Tensor, keep: float, noise: Tensor) -> Tensor:
    """Keep round(keep · P) random slots of each window, at least one; of a single window the first ones."""
    W, P = sources.shape
    n = max(1, round(keep * P))
    if W == 1:
        return sources[:, :n]
    return sources.gather(1, noise.view(W, P).argsort(1)[:, :n])
