"""The distributions of the samplers, compared with recorded statistics and exact enumeration."""

import itertools
import math
import re

import golden
import numpy as np
import pytest
import torch

import weft
from weft.attention.subsampled import sampling
from weft.attention.subsampled.sampling import KEYS, bidirectional_windows, causal_windows, sample_slots
from weft.attention.subsampled.sampling_2d import (
    POOL,
    home,
    near_stationary,
    sample_placement,
    shuffle_grid,
    window_table,
)


def causal_sample(L, W, sigma, seed):
    noise = torch.randn(L * (W + 1) // 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return causal_windows(noise, W, L // W, None if sigma is None else sigma * L)


def pair_and_token_fractions(sources, L):
    W, P = sources.shape
    targets = torch.arange(L).view(W, P)
    ordered = sources.sort(-1).values
    pairs = torch.searchsorted(ordered, targets, right=True).sum().item()
    return pairs / (L * (L + 1) / 2), sources.unique().numel() / L


# Fractions of causal pairs and of tokens used, as the paper's code measures them at L = 3072.
TABLE = {(2, 0.2): (0.519, 0.921), (4, 0.2): (0.292, 0.816), (4, 0.35): (0.318, 0.757), (6, 0.2): (0.213, 0.761),
         (8, 0.2): (0.170, 0.731)}  # fmt: skip


@pytest.mark.parametrize(("W", "sigma"), TABLE)
def test_fraction_of_causal_pairs(W, sigma):
    found = torch.tensor([pair_and_token_fractions(causal_sample(3072, W, sigma, seed), 3072) for seed in range(12)])
    assert (found.mean(0) - torch.tensor(TABLE[W, sigma])).abs().max() < 0.005
    assert found[:, 0].min() > 1 / W


@pytest.mark.parametrize("name", list(golden.cases("ssa_1d.npz").get("sampler_stats", [])))
def test_recorded_fractions(name):
    match = re.fullmatch(r"L(\d+)_w(\d+)_s([\d.]+)_fraction_causal_pairs", name)
    L, W, sigma = int(match[1]), int(match[2]), float(match[3])
    found = torch.tensor([pair_and_token_fractions(causal_sample(L, W, sigma, seed), L) for seed in range(12)])
    recorded = torch.as_tensor(golden.case("ssa_1d.npz", "sampler_stats")[name])
    assert (found.mean(0) - recorded).abs().max() < 0.005


def test_causal_windows_draw_distinct_sources_of_their_prefix():
    for seed, (W, P, sigma) in enumerate(itertools.product((1, 3, 8), (1, 5), (0.0, 0.3, None))):
        sources = causal_sample(W * P, W, sigma, seed)
        for w, window in enumerate(sources.tolist()):
            assert len(set(window)) == P and max(window) < (w + 1) * P and min(window) <= w * P
        assert sorted(sources[0].tolist()) == list(range(P))
        if sigma == 0.0:
            assert sources.flatten().tolist() == list(range(W * P))


def test_windows_draw_fresh_noise():
    """Windows are independent: a source in the last window is not correlated with the window before it."""
    L, W = 64, 4
    noise = torch.randn(4000, L * (W + 1) // 2, generator=torch.Generator().manual_seed(0))
    late = torch.zeros(4000, 2)
    for i, row in enumerate(noise):
        sources = causal_windows(row.double(), W, L // W, 0.5 * L)
        late[i] = torch.stack([(sources[w] == 30).any() for w in (2, 3)])
    assert 0.05 < late.mean(0).min() and abs(torch.corrcoef(late.T)[0, 1]) < 0.06


@pytest.mark.parametrize("sigma", [4.0, 20.0, 80.0])
def test_displacement_follows_sigma(sigma):
    """Far from the ends keys s + σε are as dense as positions, so slot − source has standard deviation σ."""
    L = 4096
    noise = torch.randn(L, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    order = bidirectional_windows(noise, 4, sigma).flatten()
    assert sorted(order.tolist()) == list(range(L))
    inner = slice(512, L - 512)
    displacement = (order - torch.arange(L))[inner].double()
    assert abs(displacement.std().item() / sigma - 1) < 0.06


def test_unbiased_windows_are_uniform():
    L, W = 12, 3
    counts = torch.zeros(W, L)
    for seed in range(6000):
        noise = torch.rand(L, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        counts.scatter_add_(1, bidirectional_windows(noise, W, None), torch.ones(W, L // W))
    assert (counts / 6000 - 1 / W).abs().max() < 0.03
    counts = torch.zeros(W, L)
    for seed in range(6000):
        counts.scatter_add_(1, causal_sample(L, W, None, seed), torch.ones(W, L // W))
    expected = torch.tensor([[4 / 4] * 4 + [0] * 8, [4 / 8] * 8 + [0] * 4, [4 / 12] * 12])
    assert (counts / 6000 - expected).abs().max() < 0.03


def test_thinning_keeps_a_random_part_of_each_window():
    counts = torch.zeros(4, 10)
    for key in range(2000):
        slots = sample_slots(torch.tensor([key]), 4, 10, False)
        assert torch.equal(slots.sort(1).values, torch.arange(10).expand(4, 10))
        counts.scatter_add_(1, slots[:, :3], torch.ones(4, 3))
    assert (counts / 2000 - 0.3).abs().max() < 0.05
    for windows, L, keep, n in ((4, 40, 0.34, 3), (1, 40, 0.1, 4), (3, 9, 0.01, 1)):
        attn = weft.make_attention("subsampled", heads=1, head_dim=4, windows=windows, keep=keep, sigma=0.0)
        kept = attn.draw(L)
        assert kept.shape == (windows, n) and all(len(set(row)) == n for row in kept.tolist())
        assert torch.equal(kept // (L // windows), torch.arange(windows)[:, None].expand(windows, n))
    assert torch.equal(attn.draw(9, torch.Generator().manual_seed(1)), attn.draw(9, torch.Generator().manual_seed(1)))


def orders_by_argsort(noise, lengths, sigma):
    """The definition, without optimisation."""
    parts = []
    for part in noise.double().split(lengths):
        home = 0 if sigma is None else torch.arange(len(part))
        parts.append((home + (1 if sigma is None else sigma) * part).argsort(stable=True))
    return torch.cat(parts)


@pytest.mark.parametrize("sigma", [None, 0.0, 0.3, 5.0, 1e3, 1e9])
def test_shuffles_are_the_argsort_of_their_noise(sigma):
    generator = torch.Generator().manual_seed(0)
    for seed in range(60):
        size, windows = 1 + seed * 7 % 40, 1 + seed % 6
        lengths = tuple((w + 1) * size for w in range(windows)) if seed % 2 else (size,) * windows
        draw = torch.rand if sigma is None or seed % 3 == 0 else torch.randn
        noise = draw(sum(lengths), generator=generator, dtype=[torch.float32, torch.float64][seed % 2])
        found = sampling.shuffle(noise, lengths, sigma)
        assert torch.equal(found, orders_by_argsort(noise, lengths, sigma))


@pytest.mark.parametrize("sigma", [None, 0.0, 0.2, 1e6])
@pytest.mark.parametrize("noise", ["random", "all alike", "as far as it goes"])
def test_no_two_keys_are_alike_and_no_sequence_reaches_the_next(sigma, noise):
    """So that every sorting algorithm gives the same order."""
    lengths = (1, 700, 5, 3000, 3000)
    values = {
        "random": torch.randn(sum(lengths)),
        "all alike": torch.full((sum(lengths),), 0.5),
        "as far as it goes": torch.tensor([-8.6, 8.6]).repeat(sum(lengths) // 2),
    }[noise]
    keys = np.empty(sum(lengths), np.int64)
    sampling.sort_keys(values.numpy(), lengths, None if sigma is None else sigma * 3000, 4095, keys)
    assert len(np.unique(keys)) == len(keys) and keys.min() > 0
    ends = np.cumsum(lengths)
    for end in ends[:-1]:
        assert keys[:end].max() < keys[end:].min()
    assert ((keys & 4095) == np.concatenate([np.arange(n) for n in lengths])).all()


@pytest.mark.parametrize("options", [{}, {"keep": 0.5}, {"biased": False}, {"layout": (6, 6)}])
def test_defaults_of_torch_do_not_change_a_sample(options):
    attn = weft.make_attention("subsampled", heads=1, head_dim=4, causal=True, **options)
    ours = attn.draw(36, torch.Generator().manual_seed(0))
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            assert torch.equal(attn.draw(36, torch.Generator("cpu").manual_seed(0)), ours)
    finally:
        torch.set_default_dtype(before)


def exact_law(height, width, sigma):
    """The probability of every placement, by enumeration."""
    cells = list(itertools.product(range(height), range(width)))
    weights = {}
    for order in itertools.permutations(range(len(cells))):
        energy = sum((cells[slot][axis] - cells[source][axis]) ** 2 / (2 * sigma[axis] ** 2)
                     for slot, source in enumerate(order) for axis in (0, 1))  # fmt: skip
        weights[order] = math.exp(-energy)
    total = sum(weights.values())
    return {order: weight / total for order, weight in weights.items()}


def frequencies(placements):
    orders, counts = np.unique(placements.reshape(len(placements), -1), axis=0, return_counts=True)
    return {tuple(int(s) for s in order): count / len(placements) for order, count in zip(orders, counts, strict=True)}


@pytest.mark.parametrize(("height", "width", "sigma"), [(3, 1, (1.0, 1.0)), (1, 3, (1.0, 1.0)), (2, 2, (1.0, 0.7)),
                                                       (3, 2, (0.8, 1.5))])  # fmt: skip
def test_chain_against_enumeration(height, width, sigma):
    chains = shuffle_grid(home(20000, height, width), sigma, 40, torch.Generator().manual_seed(0))
    exact, found = exact_law(height, width, sigma), frequencies(chains)
    assert max(abs(p - found.get(order, 0)) for order, p in exact.items()) < 0.012
    if (height, width) == (3, 1):  # the specification's own figures
        figures = {
            (0, 1, 2): 0.5395,
            (0, 2, 1): 0.1985,
            (1, 0, 2): 0.1985,
            (1, 2, 0): 0.0269,
            (2, 0, 1): 0.0269,
            (2, 1, 0): 0.0099,
        }
        assert max(abs(exact[order] - p) for order, p in figures.items()) < 1e-4


def test_draws_against_enumeration():
    """The mechanism advances a chain of the pool."""
    draws = [sample_placement(torch.tensor([key]), 3, 1, 1.0, 1.0, 3, 0, 0, False) for key in range(500)]
    exact, found = exact_law(3, 1, (1.0, 1.0)), frequencies(torch.stack(draws).numpy())
    assert max(abs(p - found.get(order, 0)) for order, p in exact.items()) < 0.07


def test_causal_bands_follow_the_law_of_their_prefix():
    """Rows enter band by band: the second band's slots are those of a chain on all rows so far."""
    draws = torch.stack([sample_placement(torch.tensor([key]), 4, 1, 1.0, 1.0, 2, 0, 0, False) for key in range(500)])
    first, second = draws[:, :2], draws[:, 2:]
    assert first.max() == 1 and second.max() == 3
    for found, exact, slots in ((first, exact_law(2, 1, (1, 1)), (0, 1)), (second, exact_law(4, 1, (1, 1)), (2, 3))):
        for source in range(4):
            for column, slot in enumerate(slots):
                p = sum(weight for order, weight in exact.items() if order[slot] == source)
                assert abs((found[:, column] == source).double().mean() - p) < 0.08


@pytest.mark.parametrize(("near", "sweeps"), [(False, 200), (True, 20)])
def test_swin_shuffle_spreads_as_reported(near, sweeps):
    """14 x 14, σ = 10.5: displacement 5.27 per axis (uniform: 5.70), and 0.31 stay in their own 7 x 7."""
    generator, sigma = torch.Generator().manual_seed(0), (10.5, 10.5)
    start = near_stationary(48, 14, 14, sigma, generator) if near else home(48, 14, 14)
    chains = shuffle_grid(start, sigma, sweeps, generator)
    y, x = np.divmod(np.arange(196).reshape(14, 14), 14)
    for axis, own in ((chains // 14, y), (chains % 14, x)):
        assert abs(np.sqrt(((axis - own) ** 2).mean()) - 5.27) < 0.12
    stay = (chains // 14 // 7 == y // 7) & (chains % 14 // 7 == x // 7)
    assert abs(stay.mean() - 0.31) < 0.02


def test_chains_that_start_near_their_distribution_spread_like_long_ones():
    """Displacements at the edge and in the middle of each axis, with different σ."""
    generator, sigma = torch.Generator().manual_seed(0), (4.0, 9.0)
    near = near_stationary(POOL, 16, 24, sigma, generator)
    assert (np.sort(near.reshape(POOL, -1), 1) == np.arange(384)).all()
    y, x = np.divmod(np.arange(384).reshape(16, 24), 24)
    found = []
    for chains in (shuffle_grid(near, sigma, 50, generator), shuffle_grid(home(POOL, 16, 24), sigma, 400, generator)):
        rows, columns = abs(chains // 24 - y), abs(chains % 24 - x)
        found.append([rows[:, 0], rows[:, 8], columns[:, :, 0], columns[:, :, 12]])
    for mine, theirs in zip(*found, strict=True):
        assert abs(mine.mean() / theirs.mean() - 1) < 0.1


def test_no_source_leaves_its_window():
    for shift in (0, 2):
        chains = shuffle_grid(home(20, 7, 9), (3.0, 3.0), 50, torch.Generator().manual_seed(0), window=4, shift=shift)
        y, x = np.divmod(np.arange(63).reshape(7, 9), 9)
        for axis, own in ((chains // 9, y), (chains % 9, x)):
            assert ((axis - shift) // 4 == (own - shift) // 4).all()
        assert (np.sort(chains.reshape(20, -1), 1) == np.arange(63)).all()
        assert (chains != np.arange(63).reshape(7, 9)).mean() > 0.5


def test_window_table():
    assert window_table(2, 4, (2, 2)).tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    shifted = window_table(3, 3, (2, 2), 1)
    assert shifted.tolist() == [[9, 9, 9, 0], [9, 9, 1, 2], [9, 3, 9, 6], [4, 5, 7, 8]]


def test_keys_are_what_a_generator_tells_apart():
    """A CPU generator uses only 32 bits of its seed."""
    a, b = (torch.rand(1, generator=torch.Generator().manual_seed(seed)) for seed in (5, 5 + KEYS))
    assert a == b


def test_two_dimensional_sigma_is_a_fraction_of_each_side():
    attn = weft.make_attention("subsampled", heads=1, head_dim=4, layout=(24, 6), windows=3, sigma=0.1)
    drawn = torch.stack([attn.draw(144, torch.Generator().manual_seed(seed)).flatten() for seed in range(40)]).numpy()
    slots = np.arange(144)
    down, across = drawn // 6 - slots // 6, drawn % 6 - slots % 6
    assert 2.0 < down[:, 36:108].std() < 2.8 and across.std() < 0.8
