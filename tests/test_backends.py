"""The choice of the backend, and errors if the kernel cannot run."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import promises
import pytest
import torch
from promises import cases

import weft
from weft.core import dispatch, self_test


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
def test_refuses_what_the_kernel_lacks(name, options, kernels_could_run):
    def make(**more):
        return weft.make_attention(name, heads=2, head_dim=8, **options, **more)

    q, k, v = qkv()
    with pytest.raises(ValueError, match="bias.*backend='auto'"):
        make(backend="triton")(q, k, v, None, weft.ALiBi(2))
    huge = torch.empty(1, 2, 2**28, 8, device="meta")
    with pytest.raises(ValueError, match="up to 268435455 tokens"):
        dispatch.use_kernel(make(backend="triton"), huge, huge, huge, None)
    with pytest.raises(ValueError, match="backend must be"):
        make(backend="cuda")


@pytest.mark.parametrize("options", [{"columns": 0}, {"pattern": "strided"}], ids=str)
def test_sparse_has_a_kernel_for_cls_only_with_columns(options):
    with pytest.raises(ValueError, match="with cls=True.*'auto'"):
        weft.make_attention("sparse", heads=2, head_dim=8, backend="triton", cls=True, **options)
    weft.make_attention("sparse", heads=2, head_dim=8, cls=True, **options)


def combiner(**options):
    return weft.make_attention("combiner-fixed", heads=2, head_dim=8, **options)


@pytest.mark.parametrize("case", [case for case in cases(first_setting=True) if case.info.kernel], ids=str)
def test_auto_on_a_cpu_and_weights_run_the_plain_version(case):
    tensors = promises.qkv(20, dtype=torch.float32)
    plain, fused = (case.make(dtype=torch.float32, backend=backend) for backend in ("auto", "triton"))
    assert not dispatch.use_kernel(plain, *(x.cpu() for x in promises.qkv(300, dtype=torch.float32)), None)
    torch.testing.assert_close(fused.weights(*tensors) @ tensors[2], plain(*tensors), rtol=1e-4, atol=1e-5)
    assert fused.backend == "triton"


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


def test_refuses_dropout_if_the_kernel_has_none(kernels_could_run, monkeypatch):
    attn = weft.make_attention("local", heads=2, head_dim=8, backend="triton", dropout=0.1)
    monkeypatch.setattr(attn, "fused", replace(attn.fused, dropout=False))
    with pytest.raises(ValueError, match="dropout"):
        attn(*qkv())


UNTESTED = "combiner-axial-horizontal", "combiner-axial-vertical", "combiner-mixture", "combiner-routing"


@pytest.mark.parametrize("name", UNTESTED)
def test_auto_does_not_use_dropout_that_was_not_tested_on_a_gpu(name, kernels_could_run, monkeypatch):
    monkeypatch.setattr(dispatch, "_gpu", lambda index: dispatch.TESTED)
    attn = weft.make_attention(name, heads=2, head_dim=8, dropout=0.1)
    about = {"is_cuda": True, "dtype": torch.bfloat16, "get_device": lambda: 0, "stride": lambda dim: 8}
    q = SimpleNamespace(shape=(1, 2, 1100, 8), **about)
    assert not dispatch.use_kernel(attn, q, q, q, None)
    assert dispatch.use_kernel(attn.eval(), q, q, q, None)


@pytest.mark.parametrize(
    ("rank", "head_dim", "queries", "dropout", "dtype", "used"),
    [
        (16, 256, 300, 0.0, torch.bfloat16, True),
        (128, 64, 300, 0.0, torch.float16, True),
        (16, 64, 300, 0.0, torch.float32, True),
        (128, 64, 300, 0.0, torch.float32, False),  # too large
        (256, 64, 300, 0.0, torch.bfloat16, False),
        (16, 256, 300, 0.0, torch.float32, True),
        (16, 64, 1, 0.0, torch.bfloat16, True),
        (16, 64, 300, 0.1, torch.bfloat16, True),
    ],
)
def test_auto_uses_the_kernel_of_linformer_where_it_fits(
    rank, head_dim, queries, dropout, dtype, used, kernels_could_run, monkeypatch
):
    monkeypatch.setattr(dispatch, "_gpu", lambda index: dispatch.TESTED)
    attn = weft.make_attention("linformer", heads=2, head_dim=head_dim, max_length=300, rank=rank, dropout=dropout)
    about = {"is_cuda": True, "dtype": dtype, "get_device": lambda: 0}
    q, k = (SimpleNamespace(shape=(1, 2, L, head_dim), **about) for L in (queries, 300))
    assert dispatch.use_kernel(attn, q, k, k, None) == used


@pytest.mark.parametrize(
    ("gpu", "changed", "checked"),
    [
        (dispatch.TESTED, False, False),
        (dispatch.TESTED, True, True),
        (((9, 0), "3.9"), False, True),
        (((8, 9), "3.6"), False, True),
        (((7, 5), "3.6"), False, False),
    ],
)
def test_auto_checks_kernels_where_they_were_never_tested(gpu, changed, checked, kernels_could_run, monkeypatch):
    calls = []
    monkeypatch.setattr(dispatch, "_gpu", lambda index: gpu)
    monkeypatch.setattr(self_test, "passes", lambda *what: calls.append(what) or True)
    attn = weft.make_attention("linear", heads=2, head_dim=8)
    monkeypatch.setattr(type(attn), "fused", replace(attn.fused, tested=not changed))
    q = SimpleNamespace(shape=(1, 2, 300, 8), is_cuda=True, dtype=torch.bfloat16, get_device=lambda: 0)
    assert dispatch.use_kernel(attn, q, q, q, None) == (gpu[0] >= dispatch.OLDEST)
    assert bool(calls) == checked


@pytest.mark.parametrize("gpu", [dispatch.TESTED, ((8, 0), "3.6")], ids=str)
def test_the_choice_of_the_kernel_compiles_without_a_graph_break(gpu, monkeypatch):
    monkeypatch.setattr(dispatch, "_gpus", {0: gpu})
    monkeypatch.setattr(self_test, "passes", lambda *what: True)
    attn = weft.make_attention("linear", heads=2, head_dim=8)
    torch.compiler.reset()
    chosen = torch.compile(lambda q: q + 1 if dispatch._trusted(attn, q) else q, fullgraph=True, backend="eager")
    assert chosen(torch.zeros(1, 2, 300, 8)).all()


@pytest.mark.parametrize(("device", "hip"), [("xpu", None), ("mps", None), ("cuda", "7.0")])
def test_other_gpus_run_plain_pytorch_and_say_so_once(device, hip, monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "_INSTALLED", True)
    monkeypatch.setattr(dispatch, "_INTERPRETED", False)
    monkeypatch.setattr(dispatch, "_noted", set())
    monkeypatch.setattr(torch.version, "hip", hip)
    q = SimpleNamespace(is_cuda=device == "cuda", device=SimpleNamespace(type=device), shape=(1, 2, 300, 8))
    attn = weft.make_attention("linear", heads=2, head_dim=8)
    for _ in range(2):
        assert not dispatch.use_kernel(attn, q, q, q, None)
    (line,) = caplog.messages
    assert "NVIDIA" in line and ("hip" if hip else device) in line


def test_a_compiled_call_may_change_its_length():
    attn = weft.make_attention("local", heads=2, head_dim=8, causal=True, block_size=7)
    torch.compiler.reset()
    compiled = torch.compile(attn, fullgraph=True, backend="eager")
    for length in (100, 150):
        inputs = [torch.randn(1, 2, length, 8) for _ in range(3)]
        torch.testing.assert_close(compiled(*inputs), attn(*inputs))


def test_only_repeated_plain_calls_skip_the_checks(monkeypatch):
    pytest.importorskip("triton")
    attn = weft.make_attention("local", heads=2, head_dim=16, block_size=8, backend="triton")
    q = torch.randn(1, 2, 20, 16, device=promises.DEVICE)
    first = attn(q, q, q)
    for k, v in ((q.to("meta"), q), (q, q.to("meta"))):
        with pytest.raises(ValueError, match="one device, got .*meta"):
            attn(q, k, v)
    checked = []
    monkeypatch.setattr(attn, "check", lambda *call: checked.append(call))
    assert torch.equal(attn(q, q, q), first) and not checked
    with torch.autocast(q.device.type, dtype=torch.float16):
        assert attn(q, q, q).dtype == torch.float16 and len(checked) == 1
        half = attn(q.half(), q.half(), q.half())
        assert half.dtype == torch.float16 and len(checked) == 1 and torch.is_autocast_enabled(q.device.type)
    attn(q, q, q, torch.ones(1, 20, dtype=torch.bool, device=q.device))
    attn(q[:, :, :9], q[:, :, :9], q[:, :, :9])
    attn(q.mT.contiguous().mT, q, q)
    attn.backend = "torch"
    attn(q, q, q)
    assert len(checked) == 5


def test_threads_that_look_at_weights_do_not_change_other_calls(kernels_could_run):
    attn = weft.make_attention("local", heads=2, head_dim=8, block_size=7, backend="triton")
    q, k, v = qkv()

    def bias(i, j):  # runs inside `weights`
        assert dispatch.use_kernel(attn, q, k, v, None)
        return weft.ALiBi(2)(i, j)

    attn.weights(q, k, v, None, bias)


def test_threads_that_look_at_weights_leave_routing_learning():
    attn = weft.make_attention("routing", heads=2, head_dim=8, causal=True)
    drawn, (q, k, v), turns = attn.clusters.drawn, qkv(), [threading.Event() for _ in range(3)]

    def look(mine, then):
        def bias(i, j):
            turns[then].set()
            assert turns[mine].wait(60)
            return weft.ALiBi(2)(i, j)

        attn.weights(q, k, v, None, bias)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(look, 0, 2)  # starts first and ends first
        assert turns[2].wait(60)
        turns[2].clear()
        second = pool.submit(look, 1, 2)
        assert turns[2].wait(60)
        attn(q, k, v)
        assert drawn.any()  # this thread does not look
        for turn, looking in ((0, first), (1, second)):
            turns[turn].set()
            looking.result()
        drawn.zero_()
        pool.submit(attn, q, k, v).result()
    assert drawn.any()
