"""Context parallelism: calls split over 2 and 4 processes equal the calls on the whole sequence."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from parallel_worker import SENT

import weft
from weft.parallel import SHARDED, traffic

HERE = Path(__file__).parent


def launch(ranks: int, folder: Path, what: str) -> dict:
    """Start one process per rank. Not with torchrun, which ends the others when one fails."""
    paths = [str(HERE.parent), str(HERE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    env["WEFT_TEST_DEVICE"] = "cpu"  # the ranks use gloo; tests/test_parallel_cuda.py uses the GPU
    file = folder / f"{ranks}.json"
    command = [sys.executable, str(HERE / "parallel_worker.py"), str(file), what]
    processes = [
        subprocess.Popen(command, env={**env, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert file.exists(), "\n".join(text[-2000:] for text in said)
    return json.loads(file.read_text())


@pytest.fixture(scope="module", params=[2, 4])
def results(request, tmp_path_factory):
    return {"ranks": request.param, **launch(request.param, tmp_path_factory.mktemp("ranks"), "everything")}


@pytest.mark.parametrize("name", [*SHARDED, "model", "cache"])
def test_parts_equal_the_whole(name, results):
    """Outputs and gradients in float64, uneven parts, with and without masks and position biases."""
    mine = {
        case: x
        for case, x in results["differences"].items()
        if case.partition("[")[0].split()[0].removesuffix("-causal") == name
    }
    assert len(mine) >= 3
    assert all(x < 1e-9 for x in mine.values()), mine


def test_results_are_the_same_in_every_run(results):
    assert results["same"] == dict.fromkeys(SHARDED, True)


def test_traffic_is_what_is_really_sent(results):
    for name in SHARDED:
        for causal in (False, True):
            attn = weft.make_attention(name, heads=SENT["heads"], head_dim=SENT["head_dim"], causal=causal)
            counted = sum(traffic(attn, SENT["length"], results["ranks"], dtype=torch.float32))
            assert counted == results["sent"][f"{name} {causal}"], (name, causal)


def test_a_million_tokens_need_little_traffic():
    """At most 0.2 % of ring attention, for 1,048,576 tokens on 8 ranks."""
    sent = {
        name: sum(traffic(weft.make_attention(name, heads=16, head_dim=64, causal=True), 1 << 20, 8))
        for name in ("full", "combiner-fixed", "linear")
    }
    ring = 2 * 16 * 64 * 2 * 7 * (1 << 20)  # keys and values in bfloat16, passed on by seven ranks
    assert sent["full"] >= ring
    assert sent["combiner-fixed"] <= 0.002 * ring and sent["linear"] <= 0.002 * ring


def test_a_lost_rank_ends_the_others(tmp_path):
    found = launch(2, tmp_path, "lose a rank")
    assert "lost contact" in found["error"] and found["seconds"] < 60


def test_calls_that_differ_between_ranks_are_an_error_on_each(tmp_path):
    errors = launch(2, tmp_path, "call differently")
    assert [len(x) for x in errors] == [8, 8]  # with and without `length`
    assert all("the ranks make different calls" in error for x in errors for error in x)
    for first in (0, 4):
        mask, segments, dtype, model = errors[1][first : first + 4]
        assert mask.endswith("with mask") and segments.endswith("with segments") and model.endswith("with segments")
        assert "float64" in dtype and "float32" in errors[0][first + 2]


class Mesh:
    ndim = 2
    mesh_dim_names = ("data", "context")


def test_what_is_not_supported_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"one dimension of the mesh.*mesh\['NAME'\]"), weft.parallel.context(Mesh()):
        pass
    from weft.core import sharding
    from weft.parallel.traffic import _Counting

    q = torch.randn(1, 2, 10, 8)
    refused = {
        "routing": ({}, "does not support context parallelism; use one of"),
        "sparse": ({"pattern": "strided"}, "pattern='fixed'"),
        "combiner-fixed": ({"levels": 3}, "levels=2"),
    }
    for name, (options, message) in refused.items():
        attn = weft.make_attention(name, heads=2, head_dim=8, **options)
        with sharding.use(_Counting(0, 2, 20)), pytest.raises(ValueError, match=message):
            attn(q, q, q)
    with sharding.use(_Counting(0, 2, 20)), pytest.raises(ValueError, match="AttentionCache does not support context"):
        weft.layers.AttentionCache(weft.MultiheadAttention(8, 2))(torch.randn(1, 10, 8))
    with sharding.use(_Counting(0, 2, 30)), pytest.raises(ValueError, match="should hold 15 of 30 tokens, got 10"):
        weft.make_attention("local", heads=2, head_dim=8)(q, q, q)


def models_of_whole_sequences():
    from weft.models.language import TwoSegments

    image, size = torch.rand(1, 3, 8, 8), {"dim": 8, "heads": 2, "layers": 1}
    images = {**size, "image_size": 8, "patch": 4, "classes": 2}
    ids = torch.ones(1, 10, dtype=torch.long)
    words = TwoSegments(5, max_length=20, head_dim=4, positions="learned", **size)
    yield "mm", weft.ISTA(8, variant="mm", epsilon=0.5), (torch.randn(1, 10, 8),)
    yield "TwoSegments", words, (ids, ids)
    yield "ImageClassifier", weft.models.ImageClassifier(8, 2, head_dim=4, **size), (image,)
    yield "CRATE", weft.models.CRATE(**images), (image,)
    yield "CRATEMAE", weft.models.CRATEMAE(**size, image_size=8, patch=4), (image,)


@pytest.mark.parametrize("name, model, inputs", list(models_of_whole_sequences()))
def test_models_that_need_the_whole_sequence_are_refused(name, model, inputs):
    """They would count the tokens of a rank as all tokens, or an image of every rank as a part of one."""
    from weft.core import sharding
    from weft.parallel.traffic import _Counting

    model.eval()(*inputs)
    with sharding.use(_Counting(0, 2, 20)), pytest.raises(ValueError, match=f"{name}.* does not support context"):
        model(*inputs)


def test_dropout_also_applies_to_global_tokens():
    from weft.core import sharding
    from weft.parallel.traffic import _Counting

    class Alone(_Counting):
        def all_to_all(self, parts, counts):
            return parts

    attn = weft.make_attention("longformer", heads=2, head_dim=8, window=4, global_tokens=2, dropout=0.5)
    q = torch.randn(1, 2, 40, 8)
    with sharding.use(Alone(0, 1, 40)):
        out = attn(q, q, torch.ones_like(q))
        assert ((out - 1).abs().amax((0, 1, 3))[:2] > 1e-5).all()
        torch.testing.assert_close(attn.eval()(q, q, torch.ones_like(q)), torch.ones_like(q))


@pytest.mark.parametrize("name", SHARDED)
def test_second_derivatives_are_refused(name):
    """They would lack what comes from other ranks."""
    from weft.core import sharding
    from weft.parallel.traffic import _Counting

    attn = weft.make_attention(name, heads=2, head_dim=8)
    q = torch.randn(1, 2, 10, 8, requires_grad=True)
    with sharding.use(_Counting(0, 2, 20)), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        (gradient,) = torch.autograd.grad(attn(q, q, q).square().sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            gradient.sum().backward()


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("method", ["weights", "prefill"])
def test_methods_that_need_the_whole_sequence_are_refused(name, method):
    from weft.core import sharding
    from weft.parallel.traffic import _Counting

    attn = weft.make_attention(name, heads=2, head_dim=8, causal=True, max_length=20)
    q = torch.randn(1, 2, 10, 8)
    with sharding.use(_Counting(0, 2, 20)), pytest.raises(ValueError, match=f"{method} does not support context"):
        getattr(attn, method)(q, q, q)


@pytest.mark.parametrize("kind", ["module", "function", "share of heads"])
def test_full_refuses_a_bias_whose_gradient_it_does_not_compute(kind):
    from weft.core import sharding
    from weft.parallel.traffic import _Counting

    learned = weft.RelativeBias(2, 4)
    bias = (lambda i, j: learned(i, j)) if kind == "function" else learned
    layer = weft.MultiheadAttention(8, 2)
    if kind == "share of heads":
        layer = weft.MixedAttention(8, 2, attentions=["full", "full"])
    with sharding.use(_Counting(0, 2, 20)), pytest.raises(ValueError, match="does not compute the gradient"):
        layer(torch.randn(1, 10, 8), None, bias)


@pytest.mark.parametrize("name", SHARDED)
def test_recomputing_outside_of_the_block_is_refused(name):
    """It would treat the part as a whole sequence."""
    from torch.utils.checkpoint import checkpoint

    from weft.core import sharding
    from weft.parallel.traffic import _Counting

    attn = weft.make_attention(name, heads=2, head_dim=8, causal=True)
    q = torch.randn(1, 2, 10, 8, requires_grad=True)
    with sharding.use(_Counting(0, 2, 20)):
        checkpoint(attn, q, q, q, use_reentrant=False).sum().backward()
        out = checkpoint(attn, q, q, q, use_reentrant=False)
    with pytest.raises(RuntimeError, match=r"outside of weft.parallel.context: call backward\(\) inside"):
        out.sum().backward()
