"""Who runs MSSA, local, longformer and sparse: which backend, and what is said when a kernel cannot."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.core import dispatch
from weft.layers.mssa import SubspaceAttention


@pytest.fixture
def kernels_could_run(monkeypatch):
    monkeypatch.setattr(dispatch, "_INSTALLED", True)
    monkeypatch.setattr(dispatch, "_INTERPRETED", True)  # so that a CPU tensor is no reason


def qkv(L: int = 20) -> list[torch.Tensor]:
    return list(torch.randn(3, 1, 2, L, 8).unbind())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("local", {"block_size": 7}),
        ("longformer", {"window": 5, "global_tokens": 2}),
        ("sparse", {"block_size": 7}),
        ("sparse", {"block_size": 3, "pattern": "strided"}),
    ],
)
class TestMechanisms:
    def make(self, name: str, options: dict, **more):
        return weft.make_attention(name, heads=2, head_dim=8, **options, **more)

    def test_auto_on_a_cpu_is_torch(self, name, options):
        q, k, v = qkv(300)
        assert torch.equal(self.make(name, options)(q, k, v), self.make(name, options, backend="torch")(q, k, v))

    def test_refuses_what_the_kernel_lacks(self, name, options, kernels_could_run):
        q, k, v = qkv()
        with pytest.raises(ValueError, match="bias.*backend='auto'"):
            self.make(name, options, backend="triton")(q, k, v, None, weft.ALiBi(2))
        with pytest.raises(ValueError, match="dropout"):
            self.make(name, options, backend="triton", dropout=0.1)(q, k, v)
        huge = torch.empty(1, device="meta").as_strided((1, 2, 20, 8), (0, 0, 2**28, 1))
        with pytest.raises(ValueError, match="32 bits"):
            self.make(name, options, backend="triton").attend(huge, huge, huge, None, None)
        with pytest.raises(ValueError, match="backend must be"):
            self.make(name, options, backend="cuda")

    def test_weights_look_inside(self, name, options):
        q, k, v = qkv()
        attn = self.make(name, options, backend="triton")
        expected = self.make(name, options, backend="torch")(q, k, v)
        torch.testing.assert_close(attn.weights(q, k, v) @ v, expected)
        assert attn.backend == "triton"


@pytest.mark.parametrize("pattern", ["fixed", "strided"])
def test_sparse_has_no_kernel_for_cls(pattern):
    with pytest.raises(ValueError, match="no cls.*'auto'"):
        weft.make_attention("sparse", heads=2, head_dim=8, backend="triton", pattern=pattern, cls=True)
    weft.make_attention("sparse", heads=2, head_dim=8, pattern=pattern, cls=True)


def test_mssa_refuses_what_its_kernel_lacks(kernels_could_run):
    x = torch.randn(1, 20, 16)
    with pytest.raises(ValueError, match="bias"):
        weft.MSSA(16, 2, backend="triton")(x, None, weft.ALiBi(2))
    with pytest.raises(ValueError, match="dropout"):
        weft.MSSA(16, 2, backend="triton", dropout=0.1)(x)
    with pytest.raises(ValueError, match="scale=None"):
        weft.MSSA(16, 2, backend="triton", scale=1.0)
    with pytest.raises(ValueError, match="attention='full'"):
        weft.MSSA(16, 2, backend="triton", attention="linformer", max_length=20)
    with pytest.raises(ValueError, match="one tensor"):
        SubspaceAttention(heads=2, head_dim=8, backend="triton")(*qkv())
    with pytest.raises(ValueError, match="backend must be"):
        weft.MSSA(16, 2, backend="cuda")


def test_mssa_passes_its_backend_on_to_a_mechanism_that_has_kernels():
    layer = weft.MSSA(16, 2, attention="local", block_size=4, backend="torch")
    assert layer.attention.backend == "torch" and layer.attention.block_size == 4
    assert weft.MSSA(16, 2).attention.backend == "auto"


def test_mssa_with_and_without_the_kernel_is_full_attention_of_one_tensor():
    x = torch.randn(2, 150, 16)
    mask = torch.rand(2, 150) > 0.3
    layer = weft.MSSA(16, 2, causal=True)
    w = layer.project(x)[0]
    expected = weft.make_attention("full", heads=2, head_dim=8, causal=True)(w, w, w, mask)
    torch.testing.assert_close(layer.attention(w, w, w, mask), expected)
    torch.testing.assert_close(layer.weights(x, mask) @ w.masked_fill(~mask[:, None, :, None], 0), expected)
