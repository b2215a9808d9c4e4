"""Custom layers in weft.swap, and subclasses of PyTorch's layers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import weft
from weft.adapt.added import LAYERS


class CausalSelfAttention(nn.Module):
    """As in nanoGPT."""

    def __init__(self, n_embd: int = 24, n_head: int = 4):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.n_head, self.n_embd = n_head, n_embd

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in self.c_attn(x).split(C, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


def reader(layer, attend, x):
    q, k, v = layer.c_attn(x).unflatten(-1, (3, layer.n_head, -1)).permute(2, 0, 3, 1, 4)
    return layer.c_proj(attend(q, k, v, causal=True).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("reader", [reader, None], ids=["reader", "its own forward"])
def test_custom_layers(reader):
    torch.manual_seed(0)
    for cls in [cls for cls in LAYERS if issubclass(cls, CausalSelfAttention)]:
        del LAYERS[cls]
    model, x = nn.Sequential(CausalSelfAttention(), CausalSelfAttention()), torch.randn(2, 9, 24)
    before = model(x)
    with pytest.warns(UserWarning, match="weft does not know"):
        assert not weft.swap(model, "linear").replaced
    weft.adapt.add_layer(
        CausalSelfAttention, reader, shape=lambda layer: (layer.n_head, layer.n_embd // layer.n_head), causal=True
    )
    report = weft.swap(model, "full")
    assert report.replaced == ["0", "1"]
    torch.testing.assert_close(model(x), before)
    report.undo()
    report = weft.swap(model, "linear")
    out, changed = model(x), x.clone()
    changed[:, 5:] += 1
    assert not torch.allclose(out, before, atol=1e-4)
    torch.testing.assert_close(model(changed)[:, :5], out[:, :5])
    again = nn.Sequential(CausalSelfAttention(), CausalSelfAttention())
    weft.apply(again, weft.describe(model))
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again(x), out)
    report.undo()
    assert type(model[0]) is CausalSelfAttention and torch.equal(model(x), before)
    assert "does not support that" in weft.swap(model, "bigbird").refused["0"]
    with pytest.raises(TypeError, match="a subclass of nn.Module"):
        weft.adapt.add_layer(noise, shape=lambda layer: (1, 1))


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def test_a_layer_without_the_call_is_refused():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(8, 8)

        def forward(self, q, times):
            for _ in range(times):
                q = F.scaled_dot_product_attention(q, q, q, scale=0.7, enable_gqa=True)
            return q

    layer, q = Twice(), noise(1, 2, 5, 8)
    expected = layer(q, 1)
    weft.adapt.add_layer(Twice, shape=lambda layer: (2, 8))
    weft.swap(layer, "full")
    torch.testing.assert_close(layer(q, 1), expected)
    for times in (0, 2):
        with pytest.raises(ValueError, match=f"Twice called scaled_dot_product_attention {times} times"):
            layer(q, times)


def test_a_pairwise_mask_and_dropout_reach_the_mechanism():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj, self.p = nn.Linear(8, 8), 0.5

        def forward(self, q, mask):
            return F.scaled_dot_product_attention(q, q, q, mask, dropout_p=self.p if self.training else 0.0)

    layer, q = Plain(), noise(1, 2, 5, 8)
    weft.adapt.add_layer(Plain, shape=lambda layer: (2, 8), bias=True)
    mask = noise(5, 5) > -0.5
    mask |= torch.eye(5, dtype=torch.bool)
    layer.eval()
    padding = torch.arange(5)[None, None, None] < 3
    for given in (mask, noise(2, 5, 5)[None], padding):
        expected = layer(q, given)
        for to in ("full", "longformer"):
            report = weft.swap(layer, to)
            torch.testing.assert_close(layer(q, given)[:, :, :3], expected[:, :, :3])
            assert not torch.allclose(layer.train()(q, given), expected, atol=1e-2)
            layer.eval(), report.undo()


def test_a_causal_mask_is_recognised():
    class Masked(nn.Module):
        def forward(self, q, mask):
            return F.scaled_dot_product_attention(q, q, q, mask)

    layer, q = Masked(), noise(2, 2, 12, 8)
    weft.adapt.add_layer(Masked, shape=lambda layer: (2, 8), causal=None)
    past = torch.ones(12, 12, dtype=torch.bool).tril()
    for to, options in (("linear", {}), ("combiner-fixed", {"block_size": 4}), ("performer", {"causal": True})):
        report = weft.swap(layer, to, **options)
        expected = layer.weft(q, q, q, causal=True)
        for mask in (past, past[None, None], torch.zeros(12, 12).masked_fill(~past, float("-inf"))):
            torch.testing.assert_close(layer(q, mask), expected)
        for mask in (past.fliplr(), past | past.roll(1, 1), noise(12, 12)):
            with pytest.raises(ValueError, match="no matrix of logits"):
                layer(q, mask)
        report.undo()


class Named(nn.MultiheadAttention):
    def extra(self):
        return self.num_heads


class Scaled(nn.MultiheadAttention):
    def forward(self, query, *args, **kwargs):
        return super().forward(2 * query, *args, **kwargs)


class Own(Scaled):
    def forward(self, query, key, value):
        return F.multi_head_attention_forward(query, key, value, 24, 4, self.in_proj_weight)


def test_subclasses_of_multihead_attention():
    layer, x = Named(24, 4, batch_first=True), torch.randn(2, 9, 24)
    before = layer(x, x, x)[0]
    report = weft.swap(layer, "full")
    torch.testing.assert_close(layer(x, x, x)[0], before)
    assert isinstance(layer, Named) and layer.extra() == 4
    weft.swap(layer, "linear").undo()
    report.undo()
    assert type(layer) is Named
    layer = Scaled(24, 4, batch_first=True)
    before = layer(x, x, x)[0]
    report = weft.swap(layer, "full")
    torch.testing.assert_close(layer(x, x, x)[0], before)
    report.undo()
    weft.swap(layer, "linear")
    assert not torch.allclose(layer(x, x, x)[0], before, atol=1e-4)
    with pytest.warns(UserWarning, match="Own overrides forward"):
        assert not weft.swap(Own(24, 4), "linear").replaced
