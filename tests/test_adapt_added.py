"""Layers of one's own in weft.swap, and subclasses of PyTorch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from on_cpu import on_cpu  # noqa: F401
from torch import nn

import weft


class CausalSelfAttention(nn.Module):
    """As nanoGPT writes it."""

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


def test_a_layer_of_ones_own():
    torch.manual_seed(0)
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
        weft.adapt.add_layer(reader, reader, shape=lambda layer: (1, 1))


class Named(nn.MultiheadAttention):
    def extra(self):
        return self.num_heads


class Scaled(nn.MultiheadAttention):
    def forward(self, query, *args, **kwargs):
        return super().forward(2 * query, *args, **kwargs)


def test_subclasses_of_multihead_attention():
    layer, x = Named(24, 4, batch_first=True), torch.randn(2, 9, 24)
    before = layer(x, x, x)[0]
    report = weft.swap(layer, "full")
    torch.testing.assert_close(layer(x, x, x)[0], before)
    assert isinstance(layer, Named) and layer.extra() == 4
    weft.swap(layer, "linear").undo()
    report.undo()
    assert type(layer) is Named
    with pytest.warns(UserWarning, match="overrides forward"):
        assert not weft.swap(Scaled(24, 4), "linear").replaced
