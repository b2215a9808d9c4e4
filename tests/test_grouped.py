"""Grouped keys and values: outputs and gradients equal those with the heads repeated, in every mechanism."""

from __future__ import annotations

import pytest
import torch
from promises import DEVICE, masks, noise, sweep
from torch._subclasses import FakeTensorMode

import weft
from weft.core.heads import spread

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
    q, k, v, mask = given
    documents = weft.Segments.from_lengths([[6, 7], [9]], device=DEVICE)
    packed = [attn(q, *heads, mask, segments=documents) for heads in ((k, v), spread(q, k, v))]
    torch.testing.assert_close(*packed)


# Name, causal, length, options: every kernel, and each of its ways through the launches.
CALLS = [
    ("bigbird", False, 5, {"block_size": 2}),
    ("combiner-axial", True, 7, {"block_size": 3}),
    ("combiner-axial", False, 7, {"block_size": 16}),
    ("combiner-axial-vertical", True, 5, {"block_size": 2}),
    ("combiner-fixed", True, 18, {"block_size": 16}),
    ("combiner-logsparse", True, 18, {}),
    ("combiner-routing", True, 7, {"clusters": 2, "capacity": 4, "decay": 1.0}),  # every call finds the same clusters
    ("linear", True, 130, {}),
    ("linear", False, 18, {}),
    ("linformer", False, 18, {"max_length": 20, "rank": 5}),
    ("local", True, 18, {"block_size": 9}),
    ("logsparse", False, 18, {}),
    ("longformer", False, 18, {"window": 4, "global_tokens": 2}),
    ("performer", True, 18, {"features": 9}),
    ("performer", False, 18, {"features": 9}),
    ("performer", True, 18, {"kernel": "relu"}),
    ("reformer", True, 18, {"chunk": 5, "buckets": 4}),
    ("routing", False, 9, {"clusters": 2, "capacity": 4, "decay": 1.0}),
    ("sinkhorn", False, 9, {"block_size": 4, "max_length": 40}),
    ("sparse", False, 18, {"block_size": 8, "columns": 2}),
    ("sparse", True, 18, {"block_size": 5, "pattern": "strided"}),
    ("subsampled", True, 18, {"windows": 2}),
    ("subsampled", False, 18, {"windows": 2}),
]
# Only on a GPU: slow in Triton's interpreter.
SLOW = [
    ("axial", True, 5, {"block_size": 2}),
    ("combiner-axial-horizontal", False, 5, {"block_size": 2}),
    ("combiner-mixture", True, 5, {"block_size": 2}),
    ("performer", False, 300, {"features": 140}),
    ("performer", True, 300, {"features": 140}),
]


def made(call, heads):
    name, causal, _, options = call
    torch.manual_seed(0)
    return weft.make_attention(name, heads=heads, head_dim=8, causal=causal, backend="triton", **options).to(DEVICE)


@pytest.mark.parametrize("call", CALLS if DEVICE == "cpu" else CALLS + SLOW, ids=str)
def test_kernels_read_grouped_heads_in_place(call, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr("weft.core.contract.spread", None)  # would repeat them
    attn = made(call, heads=2)
    q, k, v = (x[:1, : x.shape[1] // 2] for x in tensors(torch.float32, call[2]))
    mine = results(attn, q, k, v, None, repeat=False)
    attn.backend = "torch"
    theirs = results(attn, q, k, v, None, repeat=True)
    for a, b in zip(mine, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("call", CALLS + SLOW, ids=str)
def test_no_repeated_heads_are_kept_for_the_backward(call):
    pytest.importorskip("triton")
    attn, L = made(call, heads=H), call[2]
    with FakeTensorMode(allow_non_fake_inputs=True):  # operators allocate, but do not run
        q, k, v = (torch.empty(1, heads, L, 8, requires_grad=True, device=DEVICE) for heads in (H, G, G))
        grouped, repeated = bytes_kept(attn, q, k, v), bytes_kept(attn, q, *spread(q, k, v))
    assert repeated - grouped >= (1 + attn.reads_k) * (H - G) * L * 8 * 4


def bytes_kept(attn, *qkv):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        attn(*qkv)
    return sum(x.nbytes for x in {id(x): x for x in kept}.values())


def test_every_kernel_is_tested_with_grouped_heads():
    assert {call[0] for call in CALLS + SLOW} == {x for x in weft.attentions() if weft.attention_info(x).kernel}


@pytest.mark.parametrize(("name", "options"), [("linear", {}), ("performer", {"kernel": "relu"})])
def test_each_head_drops_its_own_values(name, options):
    """Dropout of whole values: heads that share a value drop it independently, as if it were repeated."""
    pytest.importorskip("triton")
    attn = weft.make_attention(name, heads=2, head_dim=8, dropout=0.5, backend="triton", **options).to(DEVICE)
    q, k, v = (x[:1, : x.shape[1] // 2] for x in tensors(torch.float32, 18))
    for mine, theirs in zip(results(attn, q, k, v, None, False), results(attn, q, k, v, None, True), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_heads_that_do_not_divide_are_refused():
    attn = weft.make_attention("local", heads=4, head_dim=8)
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 3, 5, 8)
    with pytest.raises(ValueError, match="a divisor"):
        attn(q, k, k)
