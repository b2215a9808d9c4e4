"""The choice of the backend, and errors if the kernel cannot run."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.core import dispatch


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
        if options.get("pattern") == "strided":
            with pytest.raises(ValueError, match="dropout"):
                self.make(name, options, backend="triton", dropout=0.1)(q, k, v)
        huge = torch.empty(1, device="meta").as_strided((1, 2, 20, 8), (0, 0, 2**28, 1))
        with pytest.raises(ValueError, match="32 bits"):
            dispatch.use_kernel(self.make(name, options, backend="triton"), huge, huge, huge, None)
        with pytest.raises(ValueError, match="backend must be"):
            self.make(name, options, backend="cuda")

    def test_weights_of_the_kernel(self, name, options):
        q, k, v = qkv()
        attn = self.make(name, options, backend="triton")
        expected = self.make(name, options, backend="torch")(q, k, v)
        torch.testing.assert_close(attn.weights(q, k, v) @ v, expected)
        assert attn.backend == "triton"


@pytest.mark.parametrize("pattern", ["fixed", "strided"])
def test_sparse_has_no_kernel_for_cls(pattern):
    with pytest.raises(ValueError, match="not support cls.*'auto'"):
        weft.make_attention("sparse", heads=2, head_dim=8, backend="triton", pattern=pattern, cls=True)
    weft.make_attention("sparse", heads=2, head_dim=8, pattern=pattern, cls=True)


def combiner(**options):
    return weft.make_attention("combiner-fixed", heads=2, head_dim=8, **options)


def test_auto_on_a_cpu_is_torch():
    q, k, v = qkv(300)
    auto, plain = combiner(causal=True), combiner(causal=True, backend="torch")
    assert auto.backend == "auto" and not dispatch.use_kernel(auto, q, k, v, None)
    assert torch.equal(auto(q, k, v), plain(q, k, v))


def test_info_names_the_backends():
    assert weft.attention_info("combiner-fixed").backends == ("torch", "triton")
    assert weft.attention_info("full").backends == ("torch",)


def test_triton_that_cannot_run_says_why(monkeypatch):
    monkeypatch.setattr(dispatch, "_INTERPRETED", False)
    with pytest.raises(ValueError, match="CUDA|not installed"):
        combiner(backend="triton")(*qkv())
    with pytest.raises(ValueError, match="backend must be"):
        combiner(backend="cuda")
    for options, reason in (
        ({"levels": 3}, "levels"),
        ({"own_span": True}, "own_span"),
        ({"summary": "relu-max"}, "relu-max"),
        ({"summary": "deepsets-mean"}, "deepsets-mean"),
    ):
        with pytest.raises(ValueError, match=reason):
            combiner(backend="triton", **options)


@pytest.mark.parametrize(
    ("q", "v", "reason"),
    [
        (torch.ones(1, 2, 4, 8, dtype=torch.float64), torch.ones(1, 2, 4, 8, dtype=torch.float64), "float64"),
        (torch.ones(1, 2, 4, 264), torch.ones(1, 2, 4, 264), "up to 256"),
        (torch.ones(1, 2, 4, 8), torch.ones(1, 2, 4, 4), "same shape"),
    ],
)
def test_tensors_no_kernel_takes(kernels_could_run, q, v, reason):
    with pytest.raises(ValueError, match=reason):
        dispatch.use_kernel(combiner(backend="triton"), q, q, v, None)
    assert not dispatch.use_kernel(combiner(), q, q, v, None)


def test_dropout_has_no_kernel(kernels_could_run):
    with pytest.raises(ValueError, match="dropout"):
        weft.make_attention("axial", heads=2, head_dim=8, backend="triton", dropout=0.1)(*qkv())


def test_weights_look_inside_a_fused_mechanism():
    attn = combiner(backend="triton", causal=True)
    q, k, v = qkv()
    expected = combiner(backend="torch", causal=True)(q, k, v)
    torch.testing.assert_close(attn.weights(q, k, v) @ v, expected)
    assert attn.backend == "triton"
