"""weft.cache on existing models."""

from __future__ import annotations

import copy
import threading
import warnings

import pytest
import torch
from test_adapt_swap import MODELS, Ours, encoder, noise
from torch.nn.utils import prune

import weft

CACHEABLE = [name for name in MODELS if name != "nn.TransformerEncoder, seq first"]


@pytest.fixture(autouse=True)
def quiet():
    """An untrained cache warns when it is read."""
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
    assert not any(m._forward_pre_hooks for m in modules)
    assert all(torch.equal(value, state[key]) for key, value in subject.state_dict().items() if "running" not in key)
    with torch.no_grad():
        torch.testing.assert_close(subject(x), before)


class Adapter(torch.nn.Module):
    def __init__(self, base: torch.nn.Linear):
        super().__init__()
        self.base, self.down = base, torch.nn.Linear(base.in_features, 2, bias=False)
        self.up = torch.nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))

    @property
    def weight(self) -> torch.Tensor:  # as in peft, also the bias
        return self.base.weight

    @property
    def bias(self) -> torch.Tensor:
        return self.base.bias


def test_an_adapter_around_the_output_projection():
    """It gets the mixed heads, and so equals the same adapter merged into the weights."""
    subject, x = encoder(), noise(2, 9, 24)
    weft.cache(subject, ratio=1.0)
    layer = subject.layers[0].self_attn.inner
    layer.out_proj = adapter = Adapter(layer.out_proj)
    subject.train()(x)
    subject.eval()
    for model in (subject, copy.deepcopy(subject)):
        with torch.no_grad():
            apart, inner = model(x), model.layers[0].self_attn.inner
            inner.out_proj = inner.out_proj.base
            inner.out_proj.weight += adapter.up.weight @ adapter.down.weight
            torch.testing.assert_close(model(x), apart)


@pytest.mark.parametrize("name", ["update_gate", "reset_gate", "candidate"])
def test_an_adapter_around_a_gate(name):
    subject, x = encoder(), noise(2, 9, 24)
    weft.cache(subject, ratio=0.5, gate_bias=True)
    subject.train()(x)  # from now on, the cache is not zero
    merged, outs = copy.deepcopy(subject), []
    cache, other = subject.layers[0].self_attn.cache, merged.layers[0].self_attn.cache
    setattr(cache, name, adapter := Adapter(getattr(cache, name)))
    with torch.no_grad():
        getattr(other, name).weight += adapter.up.weight @ adapter.down.weight
    for model in (subject, merged):
        outs.append(model(x))
    torch.testing.assert_close(*outs)
    outs[0].square().sum().backward()
    assert adapter.up.weight.grad.any()


@pytest.mark.parametrize("path", ["cache.update_gate", "cache.reset_gate", "cache.candidate"])
def test_a_pruned_gate(path):
    """A hook computes its weight in every call, so it may change between them."""
    torch.manual_seed(0)
    pruned, x = weft.CachedAttention(weft.MultiheadAttention(24, 4), length=5), noise(2, 9, 24)
    plain = copy.deepcopy(pruned)
    gate, weight = pruned.get_submodule(path), plain.get_submodule(path).weight
    prune.l1_unstructured(gate, "weight", 0.5)
    for _ in range(3):
        with torch.no_grad():
            weight.copy_(gate.weight_orig.mul_(1.5) * gate.weight_mask)
        outs = [model(x) for model in (pruned, plain)]
        torch.testing.assert_close(*outs)
        outs[0].square().sum().backward()


@pytest.mark.parametrize("update_from", ["input", "output"])
def test_a_pruned_output_projection(update_from):
    """An output that is written to the cache comes from the weight that the hook computes."""
    pruned, x = encoder(), noise(2, 9, 24)
    weft.cache(pruned, ratio=1.0, update_from=update_from)
    plain = copy.deepcopy(pruned)
    projection, weight = (model.layers[0].self_attn.inner.out_proj for model in (pruned, plain))
    weight = weight.weight
    prune.l1_unstructured(projection, "weight", 0.5)
    for _ in range(3):
        with torch.no_grad():
            weight.copy_(projection.weight_orig.mul_(1.5) * projection.weight_mask)
        outs = [model.train()(x) for model in (pruned, plain)]
        torch.testing.assert_close(*outs)
        outs[0].square().sum().backward()


def test_threads_share_a_layer():
    """Two calls that meet before the output projection of a layer whose heads are mixed there."""
    subject, inputs, outs = encoder(), (noise(2, 9, 24), noise(2, 9, 24, seed=1)), {}
    weft.cache(subject, ratio=1.0)
    subject.train()(noise(2, 9, 24, seed=2))
    subject.eval().requires_grad_(False)
    alone, meeting = [subject(x) for x in inputs], threading.Barrier(2, timeout=20)

    def wait(*given):
        meeting.wait()

    subject.layers[0].self_attn.inner.out_proj.register_forward_pre_hook(wait, prepend=True)

    def call(i):
        with torch.no_grad():
            outs[i] = subject(inputs[i])

    threads = [threading.Thread(target=call, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close([outs[0], outs[1]], alone)


def test_the_memory_is_in_the_output():
    """Two caches with different histories give different outputs for the same input."""
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


@pytest.mark.parametrize("padded", [False, True])
def test_a_causal_mask_of_pytorch_is_refused_or_delayed(padded):
    """Also if the hint `is_causal` is wrong."""
    x, causal = noise(2, 9, 24), torch.nn.Transformer.generate_square_subsequent_mask(9)
    masks = {"src_key_padding_mask": torch.arange(9) >= torch.tensor([[9], [7]])} if padded else {}
    subject = encoder()
    report = weft.cache(subject, length=4)
    for hint in (None, False, True):
        with pytest.raises(ValueError, match="delayed=True"):
            subject.train()(x, mask=causal, is_causal=hint, **masks)
    report.undo()
    weft.cache(subject, length=4, delayed=True)
    subject.train()
    changed = x.clone()
    changed[:, 5:] += 1
    for hint in (None, False, True):
        outs = []
        for t in (x, changed):
            other = copy.deepcopy(subject)
            other(x, mask=causal, is_causal=hint, **masks)
            outs.append(other(t, mask=causal, is_causal=hint, **masks))
        assert torch.equal(outs[0][:, :5], outs[1][:, :5])
        assert not torch.allclose(outs[0][:, 5:7], outs[1][:, 5:7], atol=1e-3)
    # A window both ways hides nothing from one side only, and needs no delay.
    window = (torch.arange(9)[:, None] - torch.arange(9)).abs() > 2
    plain = encoder()
    weft.cache(plain, length=4)
    assert plain.train()(x, mask=window, **masks).isfinite().all()
    pairs = torch.zeros(9, 9, dtype=torch.bool)
    pairs[:, 6:] = True  # no query attends to these: they count as padding and stay out of the cache
    states = []
    for t in (x, torch.cat([x[:, :6], x[:, 6:] + 1], 1)):
        other = copy.deepcopy(plain)
        other(t, mask=pairs)
        states.append(other.layers[0].self_attn.cache.cache)
    assert torch.equal(*states)


def test_positional_masks():
    inner = torch.nn.MultiheadAttention(24, 4, batch_first=True)
    cached = weft.CachedAttention(inner, length=4)
    x, padding = noise(2, 9, 24), torch.arange(9) >= torch.tensor([[9], [5]])
    changed = x.masked_fill(padding[..., None], 3.0)
    states = []
    for t in (x, changed):
        other = copy.deepcopy(cached)
        other(t, t, t, padding)
        states.append(other.cache.cache)
    assert torch.equal(*states)
    with pytest.raises(ValueError, match="cross attention"):
        cached(x, x[:, :5], x[:, :5])
    with pytest.raises(ValueError, match="nested"):
        cached(torch.nested.nested_tensor([x[0], x[1, :5]]))


def test_options_where_and_skipped_layers():
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
    assert weft.cache(decoder, delayed=True).replaced == ["self_attn"]
    with pytest.raises(ValueError, match="use weft.CachedAttention"):
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


@pytest.mark.parametrize("first", ["swap", "cache"])
@pytest.mark.parametrize("model", CACHEABLE)
def test_a_closed_cache_is_the_mechanism_inside(model, first):
    build, inputs = MODELS[model]
    to = {"to": "local", "block_size": 3} if model == "timm Swin" else {"to": "linear"}
    alone, subject, x = build(), build(), inputs()
    weft.swap(alone, **to)
    steps = [lambda: weft.swap(subject, **to), lambda: weft.cache(subject, ratio=0.5)]
    for step in steps if first == "swap" else reversed(steps):
        assert step().replaced
    with torch.no_grad():
        for module in subject.modules():
            if isinstance(module, weft.CachedAttention):
                module.lam.fill_(-1e4)
        torch.testing.assert_close(subject(x), alone(x))
