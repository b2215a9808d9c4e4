"""Samples of subsampled attention that the GPU draws: sorted order statistics of the right noise, reproducible."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from counters import mixed, normals, random_words, words
from promises import DEVICE
from torch.utils.checkpoint import checkpoint

import weft
from weft.attention.subsampled import device
from weft.attention.subsampled.sampling import causal_noise, sample_windows
from weft.attention.subsampled.sampling_2d import FRESH_SWEEPS, POOL, _pool

pytest.importorskip("triton")


def draw(seed, windows, size, sigma, gaussian, causal, rank=0, kept=None):
    key = torch.tensor([seed])
    options = windows, size, kept or size, sigma, gaussian, causal, rank
    return device.sample_windows((key,), options)[0].cpu().numpy()


def expected(seed, windows, size, sigma, gaussian, causal, rank=0):
    """The same, sorted by NumPy."""
    low, high = words(seed)
    high = high ^ mixed(np.uint32(rank))
    at = np.arange(causal_noise(windows, size) if causal else windows * size)
    noise = normals(at, low, high) if gaussian else random_words(at, low, high) / 2**32
    found, start = [], 0
    for w in range(windows):
        n = (w + 1) * size if causal else windows * size
        value = noise[start : start + n] + (0 if sigma is None else np.arange(n) / sigma)
        order = np.argsort(value, kind="stable")
        found.append(np.sort(order[w * size : (w + 1) * size]))
        start += n if causal else 0
    return np.stack(found)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("windows", "size", "sigma", "gaussian"),
    [(4, 10, 8.0, True), (3, 7, None, False), (3, 7, 7.0, False), (2, 1, 0.5, True), (5, 9, 9.0, True)],
)
def test_samples_are_order_statistics(windows, size, sigma, gaussian, causal):
    same = 0
    for seed, rank in ((0, 0), (1, 1), (2**61 + 12345, 2)):
        mine = draw(seed, windows, size, sigma, gaussian, causal, rank)
        truth = expected(seed, windows, size, sigma, gaussian, causal, rank)
        assert (np.diff(mine, axis=1) > 0).all()
        if not causal:
            assert (np.sort(mine.ravel()) == np.arange(windows * size)).all()
        same += (mine == truth).all()
    assert same >= 2  # fixed point and float32 may exchange two neighbours at the edge of a window


def test_thinning_keeps_a_random_part_of_each_window():
    for seed, causal in ((0, False), (3, True)):
        whole, some = (draw(seed, 3, 7, 4.0, True, causal, kept=kept) for kept in (7, 3))
        start = 2 * (causal_noise(3, 7) if causal else 21)  # after the words of the noise
        words_of_slots = random_words(start + np.arange(21), *words(seed)).reshape(3, 7)
        kept = np.sort(words_of_slots.argsort(1)[:, :3])
        assert (some == np.take_along_axis(whole, kept, 1)).all()


def by_definition(seed, height, width, rows, columns, channels, sigma, causal, window, shift, rank):
    """The swaps of `sampling_2d`, one by one."""
    low, high = words(seed)
    high, cells, band = high ^ mixed(np.uint32(rank)), height * width, rows if causal else height
    pools = _pool(height, width, sigma, band, window, shift)
    chain = random_words(np.array(len(pools) * cells * 2 * FRESH_SWEEPS), low, high) % POOL
    across = -(-width // columns)
    found = [[] for _ in range(-(-height // rows) * across)]
    for b, pool in enumerate(pools):
        state, end = pool[chain].copy(), pool.shape[1]
        for sweep, axis in itertools.product(range(FRESH_SWEEPS), (0, 1)):
            at = np.arange(cells).reshape(height, width) + ((b * FRESH_SWEEPS + sweep) * 2 + axis) * cells
            u = ((random_words(at, low, high) >> np.uint32(8)) + 0.5) / 2**24
            chance = np.log(u / (1 - u)) * sigma[axis] ** 2
            for first, (y, x) in itertools.product((1, 2), np.ndindex(end, width)):
                i, before = ((y, (y - 1, x)), (x, (y, x - 1)))[axis]
                if i < first or (i - first) % 2 or (window and (i - shift) % window == 0):
                    continue
                home = [state[place] // width if axis == 0 else state[place] % width for place in (before, (y, x))]
                if home[0] - home[1] > np.floor(chance[y, x]):
                    state[before], state[y, x] = state[y, x], state[before]
        for y, x in np.ndindex(end, width):
            if y >= b * band:
                tokens = state[y, x] * channels + np.arange(channels)
                found[y // rows * across + x // columns] += tokens.tolist()
    size = rows * columns * channels
    return np.array([sorted(row) + [cells * channels] * (size - len(row)) for row in found])


@pytest.mark.parametrize(
    ("height", "width", "rows", "columns", "channels", "causal", "window", "shift"),
    [(5, 4, 2, 4, 1, True, 0, 0), (3, 4, 2, 3, 3, False, 0, 0), (5, 6, 2, 2, 1, False, 4, 2)],
)
def test_placements_are_the_swaps_of_their_noise(height, width, rows, columns, channels, causal, window, shift):
    seed, rank, sigma = 2**61 + 12345, 2, (1.5, 0.8)
    sizes, rest = (height, width, rows, columns, channels), (causal, window, shift, rank)
    options = (*sizes, rows * columns * channels, *sigma, *rest)
    mine = device._place((torch.tensor([seed]),), options)[0].cpu().numpy()
    assert (mine == by_definition(seed, *sizes, sigma, *rest)).all()


def test_samples_of_too_many_keys_are_refused():
    """The kernels would write outside the keys: they count them with 32 bits."""
    options = (2**20, 16, 16, None, False, True, 0)
    with pytest.raises(ValueError, match="1,048,576 windows of 16 tokens .* use fewer windows"):
        device.sample_windows((torch.zeros(1, dtype=torch.int64, device=DEVICE),), options)


@pytest.mark.parametrize(("causal", "options"), [(True, {}), (False, {"keep": 0.5})])
def test_a_call_that_draws_equals_the_call_with_its_sample(monkeypatch, causal, options):
    """Three times: the third call is a replay."""
    monkeypatch.setattr(weft.attention.subsampled, "can_draw", lambda *call: True)  # in Triton's interpreter too
    shape = {"heads": 1, "head_dim": 16, "causal": causal, "backend": "triton"}
    attn = weft.make_attention("subsampled", windows=3, **shape, **options).to(DEVICE)
    for _ in range(3):
        inputs = [torch.randn(1, 1, 20, 16, device=DEVICE, requires_grad=True) for _ in range(3)]
        out = attn(*inputs)
        with attn.fixed(attn.last_indices.cpu()):
            again = attn(*inputs)
        torch.testing.assert_close(out, again)
        found, expected = (torch.autograd.grad(x.square().sum(), inputs) for x in (out, again))
        torch.testing.assert_close(found, expected)


def test_compiled_code_draws_the_key_of_eager_code():
    keys, x = [], torch.zeros(3)
    compiled = torch.compile(lambda x: device.draw_device_key(x), backend="aot_eager", fullgraph=True)
    for draw_key in (device.draw_device_key, compiled):
        torch.manual_seed(0)
        keys += [draw_key(x), draw_key(x)]
    assert torch.equal(keys[0], keys[2]) and torch.equal(keys[1], keys[3]) and not torch.equal(keys[0], keys[1])


def test_samples_follow_the_law_of_the_cpu():
    """How often each source is in each window, by `expected`, against the CPU's sampler."""
    windows, size, n = 3, 4, 400
    for causal, sigma in ((True, 3.0), (False, 3.0), (True, None)):
        counts = np.zeros((2, windows, windows * size))
        for seed in range(n):
            mine = expected(seed * 7919 + 1, windows, size, sigma, sigma is not None, causal)
            key = torch.tensor([seed])
            theirs = sample_windows(key, windows, size, sigma, sigma is not None, causal, False).numpy()
            for side, sample in enumerate((mine, theirs)):
                for w in range(windows):
                    counts[side, w, sample[w]] += 1
        p = counts.sum(0) / (2 * n)
        z = np.abs(counts[0] - counts[1]) / n / np.sqrt(2 * p * (1 - p) / n + 1e-9)
        assert z.max() < 4.5, (causal, sigma)


@pytest.mark.skipif(DEVICE == "cpu", reason="the GPU's generator")
@pytest.mark.parametrize(
    "options", [{}, {"keep": 0.5}, {"layout": (32, 32)}, {"layout": (32, 32), "keep": 0.5}], ids=str
)
def test_the_gpu_draws_for_both_backends(options):
    attn = weft.make_attention("subsampled", heads=1, head_dim=16, causal=True, backend="torch", **options)
    q = torch.randn(1, 1, 1024, 16)
    attn(q, q, q)  # makes the chains of 2-D samples
    torch.cuda.set_sync_debug_mode("error")
    try:
        samples = []
        for seed, backend in ((0, "torch"), (0, "triton"), (1, "triton")):
            torch.manual_seed(seed)
            attn.backend = backend
            attn(q, q, q)
            samples.append(attn.last_indices)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert samples[0].is_cuda and torch.equal(samples[0], samples[1]) and not torch.equal(samples[1], samples[2])
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        attn(q, q, q)
    graph.replay()
    first = attn.last_indices.clone()
    graph.replay()
    assert not torch.equal(first, attn.last_indices)


@pytest.mark.skipif(DEVICE == "cpu", reason="the GPU's generator")
@pytest.mark.parametrize(("name", "dropout"), [("subsampled", 0.0), ("local", 0.3)])
def test_activation_checkpointing_repeats_what_was_drawn(name, dropout):
    attn = weft.make_attention(name, heads=2, head_dim=16, causal=True, dropout=dropout, backend="triton")
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        q = torch.randn(1, 2, 1024, 16).requires_grad_()
        out = checkpoint(attn, q, q * 2, q + 1, use_reentrant=False) if checkpointed else attn(q, q * 2, q + 1)
        torch.rand(3)  # others draw in between
        results.append((out, *torch.autograd.grad(out.square().sum(), q)))
    for plain, recomputed in zip(*results, strict=True):
        assert torch.equal(plain, recomputed)
