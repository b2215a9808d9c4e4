"""Subsampled attention's kernels beyond test_agreement.py: samples with repeated sources or without any, and errors for
unsupported calls."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import weft
from weft.core import dispatch


def test_given_samples():
    torch.manual_seed(0)
    for causal, L, W in ((True, 21, 3), (False, 20, 3), (True, 1, 2)):
        attn = weft.make_attention("subsampled", heads=1, head_dim=16, causal=causal, windows=W)
        mask = torch.rand(2, L) > 0.4
        tensors = [torch.randn(2, 1, L, 16) for _ in range(4)]
        sample = torch.randint(0, L + 1, (W, 5))
        sample[:, 1] = sample[:, 0]  # a source twice in a window
        sample[0] = L  # a window without any
        for given in (None, mask):
            results = []
            for backend, dtype in (("torch", torch.float64), ("triton", torch.float32)):
                attn.backend = backend
                q, k, v, dout = (x.to(dtype).requires_grad_() for x in tensors)
                with attn.fixed(sample):
                    out = attn(q, k, v, given)
                results.append((out, *torch.autograd.grad(out, (q, k, v), dout)))
            for a, b in zip(*results, strict=True):
                assert (a - b).abs().max() < 1e-5, (causal, L, given is None)


def make(**options):
    return weft.make_attention("subsampled", heads=2, head_dim=8, backend="triton", **options)


def test_unsupported_calls_raise_an_error(monkeypatch):
    monkeypatch.setattr(dispatch, "_INSTALLED", True)
    monkeypatch.setattr(dispatch, "_INTERPRETED", True)  # so that a CPU tensor is no reason
    q, k, v = torch.randn(3, 1, 2, 12, 8).unbind()
    with pytest.raises(ValueError, match="RelativeBias"):
        make()(q, k, v, bias=weft.RelativeBias(2, 4))
    with pytest.raises(ValueError, match="graph"):
        make(layout="graph")


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_dropout_needs_the_kernels(dropout):
    """PyTorch's attention on whole windows would draw its own."""
    q = SimpleNamespace(shape=(1, 2, 8192, 8), is_cuda=True, device=torch.device("cuda"), element_size=lambda: 2)
    attn = make(dropout=dropout, windows=2)
    assert attn._whole_windows(q, q, None, None) == (not dropout)
    assert attn.eval()._whole_windows(q, q, None, None)  # sampled too with attn.sampling = True


def test_dense_attention_needs_no_kernel():
    q, k, v = torch.randn(3, 1, 2, 12, 8).unbind()
    dense = weft.make_attention("full", heads=2, head_dim=8)(q, k, v)
    assert torch.equal(make(dropout=0.1).eval()(q, k, v), dense)
