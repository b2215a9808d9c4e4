"""The kernels in Triton's interpreter, on the CPU: small shapes, every option, every gradient, against float64; and who
runs: which backend a mechanism takes, and what it says when it cannot.

The interpreter must be chosen before Triton is imported, so the cases run in a process of their own. bfloat16 is left
to the GPU script: the interpreter's bfloat16 products are wrong.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys

import pytest
import torch

import weft
from weft.core import dispatch
from weft.kernels.cases import REAL, SMALL

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

MECHANISM = """
import dataclasses
from weft.kernels.agree import compare_call
from weft.kernels.cases import SMALL
from weft.kernels.checks import failures
bad = 0
odd = dataclasses.replace(SMALL[name][0], layout="BHDL")  # rows that are not whole in memory
for call in (*SMALL[name], odd):
    wrong = failures(compare_call(call, "cpu"), call.dtype)
    bad += bool(wrong)
    print(call, "FAILED" if wrong else "ok", wrong, "seed", seed)
assert bad == 0
"""

ONE_TENSOR = """
import dataclasses
from weft.kernels.cases import SMALL
for name, calls in SMALL.items():
    call = dataclasses.replace(calls[0], dtype=torch.float32)
    x, _, _, dout, mask = call.tensors("cpu")
    found = []
    for backend in ("torch", "triton"):
        torch.manual_seed(seed)  # the same features and samples
        attn, z = call.make(backend, "cpu"), x.clone().requires_grad_()
        torch.manual_seed(seed)
        out = attn(z, z, z, mask, call.position_bias("cpu"))
        found.append((out.detach(), torch.autograd.grad(out, z, dout)[0]))
    print(name, [(a - b).abs().max().item() for a, b in zip(*found)])
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
"""

TILES_OF_HALF = """
from weft.kernels import linear_scan
from weft.attention.performer import kernel as random_features
from weft.kernels.agree import Call, compare_call
from weft.kernels.checks import failures
for table in (linear_scan.TILES, random_features.TILES):  # of these, float16 takes the tiles of float32
    for kernel, width, size in list(table):
        if size == 4:
            table[kernel, width, size] = table[kernel, width, 2]
for call in (Call("performer", 145, H=1, D=64, mask="random"), Call("linear", 150, H=1, D=64)):
    wrong = failures(compare_call(call, "cpu"), call.dtype)
    assert not wrong, (call, wrong, seed)
"""

COMPILED = """
import dataclasses
from torch._dynamo.backends.common import aot_autograd
from weft.kernels.cases import SMALL

graphs = []

def keep(graph, inputs):
    graphs.append(graph)
    return graph.forward

for name, calls in SMALL.items():
    call = dataclasses.replace(calls[0], mask="ends", B=2, dtype=torch.float32)
    attn, bias = call.make("triton", "cpu"), call.position_bias("cpu")
    q, k, v, _, mask = call.tensors("cpu")
    if name == "mssa":
        k = v = q

    def fn(q, k, v, mask):
        mask = torch.cat([mask[:, :1], mask[:, 1:]], 1)  # made in the graph, as a model with a CLS token makes it
        return attn(q, k, v, mask, bias)

    graphs.clear()
    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(fn, backend=aot_autograd(fw_compiler=keep), fullgraph=True)(q, k, v, mask)
    asked = 0
    for node in graphs[0].graph.nodes:
        if getattr(node.target, "namespace", "") != "weft":
            continue
        for given in node.all_input_nodes:
            if given.op != "placeholder" and not given.meta["val"].is_floating_point():
                asked += 1
                print(name, node, given, list(given.users))
                assert len(given.users) == 1
    assert asked
"""


def interpret(script: str) -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    start = f"import torch\nseed = {seed}\ntorch.manual_seed(seed)\ntorch.set_num_threads(1)\n"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", start + script],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@needs_triton
@pytest.mark.parametrize("name", sorted(SMALL))
def test_backends_agree(name):
    interpret(f"name = {name!r}\n{MECHANISM}")


@needs_triton
def test_the_scans_tiles_of_bfloat16_are_right_in_single_precision():
    interpret(TILES_OF_HALF)


@needs_triton
def test_queries_keys_and_values_may_be_one_tensor():
    interpret(ONE_TENSOR)


@needs_triton
def test_what_an_operator_reads_of_a_mask_nothing_else_reads_when_compiled():
    """Of a tensor that an operator and others read, Inductor of torch 2.11 writes the rows with one stride and reads
    them with another, once they are over 1,024 long: nothing fails, answers are wrong."""
    interpret(COMPILED)


def test_every_kernel_is_held_to_its_plain_version():
    with_kernels = {name for name in weft.attentions() if "triton" in weft.attention_info(name).backends}
    layers = {
        name.lower()
        for name in weft.layers.__all__
        if "backend" in inspect.signature(getattr(weft.layers, name)).parameters
    }
    assert with_kernels | layers == set(SMALL) == set(REAL)


def make(**options):
    return weft.make_attention("combiner-fixed", heads=2, head_dim=8, **options)


def qkv(L=20, dtype=torch.float32):
    return torch.randn(3, 1, 2, L, 8, dtype=dtype).unbind()


def test_auto_on_a_cpu_is_torch():
    q, k, v = qkv(300)
    auto, plain = make(causal=True), make(causal=True, backend="torch")
    assert auto.backend == "auto" and not dispatch.use_triton("auto", "combiner-fixed", q, v)
    assert torch.equal(auto(q, k, v), plain(q, k, v))


def test_info_names_the_backends():
    assert weft.attention_info("combiner-fixed").backends == ("torch", "triton")
    assert weft.attention_info("full").backends == ("torch",)


def test_triton_that_cannot_run_says_why():
    with pytest.raises(ValueError, match="CUDA|not installed"):
        make(backend="triton")(*qkv())
    with pytest.raises(ValueError, match="backend must be"):
        make(backend="cuda")
    for options, reason in (
        ({"levels": 3}, "levels"),
        ({"own_span": True}, "own_span"),
        ({"summary": "relu-max"}, "relu-max"),
        ({"summary": "deepsets-mean"}, "deepsets-mean"),
    ):
        with pytest.raises(ValueError, match=reason):
            make(backend="triton", **options)


@pytest.mark.parametrize(
    ("q", "v", "reason"),
    [
        (torch.ones(1, 2, 4, 8, dtype=torch.float64), torch.ones(1, 2, 4, 8, dtype=torch.float64), "float64"),
        (torch.ones(1, 2, 4, 160), torch.ones(1, 2, 4, 160), "up to 128"),
        (torch.ones(1, 2, 4, 8), torch.ones(1, 2, 4, 4), "one shape"),
    ],
)
def test_tensors_no_kernel_takes(monkeypatch, q, v, reason):
    monkeypatch.setattr(dispatch, "_INSTALLED", True)
    monkeypatch.setattr(dispatch, "_INTERPRETED", True)  # so that a CPU tensor is no reason
    with pytest.raises(ValueError, match=reason):
        dispatch.use_triton("triton", "combiner-fixed", q, v)
    assert not dispatch.use_triton("auto", "combiner-fixed", q, v)


def test_dropout_has_no_kernel(monkeypatch):
    monkeypatch.setattr(dispatch, "_INSTALLED", True)
    monkeypatch.setattr(dispatch, "_INTERPRETED", True)
    with pytest.raises(ValueError, match="dropout"):
        make(backend="triton", dropout=0.1)(*qkv())


def test_weights_look_inside_a_fused_mechanism():
    attn = make(backend="triton", causal=True)
    q, k, v = qkv()
    expected = make(backend="torch", causal=True)(q, k, v)
    torch.testing.assert_close(attn.weights(q, k, v) @ v, expected)
    assert attn.backend == "triton"
