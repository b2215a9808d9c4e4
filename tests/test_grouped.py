"""Grouped keys and values: outputs and gradients equal those with the heads repeated, in every mechanism."""

from __future__ import annotations

import pytest
import torch
from promises import DEVICE, masks, noise, sweep

import weft

H, G, L = 4, 2, 13


def results(attn, q, k, v, mask, repeat):
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    heads = [x.repeat_interleave(H // G, 1) for x in (k, v)] if repeat else [k, v]
    torch.manual_seed(0)
    out = attn(q, *heads, mask)
    return out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out), allow_unused=True)


def tensors(dtype, length=L, D=8):
    q, kv = noise(2, H, length, D, seed=1).to(dtype), noise(2, 2, G, length, D, seed=2).to(dtype)
    return q, *kv.unbind()


@sweep(first_setting=True)
def test_grouped_heads_equal_repeated_ones(case):
    attn = case.make(heads=H, head_dim=8)
    given = *tensors(torch.float64), masks(L)["right"].to(DEVICE)
    for mine, theirs in zip(results(attn, *given, False), results(attn, *given, True), strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs)
    weights = attn.weights(*given)
    assert weights.shape == (2, H, L, L)


OPTIONS = {
    "bigbird": {"block_size": 2},
    "combiner-axial-vertical": {"block_size": 2},
    "combiner-fixed": {"block_size": 16},
    "combiner-logsparse": {},
    "combiner-routing": {"clusters": 2, "capacity": 4, "decay": 1.0},  # every call finds the same clusters
    "local": {"block_size": 9},
    "logsparse": {},
    "longformer": {"window": 4, "global_tokens": 2},
    "routing": {"clusters": 2, "capacity": 4, "decay": 1.0},
    "sparse": {"block_size": 8, "columns": 2},
}
LENGTHS = {"bigbird": 5, "combiner-axial-vertical": 5, "combiner-routing": 7, "routing": 9}


@pytest.mark.parametrize(("name", "causal"), [(name, name.startswith(("local", "combiner"))) for name in OPTIONS])
def test_kernels_read_grouped_heads_in_place(name, causal, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr("weft.core.contract.spread", None)  # would repeat them
    attn = weft.make_attention(name, heads=2, head_dim=8, causal=causal, backend="triton", **OPTIONS[name]).to(DEVICE)
    q, k, v = (x[:1, : x.shape[1] // 2] for x in tensors(torch.float32, LENGTHS.get(name, 18)))
    mine = results(attn, q, k, v, None, repeat=False)
    attn.backend = "torch"
    theirs = results(attn, q, k, v, None, repeat=True)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_heads_that_do_not_divide_are_refused():
    attn = weft.make_attention("local", heads=4, head_dim=8)
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 3, 5, 8)
    with pytest.raises(ValueError, match="a divisor"):
        attn(q, k, k)
