"""2-D samplers of subsampled attention: random placements of the sources of an image on its slots.

The Information Pathways Hypothesis, https://arxiv.org/abs/2306.01705

A placement assigns every source of a height x width grid to a slot. Its distribution:

    p ∝ exp(−Σ_sources (y_slot − y_source)² / 2σ_y² + (x_slot − x_source)² / 2σ_x²)          σ in cells

This is the stationary distribution of a Markov chain of swaps between neighbours:

    for odd y, then for even y, all x:   c₁, c₂ = original rows of the sources on (y−1, x) and (y, x)
                                         swap with probability 1 / (1 + exp((c₂ − c₁) / σ_y²))
    then the same along x, with original columns and σ_x

The authors sweep row by row and swap with the Metropolis probability min(1, exp((c₁ − c₂) / σ²)). That chain has the
same stationary distribution but may not reach it: its certain swaps make a sweep almost deterministic for large σ, and
on 2 x 2 cells 4 of the 24 placements never occur. Rows of the same parity do not interact, so we swap half of the grid
at once.

Initially every source is on its own slot. A source moves by about one cell per sweep, so for large σ, chains start near
their stationary distribution instead.

With `window`, no swap crosses the edges of windows that start at `shift`, so no source leaves its window. Hundreds of
sweeps per draw would be slow. So a pool of chains is run once per shape and cached. A draw picks a chain from the pool
and runs `FRESH_SWEEPS` more sweeps with its own noise; it is still a pure function of its key.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ...core.blocks import ceil_div
from ...core.staging import operator
from .sampling import CPU, generator_of

COLUMN_BITS = 15  # a chain stores the row and the column of a source in one integer
NEVER = 1 << COLUMN_BITS  # larger than any difference of coordinates
POOL = 64
FRESH_SWEEPS = 16
WARM_UP = 200  # sweeps, as in the authors' code


def warm_up(sigma: tuple[float, float], height: int, width: int) -> int:
    """Sweeps from every source on its own slot to the stationary distribution."""
    reach = max(min(sigma[0], height), min(sigma[1], width))
    return max(WARM_UP, round(4 * reach * reach))


def shuffle_grid(
    placement: np.ndarray,
    sigma: tuple[float, float],
    sweeps: int,
    generator: torch.Generator,
    *,
    window: int = 0,
    shift: int = 0,
    ends: Sequence[int] = (),
) -> np.ndarray:
    """Run `sweeps` sweeps on chains (n, height, width) of row-major source indices.

    If `ends` is given, chain b uses only the rows before ends[b]; the others hold arbitrary values.
    """
    width = placement.shape[2]
    state = (placement // width << COLUMN_BITS | placement % width).astype(np.int32)
    passes = [
        (state, sigma[0], lambda source: source >> COLUMN_BITS),
        (state.swapaxes(1, 2), sigma[1], lambda source: source & (1 << COLUMN_BITS) - 1),
    ]
    pairs = [_neighbours(along) for along, _, _ in passes]
    while sweeps > 0:
        together = min(sweeps, FRESH_SWEEPS, max(1, (1 << 20) // state.size))  # limit the noise to a few megabytes
        noise = torch.empty(together, 2, state.size, dtype=torch.float32, device=CPU).uniform_(generator=generator)
        logits = noise.logit_().numpy()
        least = [
            _differences(logits[:, i].reshape(together, *along.shape), spread, window, shift)
            for i, (along, spread, _) in enumerate(passes)
        ]
        for chain, end in enumerate(ends):
            least[0][:, chain, end:] = NEVER
        for sweep in range(together):
            for i, (_, _, coordinate) in enumerate(passes):
                for above, below, rows in pairs[i]:
                    _swap(above, below, coordinate(above) - coordinate(below) > least[i][sweep, :, rows])
        sweeps -= together
    return (state >> COLUMN_BITS) * width + (state & (1 << COLUMN_BITS) - 1)


def _neighbours(state: np.ndarray) -> list[tuple[np.ndarray, np.ndarray, slice]]:
    """Slots i - 1 and i along axis 1, and the slice of i, for odd i and then for even i."""
    n = state.shape[1]
    return [(state[:, i - 1 : n - 1 : 2], state[:, i::2], slice(i, n, 2)) for i in (1, 2)]


def _differences(logits: np.ndarray, sigma: float, window: int, shift: int) -> np.ndarray:
    """Integer coordinate differences above which slots i - 1 and i are swapped, (sweeps, n, i, ..).

    This is u < 1 / (1 + exp(−d / σ²)), solved for d. The logits of u are overwritten.
    """
    logits *= sigma * sigma
    least = np.floor(logits, out=logits).clip(-NEVER, NEVER).astype(np.int32)
    if window:
        least[:, :, shift % window :: window] = NEVER  # slots i − 1 and i are in different windows
    return least


def _swap(above: np.ndarray, below: np.ndarray, swap: np.ndarray) -> None:
    difference = above ^ below
    difference *= swap
    above ^= difference
    below ^= difference


def home(chains: int, height: int, width: int) -> np.ndarray:
    """Every source on its own slot."""
    return np.broadcast_to(np.arange(height * width).reshape(height, width), (chains, height, width)).copy()


def near_stationary(
    chains: int, height: int, width: int, sigma: tuple[float, float], generator: torch.Generator
) -> np.ndarray:
    """Each source draws a row and a column. Sorted by row, and each row by column, there is one on every slot.

    On a large grid, p has independent rows and columns, with the normal distribution around the source, scaled so that
    every row and column is expected to get as many sources as it has slots.
    """
    drawn = []
    for n, spread, axis in ((height, sigma[0], 1), (width, sigma[1], 2)):
        at = np.arange(n)
        p = np.exp(-0.5 * ((at[:, None] - at) / spread) ** 2)
        for _ in range(100):  # Sinkhorn
            p /= p.sum(0)
            p /= p.sum(1, keepdims=True)
        u = torch.empty(2, chains, height, width, dtype=torch.float64, device=CPU).uniform_(generator=generator).numpy()
        u = np.moveaxis(u, axis + 1, 1)
        picked = np.stack([np.searchsorted(row, x) for row, x in zip(p.cumsum(1), u[0], strict=True)])
        drawn.append(np.moveaxis(picked + u[1], 0, axis).reshape(chains, -1))
    order = drawn[0].argsort(1)
    column = np.take_along_axis(drawn[1], order, 1).reshape(chains, height, width)
    return np.take_along_axis(order.reshape(chains, height, width), column.argsort(2), 2)


@lru_cache(maxsize=32)
def _pool(
    height: int, width: int, sigma: tuple[float, float], band: int, window: int, shift: int
) -> tuple[np.ndarray, ...]:
    """Warmed-up chains: one array per band of rows that a causal sampler adds; a single one if `band` = height."""
    generator = torch.Generator("cpu").manual_seed(0)
    chains = home(POOL, 0, width)
    pools = []
    for end in [*range(band, height, band), height]:
        sweeps = warm_up(sigma, end, width)
        if sweeps > WARM_UP and not window:
            chains, sweeps = near_stationary(POOL, end, width, sigma, generator), WARM_UP
        else:  # append the next band below the chain, with every source on its own slot
            chains = np.concatenate([chains, home(POOL, end, width)[:, chains.shape[1] :]], 1)
        chains = shuffle_grid(chains, sigma, sweeps, generator, window=window, shift=shift)
        pools.append(chains)
    return tuple(pools)


@operator(
    "weft::sample_placement",
    "(Tensor key, int height, int width, float sigma_y, float sigma_x, int band, int window, int shift, bool per_rank)"
    " -> Tensor",
    lambda key, height, width, *_: torch.empty(height * width, dtype=torch.int64, device=CPU),
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
) -> Tensor:
    """Sources of all slots (height · width,) in row-major order.

    With `band` < height the sampler is causal: rows [band·b, band·(b+1)) come from a chain that runs only on the rows
    before band·(b+1).
    """
    generator = generator_of(key, per_rank)
    chain = int(torch.randint(POOL, (1,), generator=generator, device=CPU))
    pools = _pool(height, width, (sigma_y, sigma_x), band, window, shift)
    ends = [pool.shape[1] for pool in pools]
    chains = np.zeros((len(pools), height, width), np.int64)
    for state, pool, end in zip(chains, pools, ends, strict=True):
        state[:end] = pool[chain]
    chains = shuffle_grid(chains, (sigma_y, sigma_x), FRESH_SWEEPS, generator, window=window, shift=shift, ends=ends)
    parts = [chains[b, start:end] for b, (start, end) in enumerate(zip([0, *ends], ends, strict=False))]
    return torch.from_numpy(np.concatenate(parts).astype(np.int64).reshape(-1))


def window_table(
    height: int, width: int, window: tuple[int, int], shift: int = 0, device: torch.device = CPU
) -> Tensor:
    """The cells of each window, (windows, cells per window), in row-major order; height · width for no cell.

    Windows start at `shift` and are smaller at the borders.
    """
    starts = [shift - size if shift else 0 for size in window]
    y, x = (
        start + torch.arange(ceil_div(side - start, size) * size, device=device)
        for start, side, size in zip(starts, (height, width), window, strict=True)
    )
    outside = ((y < 0) | (y >= height))[:, None] | ((x < 0) | (x >= width))[None]
    cells = (y[:, None] * width + x[None]).masked_fill(outside, height * width)
    table = torch.unflatten(torch.unflatten(cells, 1, (-1, window[1])), 0, (-1, window[0]))
    return table.transpose(1, 2).flatten(2).flatten(0, 1)
