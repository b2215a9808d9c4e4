"""Random placements of an image's sources on its slots: the 2-D samplers of subsampled attention.

The Information Pathways Hypothesis, https://arxiv.org/abs/2306.01705

A placement puts every source of a height x width grid on a slot. The law:

    p ∝ exp(−Σ_sources (y_slot − y_source)² / 2σ_y² + (x_slot − x_source)² / 2σ_x²)          σ in cells

It is the stationary law of a Markov chain of swaps between neighbours, started where every source is at home:

    for odd y, then for even y, all x:   c₁, c₂ = original rows of the sources on (y−1, x) and (y, x)
                                         swap with probability 1 / (1 + exp((c₂ − c₁) / σ_y²))
    then the same along x, with original columns and σ_x

The authors sweep row after row and swap with Metropolis' min(1, exp((c₁ − c₂) / σ²)). That has the same stationary law
and need not reach it: its sure swaps make a sweep almost deterministic for large σ, and on 2 x 2 cells 4 of the 24
placements never come up. Rows of one parity do not touch, so that we swap half of the grid at once.

With `window` no swap crosses the edges of windows that start at `shift`, so that no source leaves its window.
Hundreds of sweeps for every draw would be slow. A pool of chains is run once for each shape and kept; a draw takes a
chain of the pool and moves it `FRESH_SWEEPS` further, on noise of its own: still a plain function of the draw's key.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ..kernels.staging import operator, send
from .blocks import ceil_div
from .sampling import CPU, generator_of

POOL = 64
FRESH_SWEEPS = 16


def warm_up(sigma: tuple[float, float], height: int, width: int) -> int:
    """Sweeps from home to the stationary law: the authors' 200, and more where sources go far (one sweep, one cell)."""
    reach = max(min(sigma[0], height), min(sigma[1], width))
    return max(200, round(4 * reach * reach))


def shuffle_grid(
    placement: np.ndarray,
    sigma: tuple[float, float],
    sweeps: int,
    generator: torch.Generator,
    *,
    window: int = 0,
    shift: int = 0,
) -> np.ndarray:
    """Move chains (n, height, width) of source numbers (row by row) on by some sweeps."""
    width = placement.shape[2]
    rows, columns = placement // width, placement % width
    for _ in range(sweeps):
        _sweep(rows, columns, sigma[0], generator, window, shift)
        _sweep(columns.swapaxes(1, 2), rows.swapaxes(1, 2), sigma[1], generator, window, shift)
    return rows * width + columns


def _sweep(c: np.ndarray, other: np.ndarray, sigma: float, generator: torch.Generator, window: int, shift: int) -> None:
    """One pass along axis 1, in place; `c` holds the coordinates along it, `other` those that move with them."""
    n = c.shape[1]
    noise = torch.rand(c.shape[0], n, c.shape[2], generator=generator, device=CPU)
    threshold = (sigma * sigma * noise.logit()).numpy()  # u < 1 / (1 + exp(−d / σ²)), solved for d
    if window:
        threshold[:, shift % window :: window] = np.inf  # slots i − 1 and i lie in different windows
    for start in (1, 2):
        above, below = slice(start - 1, n - 1, 2), slice(start, n, 2)
        swap = threshold[:, below] < c[:, above] - c[:, below]
        for a in (c, other):
            a[:, above], a[:, below] = (
                np.where(swap, a[:, below], a[:, above]),
                np.where(swap, a[:, above], a[:, below]),
            )


def home(chains: int, height: int, width: int) -> np.ndarray:
    """Every source on its own slot."""
    return np.broadcast_to(np.arange(height * width).reshape(height, width), (chains, height, width)).copy()


@lru_cache(maxsize=32)
def _pool(
    height: int, width: int, sigma: tuple[float, float], band: int, window: int, shift: int
) -> tuple[np.ndarray, ...]:
    """Warmed-up chains, one array per band of rows that a causal sampler adds; one in all when `band` is the height."""
    generator = torch.Generator("cpu").manual_seed(0)
    chains = home(POOL, 0, width)
    pools = []
    for end in [*range(band, height, band), height]:
        # The next band enters at home, below the chain so far.
        chains = np.concatenate([chains, home(POOL, end, width)[:, chains.shape[1] :]], 1)
        chains = shuffle_grid(chains, sigma, warm_up(sigma, end, width), generator, window=window, shift=shift)
        pools.append(chains)
    return tuple(pools)


@operator(
    "weft::sample_placement",
    "(Tensor key, int height, int width, float sigma_y, float sigma_x, int band, int window, int shift, bool per_rank,"
    " Device device) -> Tensor",
    lambda key, height, width, *_: torch.empty(height * width, dtype=torch.int64, device=_[-1]),
)
def sample_placement(
    key: Tensor,
    height: int,
    width: int,
    sigma_y: float,
    sigma_x: float,
    band: int,
    window: int,
    shift: int,
    per_rank: bool,
    device: torch.device,
) -> Tensor:
    """Sources of all slots (height · width,), row by row.

    With `band` < height the sampler is causal: rows [band·b, band·(b+1)) are read from a chain that runs on the rows
    before band·(b+1) alone.
    """
    generator = generator_of(key, per_rank)
    chain = int(torch.randint(POOL, (1,), generator=generator, device=CPU))
    parts: list[np.ndarray] = []
    for pool in _pool(height, width, (sigma_y, sigma_x), band, window, shift):
        state = shuffle_grid(
            pool[chain : chain + 1], (sigma_y, sigma_x), FRESH_SWEEPS, generator, window=window, shift=shift
        )
        first = 0 if band >= height else sum(p.shape[0] for p in parts)
        parts.append(state[0, first:])
    return send(torch.from_numpy(np.concatenate(parts).astype(np.int64).reshape(-1)), device)


def window_table(
    height: int, width: int, window: tuple[int, int], shift: int = 0, device: torch.device = CPU
) -> Tensor:
    """The cells of each window, (windows, cells of a window), row by row; height · width where there is none.

    Windows start at `shift` and are simply smaller at the borders.
    """
    starts = [shift - size if shift else 0 for size in window]
    y, x = (
        start + torch.arange(ceil_div(side - start, size) * size, device=device)
        for start, side, size in zip(starts, (height, width), window, strict=True)
    )
    outside = ((y < 0) | (y >= height))[:, None] | ((x < 0) | (x >= width))[None]
    cells = (y[:, None] * width + x[None]).masked_fill(outside, height * width)
    table = cells.unflatten(1, (-1, window[1])).unflatten(0, (-1, window[0]))
    return table.transpose(1, 2).flatten(2).flatten(0, 1)
