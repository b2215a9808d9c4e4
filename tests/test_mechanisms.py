"""Properties of single mechanisms beyond the sweeps of tests/test_promises.py."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from promises import HEAD_DIM, HEADS, qkv
from torch.overrides import TorchFunctionMode

import weft
from weft.attention.bigbird import random_plan
from weft.core.softmax import fused

EXACT = {"atol": 1e-10, "rtol": 1e-8}


def make(name, **options):
    torch.manual_seed(0)
    return weft.make_attention(name, heads=HEADS, head_dim=HEAD_DIM, **options).double().eval()


@pytest.mark.parametrize("length", (48, 320, 2048))
def test_bigbird_draws_each_block_once_and_never_one_of_the_band(length):
    plan = random_plan(length, 16, 3, 4, seed=1)
    n = length // 16
    for b in range(1, n - 1):
        for h in range(4):
            drawn = [x for x in plan[h, b - 1] if x >= 0]
            assert len(set(drawn)) == len(drawn)
            assert not set(drawn) & {0, b - 1, b, b + 1, n - 1}
            assert all(x * 16 < 1024 for x in drawn)


@pytest.mark.parametrize("length", (501, 1001, 2001))
def test_bigbird_draws_from_a_last_block_with_padding_as_from_a_full_one(length):
    """The published code pads to whole blocks first; 501 and 1,001 are the study's lengths on IMDb."""
    full = -(-length // 64) * 64
    np.testing.assert_array_equal(random_plan(length, 64, 3, 8, seed=0), random_plan(full, 64, 3, 8, seed=0))


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("L", (1, 64, 65, 130))
def test_performer_takes_large_keys(causal, L):
    attn = make("performer", features=5, causal=causal)
    q, k, v = qkv(L)
    torch.testing.assert_close(attn(q, 30 * k, v), attn.info.naive(attn, q, 30 * k, v), **EXACT)


@pytest.mark.parametrize("L", (64, 192, 704))
def test_full_has_finite_gradients_if_all_logits_are_very_negative(L):
    """On CUDA, cuDNN's backward gives NaN at these lengths."""
    attn = weft.make_attention("full", heads=1, head_dim=64)
    q, k, v = (0.1 * x.bfloat16() for x in qkv(L, B=1, H=1, D=64))
    q[..., 0], k[..., 0] = 1, -960  # every logit is near -120
    mask = torch.arange(L)[None] < L - 5
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = attn(*inputs, mask)
    exact = attn(*(x.detach().double() for x in inputs), mask)
    assert (out - exact).norm() < 2e-2 * exact.norm()
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), inputs))


@pytest.mark.parametrize("L", (192, 256))
@pytest.mark.parametrize("compiled", (False, True))
def test_masked_softmax_avoids_cudnn_where_its_backward_fails(compiled, L):
    class Watch(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is F.scaled_dot_product_attention:
                used.append(torch.backends.cuda.cudnn_sdp_enabled())
            return function(*args, **(kwargs or {}))

    def watched(function, _):
        def run(*inputs, **options):
            with Watch():
                return function(*inputs, **options)

        return run

    used, before = [], torch.backends.cuda.cudnn_sdp_enabled()
    run = torch.compile(fused, fullgraph=True, backend=watched) if compiled else watched(fused, None)
    run(*qkv(L), attn_mask=torch.ones(1, 1, 1, L, dtype=torch.bool))
    run(*qkv(L))
    assert used == [before and L == 256, before] and torch.backends.cuda.cudnn_sdp_enabled() == before


def test_performer_features_are_orthogonal_and_approach_softmax():
    attn = make("performer", features=HEAD_DIM)
    directions = torch.nn.functional.normalize(attn.projection, dim=-1)
    torch.testing.assert_close(directions @ directions.T, torch.eye(HEAD_DIM, dtype=torch.float64), atol=1e-6, rtol=0)
    q, k, v = (x * 0.5 for x in qkv(20))
    exact = make("full")(q, k, v)

    def error(features):
        attn = make("performer", features=features, epsilon=0.0)
        total = []
        for seed in range(8):
            torch.manual_seed(seed)
            attn.redraw()
            total.append((attn(q, k, v) - exact).norm() / exact.norm())
        return torch.stack(total).mean()

    assert error(2048) < 0.25 * error(32) and error(2048) < 0.1


def test_sinkhorn_really_sorts():
    """The sorting has an effect and a gradient (in the published code it has neither)."""
    attn = make("sinkhorn", block_size=3, max_length=12)
    q, k, v = qkv(12)
    before = attn(q, k, v)
    before.square().sum().backward()
    assert attn.sort.grad.abs().max() > 1e-3
    with torch.no_grad():
        attn.sort.mul_(-1)
    assert (attn(q, k, v) - before).abs().max() > 1e-3


def test_reformer_does_not_read_k():
    q, k, v = qkv(12)
    attn = make("reformer", chunk=3, buckets=4)
    assert torch.equal(attn(q, k, v), attn(q, torch.randn_like(k), v)) and not attn.reads_k


@pytest.mark.parametrize("name", ("combiner-logsparse", "logsparse", "subsampled"))
def test_the_default_device_does_not_matter(name):
    attn = make(name, causal=True).train()
    q, k, v = qkv(1200 if name == "subsampled" else 130, B=1)
    torch.manual_seed(0)
    expected = attn(q, k, v)
    torch.manual_seed(0)
    with torch.device("meta"):
        assert torch.equal(attn(q, k, v), expected)


def test_centroids_learn_in_training_only():
    attn = make("routing", clusters=3, decay=0.5)
    q, k, v = qkv(20)
    start = attn.clusters.centroids.clone()
    attn.eval()(q, k, v)
    attn.train()(q, k, v)  # a call never sees its own batch
    assert torch.equal(attn.clusters.centroids, start)
    once = attn(q, k, v)
    assert not torch.equal(attn.clusters.centroids, start)
    torch.testing.assert_close(attn.clusters.centroids.norm(dim=-1), torch.ones(HEADS, 3).double())
    assert torch.equal(attn.eval()(q, k, v), once)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_centroids_learn_in_half_precision(dtype):
    """Steps of 0.1% are below the rounding error of a centroid in half precision."""
    exact = make("routing", clusters=3).train()
    rounded = copy.deepcopy(exact).to(dtype)
    start = exact.clusters.centroids.clone()
    for seed in range(30):
        q, k, v = qkv(20, seed=seed)
        exact(q, k + 2, v), rounded(q.to(dtype), (k + 2).to(dtype), v.to(dtype))
    moved = [attn.clusters.centroids.double() - start for attn in (exact, rounded)]
    assert (moved[0] - moved[1]).norm() < 0.1 * moved[0].norm()


def test_centroids_are_exact_if_assigned_in_half_precision():
    attn = make("routing", clusters=3)
    attn.load_state_dict({name: x.bfloat16() for name, x in attn.state_dict().items()}, assign=True)
    assert {x.dtype for x in attn.buffers()} == {torch.float32}


def test_centroids_are_exact_if_created_in_half_precision():
    torch.set_default_dtype(torch.bfloat16)
    try:
        attn = weft.make_attention("routing", heads=2, head_dim=6)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {x.dtype for x in attn.buffers()} == {torch.float32}


@pytest.mark.parametrize(("name", "option"), [("longformer", "window"), ("local", "block_size")])
@pytest.mark.parametrize("causal", [False, True])
def test_a_changed_window_counts_everywhere(name, option, causal):
    """In parallel, in packed documents and in decoding."""
    attn, wanted = (make(name, causal=causal, **{option: n}) for n in (50, 7))
    setattr(attn, option, 7)
    q, k, v = qkv(93)
    segments = weft.Segments.from_lengths([[48, 45]] * len(q), device=q.device)
    torch.testing.assert_close(attn(q, k, v), wanted(q, k, v))
    torch.testing.assert_close(attn(q, k, v, segments=segments), wanted(q, k, v, segments=segments))
    if causal:
        state, outs = attn.start(len(q)), []
        for t in range(20):
            out, state = attn.step(*(x[:, :, t : t + 1] for x in (q, k, v)), state)
            outs.append(out)
        torch.testing.assert_close(torch.cat(outs, 2), wanted(q, k, v)[:, :, :20])
