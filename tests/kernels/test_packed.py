"""Kernels that compute packed documents in place, held to the plain version on each group of documents."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from agree import TOLERANCE, poisoned_memory
from conftest import DEVICE

import weft
from weft.core import packing, self_test

H = 2 if DEVICE == "cuda" else 1
DTYPES = (torch.float32, torch.bfloat16, torch.float16) if DEVICE == "cuda" else (torch.float32,)
# Documents in two rows, with padding at the end of the second. One has a single token.
SHORT = [[13, 1, 6], [7]]
CASES = [  # options, lengths, causal, masked
    ("local", {"block_size": 5}, SHORT, False, True),
    ("local", {"block_size": 5}, SHORT, True, False),
    ("local", {"block_size": 70}, [[72, 1], [9]], True, False),  # more than one tile
    ("longformer", {"window": 6}, [[70, 1, 6], [7]], False, False),  # more than one piece
    ("longformer", {"window": 6}, SHORT, True, True),
    ("longformer", {"window": 60}, SHORT, True, False),
    ("linear", {}, [[130, 1], [9]], True, True),  # chunks of 128
    ("linear", {}, [[520, 1], [9]], False, True),  # chunks of 512
    ("combiner-fixed", {"block_size": 4}, SHORT, False, True),
    ("combiner-fixed", {"block_size": 4}, SHORT, True, False),
    ("combiner-fixed", {"block_size": 30}, [[290, 1], [9]], True, False),  # two chunks of queries
]
MANY = [[300, 1, 513], [700], [40] * 20]  # on a GPU: more documents and blocks than a tile has
if DEVICE == "cuda":  # first two tiles of summaries: slow in the interpreter
    CASES.append(("combiner-fixed", {"block_size": 1, "summary": "mean"}, [[70, 1, 6], [7]], True, True))
    CASES += [
        (name, options, MANY, causal, masked) for name, options, _, causal, _ in CASES for masked in (False, True)
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "options", "lengths", "causal", "masked"), CASES, ids=str)
def test_packed_kernels_equal_the_plain_version(name, options, lengths, causal, masked, dtype):
    torch.manual_seed(0)
    fused = weft.make_attention(name, heads=H, head_dim=16, causal=causal, backend="triton", **options).to(DEVICE)
    plain = weft.make_attention(name, heads=H, head_dim=16, causal=causal, backend="torch", **options)
    plain = plain.to(DEVICE, torch.float64)
    documents = weft.Segments.from_lengths(lengths, device=DEVICE)
    B, L = documents.shape
    *tensors, dout = torch.randn(4, B, L, H, 16, device=DEVICE).to(dtype).transpose(2, 3)
    mask = torch.rand(B, L, device=DEVICE) > 0.3 if masked else None
    found = []
    for attn, kind in ((fused, dtype), (plain, torch.float64)):
        inputs = [x.detach().to(kind).requires_grad_() for x in tensors]
        with poisoned_memory():
            out = attn(*inputs, mask, segments=documents)
            seen = documents.real(mask)[:, None, :, None]
            grads = torch.autograd.grad(out, inputs, dout.to(kind) * seen)
        assert (out * (documents.numbers == 0)[:, None, :, None] == 0).all()
        found.append([out * seen, *grads])
        assert bool(documents.plans) == (attn is plain)  # the kernel gathers nothing
    for mine, exact in zip(*found, strict=True):
        assert (mine.double() - exact).norm() <= TOLERANCE[dtype] * exact.norm() + 1e-7


GROUPED = [
    ("combiner-fixed", {"block_size": 4}),
    ("linear", {}),
    ("local", {"block_size": 5}),
    ("longformer", {"window": 6}),
]


@pytest.mark.parametrize(
    ("name", "options", "causal"), [(*x, x[0] == "local") for x in GROUPED] + [("linear", {}, True)]
)
def test_packed_kernels_read_grouped_heads_in_place(name, options, causal, monkeypatch):
    torch.manual_seed(0)
    attn = weft.make_attention(name, heads=2, head_dim=16, causal=causal, backend="triton", **options).to(DEVICE)
    documents = weft.Segments.from_lengths([[6, 1], [4]] if DEVICE == "cpu" else MANY, device=DEVICE)
    B, L = documents.shape
    q, k, v, dout = (torch.randn(B, heads, L, 16, device=DEVICE) for heads in (2, 1, 1, 2))

    def run(attn, expand):
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attn(inputs[0], *(expand(x) for x in inputs[1:]), segments=documents)
        return out, *torch.autograd.grad(out, inputs, dout)

    with monkeypatch.context() as patch:
        patch.setattr("weft.core.packing.spread", None)
        mine = run(attn, lambda x: x)
    attn.backend = "torch"
    for a, b in zip(mine, run(attn, lambda x: x.repeat_interleave(2, 1)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["local", "longformer", "combiner-fixed"])
def test_packed_kernels_drop_as_the_others_do(name):
    """One document per row equals the row itself; documents side by side drop the same forward and backward."""
    options = {"window": 6} if name == "longformer" else {"block_size": 5}
    attn = weft.make_attention(name, heads=2, head_dim=16, dropout=0.3, backend="triton", **options).to(DEVICE)
    *tensors, dout = torch.randn(4, 2, 2, 13, 16, device=DEVICE)

    def run(segments):
        torch.manual_seed(0)
        inputs = [x.detach().requires_grad_() for x in tensors]
        out = attn(*inputs, segments=segments)
        return out, *torch.autograd.grad(out, inputs, dout)

    for mine, theirs in zip(run(weft.Segments.from_lengths([[13], [13]], device=DEVICE)), run(None), strict=True):
        torch.testing.assert_close(mine, theirs)
    out, *_, dv = run(weft.Segments.from_lengths([[4, 9], [13]], device=DEVICE))
    torch.testing.assert_close((dv * tensors[2]).sum(), (out * dout).sum())  # out is linear in v


def flash(q, k, v, queries, keys, _, most, dropout, causal, *rest, scale):
    """What the operator of a GPU computes."""
    assert keys.dtype == queries.dtype == torch.int32 and keys.diff().max() <= most
    assert queries[-1] == len(q) and keys[-1] == len(k) == len(v)  # beyond the last document, gradients are undefined
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            *(x[a:b].transpose(0, 1)[None] for x, (a, b) in ((q, i), (k, j), (v, j))), is_causal=causal, scale=scale
        )
        for i, j in zip(pairwise(queries.tolist()), pairwise(keys.tolist()), strict=True)
    ]
    return (torch.cat(parts, 2)[0].transpose(0, 1),)


DOCUMENTS = (
    ("full", {}),
    ("synthesizer", {"rank": 5, "max_length": 20}),
    ("synthesizer", {"dot": False, "max_length": 13}),
)


@pytest.fixture
def variable(monkeypatch):
    """`variable(True)` lets PyTorch's variable-length attention run, `variable(False)` does not."""
    if DEVICE == "cpu":
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash)
    runs = packing.flash_runs if DEVICE == "cuda" else lambda *_: True
    return lambda answer: monkeypatch.setattr(packing, "flash_runs", runs if answer else lambda *_: False)


def close(found):
    for mine, exact in zip(*found, strict=True):
        assert (mine.double() - exact).norm() <= (3e-2 if DEVICE == "cuda" else 1e-12) * exact.norm()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [SHORT, [[13, 8, 7]]], ids=["padded", "no padding"])
@pytest.mark.parametrize(("name", "options"), DOCUMENTS, ids=str)
def test_variable_length_attention_equals_gathered_documents(name, options, lengths, causal, variable):
    torch.manual_seed(0)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float64
    attn = weft.make_attention(name, heads=2, head_dim=16, causal=causal, **options).to(DEVICE, dtype)
    *tensors, dout = torch.randn(4, len(lengths), 28 if len(lengths) == 1 else 20, 2, 16, device=DEVICE).transpose(2, 3)
    found = []
    for in_place, kind in ((True, dtype), (False, torch.float64)):
        variable(in_place)
        documents = weft.Segments.from_lengths(lengths, device=DEVICE)
        inputs = [x.to(dtype).to(kind).requires_grad_() for x in tensors]
        out = attn.to(kind)(*inputs, segments=documents)
        grads = torch.autograd.grad(out, [*inputs, *attn.parameters()], dout.to(kind), allow_unused=True)
        found.append([out, *(g for g in grads if g is not None)])
        assert bool(documents.plans) != in_place
    close(found)


SEES_ALL = (("sparse", {"block_size": 4, "columns": 1, "cls": True}), ("bigbird", {"block_size": 4}))


@pytest.mark.parametrize(("name", "options"), DOCUMENTS + SEES_ALL, ids=str)
def test_variable_length_attention_of_first_tokens(name, options, variable):
    """With a filler at the end, for which nothing is returned."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float64
    layer = weft.MultiheadAttention(16, 2, attention=name, **options).to(DEVICE, dtype)
    x, dout = torch.randn(1, 24, 16, device=DEVICE), torch.randn(2, 16, device=DEVICE)
    found = []
    for in_place, kind in ((True, dtype), (False, torch.float64)):
        variable(in_place)
        documents = weft.Segments.from_lengths([13, 8, 3], device=DEVICE, fillers=1)
        mine = x.to(dtype).to(kind).requires_grad_()
        out = layer.to(kind)(mine, segments=documents, first=True)
        grads = torch.autograd.grad(out, [mine, *layer.parameters()], dout.to(kind), allow_unused=True)
        found.append([out, *(g for g in grads if g is not None)])
        assert not grads[0][0, 21:].any() and ("one_per_row" in vars(documents)) != in_place
    close(found)


@pytest.mark.parametrize("kind", ["right", "wrong", "missing"])
def test_wrong_variable_length_attention_is_not_used(kind, monkeypatch):
    operator, calls = flash if DEVICE == "cpu" else torch.ops.aten._flash_attention_forward, []

    def changed(q, k, *rest, **options):
        calls.append(kind)
        return (operator(q, k.flip(0) if kind == "wrong" else k, *rest, **options)[0],)

    monkeypatch.delenv("WEFT_SELF_TEST", raising=False)
    monkeypatch.setattr(self_test, "_results", {})
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", None if kind == "missing" else changed)
    with torch.inference_mode():
        found = self_test.variable_lengths_pass(torch.device(DEVICE))
    assert bool(calls) == (kind != "missing") and found == (kind == "right")
