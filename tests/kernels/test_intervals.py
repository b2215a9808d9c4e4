"""Routing's centroids learn the same from the kernels as from the plain version."""

from __future__ import annotations

import copy

import pytest
import torch
from promises import noise
from torch.utils.checkpoint import checkpoint

import weft

pytest.importorskip("triton")


def test_centroids_are_updated_equally():
    torch.manual_seed(0)
    fused = weft.make_attention("routing", heads=2, head_dim=8, backend="triton", clusters=3, capacity=8)
    plain = copy.deepcopy(fused)
    plain.backend = "torch"
    mask = torch.rand(2, 20) > 0.3
    for _ in range(2):
        x = torch.randn(2, 2, 20, 8)
        torch.testing.assert_close(fused(x, x, x, mask), plain(x, x, x, mask), rtol=1e-4, atol=1e-4)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(fused.state_dict()[name], value, rtol=1e-5, atol=1e-5)
    assert plain.clusters.count.sum() == 2 * mask.sum()


def test_recomputation_recognises_keys_with_equal_tickets():
    """Two forwards after the same seed wait for their backward: each starts again from its own centroids."""
    torch.manual_seed(0)
    attn = weft.make_attention("routing", heads=1, head_dim=8, backend="triton", clusters=3, capacity=4, decay=0.5)
    grads = []
    for again in (False, True):
        layer, outs = copy.deepcopy(attn), []
        inputs = [noise(1, 1, 9, 8, seed=n).float() for n in (1, 2)]
        for x in (x.requires_grad_() for x in inputs):
            torch.manual_seed(3)
            outs.append(checkpoint(layer, x, x, x, use_reentrant=False) if again else layer(x, x, x))
        grads.append(torch.autograd.grad(outs[0].square().sum() + outs[1].square().sum(), inputs))
    for plain, recomputed in zip(*grads, strict=True):
        torch.testing.assert_close(recomputed, plain)
