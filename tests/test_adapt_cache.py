"""weft.cache: cached attention around the attention layers of models that exist."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from on_cpu import on_cpu  # noqa: F401
from test_adapt_swap import MODELS, Ours, encoder, noise

import weft

CACHEABLE = [name for name in MODELS if name != "nn.TransformerEncoder, seq first"]


@pytest.fixture(autouse=True)
def quiet():
    """An untrained cache says so when it is read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("model", CACHEABLE)
def test_every_layer_is_cached_and_undone(model):
    build, inputs = MODELS[model]
    subject, x = build(), inputs()
    with torch.no_grad():
        before = subject(x)
    state, modules = copy.deepcopy(subject.state_dict()), list(subject.modules())
    report = weft.cache(subject, ratio=0.5)
    found = [m for m in subject.modules() if isinstance(m, weft.CachedAttention)]
    assert len(found) == len(report.replaced) > 0 and not report.left
    subject.train()
    out = subject(x)
    out.square().mean().backward()
    assert all(int(m.cache.updates) == 1 for m in found)
    assert all(m.lam.grad is not None for m in found)
    subject.eval()
    with torch.no_grad():  # without gradients PyTorch has fast paths that must not pass us by
        assert not torch.allclose(subject(x), before, atol=1e-4)
    report.undo()
    assert [id(m) for m in subject.modules()] == [id(m) for m in modules]
    assert all(torch.equal(value, state[key]) for key, value in subject.state_dict().items() if "running" not in key)
    with torch.no_grad():
        torch.testing.assert_close(subject(x), before)


def test_the_memory_is_in_the_output():
    """Two caches of different pasts answer the same input differently, by the cached branch alone."""
    subject, x = encoder(), noise(2, 9, 24)
    weft.cache(subject, ratio=1.0)
    outs = []
    for seed in (5, 6):
        other = copy.deepcopy(subject).train()
        other(noise(2, 9, 24, seed=seed))
        with torch.no_grad():
            outs.append(other.eval()(x))
    assert not torch.allclose(*outs, atol=1e-4)


def test_padded_tokens_do_not_enter_the_cache():
    subject, x = encoder(), noise(2, 9, 24)
    weft.cache(subject, ratio=0.5, length=9)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 6:] = True
    changed = x.clone()
    changed[1, 6:] += 1
    states = []
    for t in (x, changed):
        other = copy.deepcopy(subject).train()
        other(t, src_key_padding_mask=padding)
        states.append(other.state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_options_where_and_what_is_left():
    subject = encoder()
    report = weft.cache(subject, ratio=0.25, where="layers.1.*", length=9, lambda_init=-1.0)
    assert report.left == {"layers.0.self_attn": "not chosen"}
    cached = subject.layers[1].self_attn
    assert (cached.ratio, cached.cache.length, float(cached.lam.detach()[0])) == (0.25, 9, -1.0)
    again = weft.cache(subject)
    assert "already" in again.left["layers.1.self_attn.inner"] and again.replaced == ["layers.0.self_attn"]
    assert "delayed=True" in weft.cache(Ours(causal=True), delayed=False).left["layers.0"]
    causal = Ours(causal=True)  # can only be delayed, and is
    assert [row.now for row in weft.cache(causal).rows] == ["cached, ratio 0.5, delayed"] * 2
    assert causal.layers[0].options.delayed
    assert "batch_first" in weft.cache(encoder(batch_first=False)).left["layers.0.self_attn"]
    decoder = torch.nn.TransformerDecoderLayer(24, 4, batch_first=True)
    assert set(weft.cache(decoder).left) == {"self_attn", "multihead_attn"}
    with pytest.raises(ValueError, match="wrap it"):
        weft.cache(weft.MultiheadAttention(24, 4))


def test_a_mechanism_inside_a_cache():
    subject, x = encoder(), noise(2, 9, 24)
    cached = weft.cache(subject, ratio=0.5)
    before = subject(x)
    swapped = weft.swap(subject, "linear")
    assert swapped.replaced == ["layers.0.self_attn.inner", "layers.1.self_attn.inner"]
    assert not torch.allclose(subject(x), before, atol=1e-5)
    swapped.undo(), cached.undo()
    assert not any(isinstance(m, weft.CachedAttention) for m in subject.modules())
