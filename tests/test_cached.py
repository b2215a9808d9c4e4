"""Cached attention by its definition: the paper's equations, its extremes, and every layer it can wrap."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from weft import CachedAttention, MultiheadAttention
from weft.layers.cached.layer import _joined
from weft.layers.cached.resample import resample, resample_grid
from weft.models.pvt import SpatialReductionAttention


def layer(dim: int = 16, heads: int = 4, seed: int = 0, **options: object) -> CachedAttention:
    torch.manual_seed(seed)
    return CachedAttention(MultiheadAttention(dim, heads).double(), **options)


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_hand(c: CachedAttention, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
    """One training step of the paper's definition, sample by sample and head by head: output and next cache."""
    Wu, Wr, Wc = c.cache.update_gate.weight, c.cache.reset_gate.weight, c.cache.candidate.weight
    Tm, T, H = cache.shape[0], x.shape[1], c.heads
    after = []
    for sample in x:
        picked = torch.stack([sample[(i * T) // Tm, : c.width] for i in range(Tm)])
        both = torch.cat([picked, cache], 1)
        update, reset = torch.sigmoid(both @ Wu.T), torch.sigmoid(both @ Wr.T)
        candidate = torch.cat([picked, reset * cache], 1) @ Wc.T
        after.append((1 - update) * cache + update * candidate)
    new = sum(after) / len(after)
    d, narrow = c.inner.head_dim, c.width // H
    rows = []
    for sample in x:
        heads = []
        for h in range(H):
            wide, thin = slice(h * d, (h + 1) * d), slice(h * narrow, (h + 1) * narrow)
            q, k, v = (sample @ w.weight[wide].T for w in (c.inner.q, c.inner.k, c.inner.v))
            own = torch.softmax(q @ k.T / d**0.5, -1) @ v
            q = sample[:, : c.width] @ c.memory.q.weight[thin].T
            k, v = new @ c.memory.k.weight[thin].T, new @ c.memory.v.weight[thin].T
            memory = torch.softmax(q @ k.T / narrow**0.5, -1) @ v
            share = torch.sigmoid(c.lam[h])
            own = (1 - share) * own
            heads.append(torch.cat([own[:, :narrow] + share * memory, own[:, narrow:]], 1))
        rows.append(torch.cat(heads, 1) @ c.inner.out.weight.T)
    return torch.stack(rows), new


@pytest.mark.parametrize(("ratio", "length", "T"), [(0.5, 7, 7), (0.5, 5, 11), (0.25, 13, 6), (1.0, 3, 1)])
def test_equals_the_papers_equations(ratio: float, length: int, T: int) -> None:
    c = layer(ratio=ratio, length=length)
    c.lam.data = tokens(4, seed=5)
    cache = torch.zeros(length, c.width, dtype=torch.float64)
    for step in range(3):
        x = tokens(3, T, 16, seed=step)
        expected, cache = by_hand(c, x, cache)
        torch.testing.assert_close(c(x), expected)
        torch.testing.assert_close(c.cache.cache[0], cache)
        cache = cache.detach()
    assert c.cache.updates == 3


def test_the_papers_worked_example() -> None:
    inner = MultiheadAttention(2, 1).double()
    c = CachedAttention(inner, 0.5, 2)
    with torch.no_grad():
        for linear in (inner.q, inner.k, inner.v, inner.out, c.memory.q, c.memory.k, c.memory.v):
            linear.weight.copy_(torch.eye(len(linear.weight)))
        c.cache.update_gate.weight.copy_(torch.tensor([[0.5, -0.5]]))
        c.cache.reset_gate.weight.copy_(torch.tensor([[1.0, 1.0]]))
        c.cache.candidate.weight.copy_(torch.tensor([[1.0, 0.5]]))
    x = torch.tensor([[[1.0, 0], [0, 1]], [[2, 1], [-1, 0]]], dtype=torch.float64)
    first = [[[0.716918, 0.165119], [0.378499, 0.334881]], [[1.462237, 0.496482], [-0.294715, 0.053521]]]
    second = [[[1.009398, 0.165119], [0.484620, 0.334881]], [[1.766617, 0.496482], [-0.374953, 0.053521]]]
    near = {"rtol": 0, "atol": 1e-6}
    torch.testing.assert_close(c(x), torch.tensor(first, dtype=torch.float64), **near)
    slots = torch.tensor([[[1.042288], [-0.188770]]], dtype=torch.float64)
    torch.testing.assert_close(c.cache.cache, slots, **near)
    torch.testing.assert_close(c(x), torch.tensor(second, dtype=torch.float64), **near)
    torch.testing.assert_close(c.eval()(x), torch.tensor(second, dtype=torch.float64), **near)


def test_extreme_values_of_lambda() -> None:
    x = tokens(2, 6, 16)
    c = layer()
    c.lam.data.fill_(-torch.inf)
    assert torch.equal(c(x), c.inner(x))
    c.lam.data.fill_(torch.inf)
    own, memory = c.branches(x)
    expected = F.pad(memory, (0, 2)).transpose(1, 2)  # nothing but the memory, zeros beside it
    torch.testing.assert_close(c.eval()(x), c.inner.merge(expected))


@pytest.mark.parametrize("gate", [-1e3, 1e3])
def test_extreme_values_of_the_update_gate(gate: float) -> None:
    c = layer(gate_bias=True, length=6)
    c.cache.cache = tokens(1, 6, 8, seed=3)
    before = c.cache.cache.clone()
    c.cache.update_gate.bias.data.fill_(gate)
    x = tokens(2, 6, 16)
    c(x)
    if gate < 0:
        assert torch.equal(c.cache.cache, before)
    else:
        both = torch.cat([x[..., :8], before.expand(2, -1, -1)], -1)
        reset = c.cache.reset_gate(both).sigmoid()
        candidate = c.cache.candidate(torch.cat([x[..., :8], reset * before], -1))
        torch.testing.assert_close(c.cache.cache, candidate.mean(0, keepdim=True))


def test_each_sample_may_read_its_own_cache() -> None:
    mean, own = layer(length=6), layer(length=6, memory="per_sample")
    x = tokens(3, 6, 16)
    together = own(x)
    assert not torch.allclose(mean(x), together)
    torch.testing.assert_close(mean.cache.cache, own.cache.cache)
    for i in range(3):
        torch.testing.assert_close(layer(length=6)(x[i : i + 1]), together[i : i + 1])


def test_gradients_stay_within_a_step_and_reach_every_weight() -> None:
    c = layer(length=6)
    first, second = tokens(2, 6, 16).requires_grad_(), tokens(2, 6, 16, seed=2).requires_grad_()
    c(first)
    c(second).square().sum().backward()
    assert first.grad is None and second.grad is not None
    for name, p in c.named_parameters():
        assert p.grad is not None and p.grad.abs().max() > 0, name
    assert torch.autograd.gradcheck(lambda x: _one_step(c, x), (tokens(2, 3, 16).requires_grad_(),))


def _one_step(c: CachedAttention, x: Tensor) -> Tensor:
    c.reset()
    return c(x)


def test_channels_are_rounded_to_whole_heads() -> None:
    assert layer(410, 10, ratio=0.5, length=2).width == 200
    assert layer(16, 4, ratio=0.01, length=2).width == 4
    inside = CachedAttention(MultiheadAttention(12, 2, head_dim=3), ratio=1.0)
    assert inside.width == 6 and inside(torch.randn(1, 4, 12)).shape == (1, 4, 12)
    wide = CachedAttention(MultiheadAttention(12, 2, head_dim=20))
    assert wide.width == 6 and wide(torch.randn(1, 4, 12)).shape == (1, 4, 12)


@pytest.mark.parametrize("how", ["nearest", "linear", "area"])
@pytest.mark.parametrize(("T", "n"), [(7, 7), (9, 4), (4, 9), (1, 5), (13, 1)])
def test_resampling_equals_pytorch(how: str, T: int, n: int) -> None:
    x = tokens(2, T, 3)
    expected = F.interpolate(x.transpose(1, 2), size=n, mode=how).transpose(1, 2)
    torch.testing.assert_close(resample(x, n, None, how)[0], expected)
    torch.testing.assert_close(resample(x, n, torch.ones(2, T, dtype=torch.bool), how)[0], expected)


@pytest.mark.parametrize("how", ["linear", "area"])
def test_resampling_of_long_inputs_is_precise(how: str) -> None:
    x = 1 + torch.randn(1, 1000, 4, dtype=torch.float64)
    exact = resample(x, 300, None, how)[0]
    for dtype in (torch.bfloat16, torch.float16):
        got = resample(x.to(dtype), 300, None, how)[0]
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), exact, atol=0.03, rtol=0)


@pytest.mark.parametrize("how", ["nearest", "linear", "area"])
def test_resampling_sees_real_tokens_only(how: str) -> None:
    x = tokens(4, 9, 3)
    valid = torch.rand(4, 9, generator=torch.Generator().manual_seed(0)) > 0.5
    valid[0], valid[1] = False, True
    x[~valid] = torch.nan
    got, alive = resample(x, 5, valid, how)
    assert alive is not None and alive.tolist() == [False, True, True, True]
    assert (got[0] == 0).all()
    for b in (1, 2, 3):
        torch.testing.assert_close(got[b : b + 1], resample(x[b : b + 1, valid[b]], 5, None, how)[0])


def test_images_may_be_resampled_as_images() -> None:
    image = tokens(1, 3, 4, 6)
    expected = F.interpolate(image, size=(2, 3)).flatten(2).transpose(1, 2)
    flat = image.flatten(2).transpose(1, 2)
    torch.testing.assert_close(resample_grid(flat, (4, 6), (2, 3)), expected)
    c = layer(grid=(2, 3), prefix=1, resample="2d")
    c(tokens(2, 25, 16), grid=(4, 6))
    assert c.cache.cache.shape == (1, 7, 8)
    with pytest.raises(ValueError, match="set grid"):
        c(tokens(2, 25, 16))


def test_padding_never_enters_the_cache() -> None:
    """A padded batch writes the same as its samples one by one, without padding."""
    x, lengths = tokens(4, 9, 16), (9, 4, 1, 0)
    valid = torch.arange(9) < torch.tensor(lengths)[:, None]
    start = tokens(1, 5, 8, seed=7)
    c = layer(length=5)
    c.cache.cache = start
    padded = x.masked_fill(~valid[..., None], 1e6).requires_grad_()
    y = c(padded, valid)
    one_by_one = []
    for b in range(3):
        alone = layer(length=5)
        alone.cache.cache = start
        alone(x[b : b + 1, : lengths[b]])
        one_by_one.append(alone.cache.cache)
    torch.testing.assert_close(c.cache.cache, torch.stack(one_by_one).mean(0))
    y[valid].square().sum().backward()
    assert (padded.grad[~valid] == 0).all() and padded.grad[0].abs().max() > 0
    nothing = layer(length=5)
    nothing.cache.cache = start
    nothing(x, torch.zeros(4, 9, dtype=torch.bool))
    assert torch.equal(nothing.cache.cache, start)


def test_padding_does_not_reach_its_neighbours_in_the_convolution() -> None:
    c, other = layer(position="conv", length=9), layer(position="conv", length=9)
    x = tokens(2, 9, 16)
    valid = torch.arange(9) < torch.tensor([[9], [5]])
    padded = x.masked_fill(~valid[..., None], 5.0).requires_grad_()
    y = c(padded, valid)
    torch.testing.assert_close(y[valid], other(x.masked_fill(~valid[..., None], 0), valid)[valid])
    y[valid].square().sum().backward()
    assert (padded.grad[~valid] == 0).all()


@pytest.mark.parametrize(("ratio", "width"), [(0.29, 29), (0.28, 28), (0.999, 99), (1.0, 100)])
def test_cached_channels_are_not_lost_to_rounding(ratio: float, width: int) -> None:
    """0.29 * 100 is 28.999999999999996 in floating point."""
    assert CachedAttention(weft.MultiheadAttention(100, 1), ratio=ratio, length=4).width == width


@pytest.mark.parametrize("options", [{}, {"eval_gate": True, "memory": "per_sample"}])
def test_evaluation_reads_and_never_writes(options: dict) -> None:
    c = layer(length=5, **options)
    for step in range(2):
        c(tokens(3, 5, 16, seed=step))
    c.eval()
    frozen, count = c.cache.cache.clone(), int(c.cache.updates)
    x = tokens(3, 11, 16)
    together = c(x)
    for b in range(3):
        torch.testing.assert_close(c(x[b : b + 1]), together[b : b + 1])
    valid = torch.arange(11) < torch.tensor([11, 6, 3])[:, None]
    padded = c(x, mask=valid)
    torch.testing.assert_close(padded[1, :6], c(x[1:2, :6])[0])
    c.branches(x)
    c.train().cache.eval()  # the cache alone may be frozen
    torch.testing.assert_close(c(x), together)
    assert torch.equal(c.cache.cache, frozen) and c.cache.updates == count


def test_an_unwritten_cache_is_zero_and_warns() -> None:
    c = layer().eval()
    x = tokens(2, 6, 16)
    with pytest.warns(UserWarning, match="never written"):
        y = c(x)
    own, memory = c.branches(x)
    assert (memory == 0).all()
    torch.testing.assert_close(y, c.inner.merge(own.transpose(1, 2) / 2))


@pytest.mark.parametrize("name", weft.attentions())
def test_wraps_every_mechanism(name: str) -> None:
    info = weft.attention_info(name)
    inner = MultiheadAttention(16, 4, attention=name, causal=not info.bidirectional, max_length=24)
    c = CachedAttention(inner, length=5, delayed=not info.bidirectional)
    x = torch.randn(2, 24, 16)
    mask = torch.arange(24) < torch.tensor([24, 17])[:, None]
    c(x, mask)
    y = c(x, mask)
    assert y.shape == x.shape and y.isfinite().all() and c.cache.cache.abs().max() > 0
    own, memory = c.branches(x, mask)
    c.lam.data.fill_(-torch.inf)
    c.eval()
    torch.testing.assert_close(c(x, mask)[mask], inner(x, mask)[mask])


def test_memory_attention_as_the_inner_one() -> None:
    inner = MultiheadAttention(16, 4, attention="linear")
    c = CachedAttention(inner, length=5, memory_attention="same")
    assert c.memory.attention.name == "linear" and c(torch.randn(2, 9, 16)).shape == (2, 9, 16)
    made = weft.make_attention("full", heads=4, head_dim=2)
    assert CachedAttention(inner, length=5, memory_attention=made).memory.attention is made
    with pytest.raises(ValueError, match="heads=4, head_dim=2"):
        CachedAttention(inner, memory_attention=weft.make_attention("full", heads=4, head_dim=4))


def test_wraps_spatial_reduction() -> None:
    inner = SpatialReductionAttention(16, 4, 2)
    c = CachedAttention(inner, grid=(4, 4), memory_attention="same")
    x = torch.randn(2, 24, 16)
    assert c(x, (4, 6)).shape == x.shape  # another image size: the cache keeps its own
    assert c.memory.reduce is not None and c.cache.cache.shape == (1, 16, 8)
    full = CachedAttention(SpatialReductionAttention(16, 4, 2), length=16)
    assert full.memory.reduce is None and full(x, (4, 6)).shape == x.shape


def test_wraps_timms_layers() -> None:
    timm_layers = pytest.importorskip("timm.layers")
    pvt_v2 = pytest.importorskip("timm.models.pvt_v2")
    swin = pytest.importorskip("timm.models.swin_transformer")
    x = torch.randn(4, 16, 16)
    plain = CachedAttention(timm_layers.Attention(16, 4), length=16)
    assert plain.mix == "heads" and plain(x, attn_mask=None).shape == x.shape
    with pytest.raises(ValueError, match="delayed=True"):
        plain(x, is_causal=True)
    with pytest.raises(ValueError, match="valid="):
        plain(x, attn_mask=torch.ones(16, 16, dtype=torch.bool))
    reduced = CachedAttention(pvt_v2.Attention(16, 4, sr_ratio=2), length=16, memory_attention="same")
    assert reduced(x, [4, 4]).shape == reduced(x, feat_size=(4, 4)).shape == x.shape
    windows = CachedAttention(swin.WindowAttention(16, 4, window_size=4), length=16, memory_attention="same")
    assert windows.memory.window == (4, 4)
    assert windows(x, mask=torch.zeros(2, 16, 16)).shape == windows(x).shape == x.shape
    for c in (plain, reduced, windows):
        c.lam.data.fill_(-torch.inf)
    torch.testing.assert_close(plain(x), plain.inner(x))
    torch.testing.assert_close(reduced(x, (4, 4)), reduced.inner(x, (4, 4)))
    torch.testing.assert_close(windows(x), windows.inner(x))


def test_wraps_pytorchs_own() -> None:
    c = CachedAttention(nn.MultiheadAttention(16, 4, batch_first=True), length=6)
    x = torch.randn(2, 6, 16)
    padding = torch.arange(6) >= torch.tensor([6, 2])[:, None]
    y, weights = c(x, x, x, key_padding_mask=padding)
    assert y.shape == x.shape and weights.shape == (2, 6, 6)
    again = CachedAttention(c.inner, length=6)
    again.load_state_dict(c.state_dict())
    again.reset()
    again(x, x, x, valid=~padding, key_padding_mask=padding)
    torch.testing.assert_close(again.cache.cache, c.cache.cache)


def foreign() -> list[tuple[nn.Module, nn.Module, tuple[Any, ...]]]:
    """Layers of other libraries, with their output projections and arguments after x."""
    timm_layers = pytest.importorskip("timm.layers")
    pvt_v2 = pytest.importorskip("timm.models.pvt_v2")
    swin = pytest.importorskip("timm.models.swin_transformer")
    x = tokens(2, 16, 16)
    layers = [
        (timm_layers.Attention(16, 4, proj_drop=0.3, attn_head_dim=6), ()),
        (swin.WindowAttention(16, 4, window_size=4), ()),
        (pvt_v2.Attention(16, 4, sr_ratio=2), ((4, 4),)),
        (nn.MultiheadAttention(16, 4, batch_first=True), (x, x)),
        (nn.MultiheadAttention(16, 4, batch_first=True, add_bias_kv=True, kdim=16), (x, x)),
    ]
    return [(m.double(), m.out_proj if hasattr(m, "out_proj") else m.proj, args) for m, args in layers]


@pytest.mark.parametrize("number", range(5))
def test_heads_of_other_libraries_are_mixed_before_their_projection(number: int) -> None:
    """Equation 2 with the layer's own projection: y = W_o concat_h(σ(λ_h) o_mem_h + (1 - σ(λ_h)) o_self_h) + b_o."""
    torch.manual_seed(0)
    inner, projection, args = foreign()[number]
    x = tokens(2, 16, 16)
    c = CachedAttention(inner, length=16)
    c(x, *args)
    c.lam.data = tokens(4, seed=5)
    c.eval()
    own, memory = c.branches(x, *args)
    y = c(x, *args)
    y = y[0] if isinstance(y, tuple) else y
    share = c.lam.sigmoid()[:, None]
    mixed = (1 - share) * own
    mixed[..., : memory.shape[-1]] += share * memory
    torch.testing.assert_close(y, projection(mixed.flatten(2)))
    plain = inner(x, *args)  # outside of the cached layer it stays what it was
    torch.testing.assert_close(projection(own.flatten(2)), plain[0] if isinstance(plain, tuple) else plain)
    assert not any("out" in name for name, _ in c.memory.named_parameters())
    with torch.no_grad():
        twin = copy.deepcopy(c)
        twin.lam.fill_(-torch.inf)
        torch.testing.assert_close(twin(x, *args), plain)  # a copy has its own hook
        assert not torch.allclose(y, projection(own.flatten(2)))


def test_a_layer_that_skips_its_projection_is_refused() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dim, self.heads, self.proj = 16, 4, nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.proj.weight)

    assert CachedAttention(Skips()).mix == "projected"
    with pytest.raises(ValueError, match="did not call its output projection"):
        CachedAttention(Skips(), mix="heads")(torch.randn(2, 6, 16))


def test_ambiguous_layers_are_refused() -> None:
    inner = MultiheadAttention(16, 4)
    with pytest.raises(TypeError, match="no option 'lenght'"):
        CachedAttention(inner, lenght=3)
    with pytest.raises(ValueError, match="unknown preset"):
        CachedAttention(inner, preset="mine")
    with pytest.raises(ValueError, match="candidate must be one of"):
        CachedAttention(inner, candidate="gelu")
    with pytest.raises(ValueError, match="ratio"):
        CachedAttention(inner, 0.0)
    with pytest.raises(ValueError, match="set dim= and heads="):
        CachedAttention(nn.Identity())
    with pytest.raises(ValueError, match="mix='projected'"):
        CachedAttention(nn.Identity(), dim=16, heads=4, mix="heads")
    with pytest.raises(ValueError, match="batch_first"):
        CachedAttention(nn.MultiheadAttention(16, 4))
    with pytest.raises(ValueError, match="choose another ratio"):
        CachedAttention(inner, 0.75, position="conv")
    with pytest.raises(ValueError, match="prefix=1"):
        CachedAttention(inner, position="conv")(torch.randn(1, 10, 16))
    with pytest.raises(ValueError, match="cross attention"):
        CachedAttention(inner)(torch.randn(1, 10, 16), context=torch.randn(1, 5, 16))
    with pytest.raises(ValueError, match="cells of grid"):
        CachedAttention(inner, length=9, grid=(3, 3), prefix=1)
    with pytest.raises(ValueError, match="x must be"):
        CachedAttention(inner)(torch.randn(1, 10, 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_the_cache_exact(dtype: torch.dtype) -> None:
    c = CachedAttention(MultiheadAttention(16, 4), length=5).to(dtype)
    x = torch.randn(2, 7, 16, dtype=dtype)
    assert c(x).dtype == dtype and c.cache.cache.dtype == torch.float32
    c = CachedAttention(MultiheadAttention(16, 4), length=5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = c(x.float())
    assert y.dtype == torch.bfloat16 and c.cache.cache.dtype == torch.float32
    y.float().square().sum().backward()
    assert c.cache.update_gate.weight.grad.isfinite().all()


@pytest.mark.parametrize("channels, groups", [(48, 24), (10, 5), (40, 8), (18, 18), (6, 1)])
def test_joined_groups_give_the_same_convolution(channels, groups):
    conv = nn.Conv2d(channels, channels, 3, padding=1, groups=groups).double()
    image = torch.randn(2, channels, 3, 5, dtype=torch.float64, requires_grad=True)
    ours, theirs = _joined(conv, image), conv(image)
    torch.testing.assert_close(ours, theirs)
    upstream, wanted = torch.randn_like(ours), [image, *conv.parameters()]
    pair = [torch.autograd.grad(out, wanted, upstream) for out in (ours, theirs)]
    torch.testing.assert_close(*pair)
