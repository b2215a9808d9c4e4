"""Routing's centroids learn the same from the kernels as from the plain version."""

from __future__ import annotations

import copy

import pytest
import torch

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
