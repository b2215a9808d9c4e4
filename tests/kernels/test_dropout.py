"""Dropout inside the kernels: outputs and gradients equal the plain version with the same probabilities dropped."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from itertools import product

import numpy as np
import pytest
import torch
from counters import mixed, words
from promises import DEVICE

import weft
from weft.attention.subsampled.gather import sampled_attention
from weft.core.dense import dense_logits, runs_of, same
from weft.kernels.lines.kernel import LinePart

pytest.importorskip("triton")

P, KEY = 0.3, 2**61 + 98765
CALLS = {
    "axial": ({"block_size": 9}, {"block_size": 13}),
    "bigbird": ({"block_size": 6, "random_blocks": 1}, {"block_size": 10}),
    "combiner-fixed": ({"block_size": 16}, {"block_size": 20}),
    "combiner-logsparse": ({"summary": "mean"}, {"summary": "max"}),
    "combiner-routing": ({"clusters": 3, "capacity": 5}, {"clusters": 4, "capacity": 9, "summary": "mean"}),
    "linformer": ({"max_length": 300}, {"max_length": 320, "rank": 5}),
    "local": ({"block_size": 9}, {"block_size": 40}),
    "logsparse": ({}, {}),
    "longformer": ({"window": 8}, {"window": 7, "global_tokens": 3}),
    "reformer": ({"chunk": 5, "buckets": 4, "hashes": 1}, {"chunk": 4, "buckets": 4, "hashes": 3}),
    "routing": ({"clusters": 3, "capacity": 5}, {"clusters": 2, "capacity": 9}),
    "sparse": ({"block_size": 8, "columns": 2}, {"block_size": 17, "columns": 3, "leading_column": True}),
    "strided": ({"block_size": 4, "pattern": "strided"}, {"block_size": 9, "pattern": "strided"}),
}
GRIDS = {
    "combiner-axial": ({}, {}),
    "combiner-axial-horizontal": ({}, {"split": True}),
    "combiner-axial-vertical": ({}, {"summary": "relu-max"}),  # pooled by PyTorch
    "combiner-mixture": ({}, {"mixture": "joint"}),
}


def factors(B, H, L, column) -> torch.Tensor:
    """(B, H, L, n): 1/(1 − p), or 0 for what the kernels drop; `column` (L, n) is the number of a query's key."""
    low, high = words(KEY)
    heads = mixed(np.arange(B * H)).reshape(B, H, 1, 1)
    word = mixed(mixed(np.arange(L).astype(np.uint32)[:, None] ^ low) ^ high ^ heads)
    with np.errstate(over="ignore"):
        drawn = mixed(word ^ column.astype(np.uint32) * np.uint32(0x9E3779B1)) >> np.uint32(8)
    threshold = round(P * 2**24)
    return torch.tensor((drawn.astype(np.int64) >= threshold) * (2**24 / (2**24 - threshold)))


def span_ends(i, j, L):
    """The token nearest to i of the dyadic span of i that contains j; i itself if j = i."""
    after = j > i  # these spans are counted from the end of the sequence
    p = np.where(after, L - 1 - i, i)
    bits = np.frexp(p ^ np.where(after, L - 1 - j, j))[1]
    end = (p >> bits << bits) + (1 << bits >> 1) - 1
    return np.where(i == j, i, np.where(after, L - 1 - end, end))


def last_tokens(attn, k, mask):
    """(B, H, L, L): the token whose summary query i reads for j: the last one, up to i if causal, of j's run; j itself
    if they share a run."""
    nearest = (k @ attn.clusters.centroids.mT).argmax(-1)
    group, run = runs_of(nearest, mask, attn.clusters.size(k.shape[2]))
    together, t = same(group) & same(run), torch.arange(k.shape[2])
    up_to = t <= t[:, None, None] if attn.causal else t >= 0
    last = torch.where(together[:, :, None] & up_to, t, -1).amax(-1)
    return torch.where(together, t, last).cpu().numpy()


def test_every_kernel_with_dropout_is_tested():
    infos = [weft.attention_info(name) for name in weft.attentions()]
    able = {x.name for x in infos if x.kernel is not None and x.kernel.dropout and x.dropout == "probabilities"}
    others = {"sinkhorn", "subsampled"}  # two matrices, and random samples: in their own tests
    assert able == {*CALLS, *GRIDS, *others} - {"strided"}


def test_sinkhorn_drops_the_same_forward_and_backward():
    attn = weft.make_attention("sinkhorn", heads=1, head_dim=16, max_length=40, dropout=P, backend="triton")
    *tensors, dout = torch.randn(4, 1, 1, 33, 16)
    q, k, v = (x.requires_grad_() for x in tensors)
    out = attn(q, k, v)
    (dv,) = torch.autograd.grad(out, v, dout)
    torch.testing.assert_close((dv * v).sum(), (out * dout).sum())  # out is linear in v
    kept = torch.stack([attn(q, k, v) for _ in range(1 if DEVICE == "cpu" else 200)]).mean(0)
    assert not torch.allclose(kept, attn.eval()(q, k, v))
    if DEVICE != "cpu":
        assert (kept - attn(q, k, v)).norm() < 0.1 * kept.norm()


# All combinations on a GPU; one or two of each mechanism in Triton's interpreter, which is slow.
EVERY = [(name, i, causal, masked) for name in CALLS for i in (0, 1) for causal in (True, False) for masked in (0, 1)]
EVERY = [case for case in EVERY if not (case[0] in ("bigbird", "linformer") and case[2])]
ONE = "axial", "bigbird", "combiner-logsparse", "linformer", "logsparse", "routing", "strided"
FEW = [(name, i, i == 0 or name == "combiner-logsparse", i) for name in CALLS for i in (0, 1) if i or name not in ONE]


@pytest.mark.parametrize(("name", "which", "causal", "masked"), FEW if DEVICE == "cpu" else EVERY)
def test_kernels_drop_the_same_probabilities_forward_and_backward(name, which, causal, masked, monkeypatch):
    torch.manual_seed(0)
    options = CALLS[name][which]
    name = "sparse" if name == "strided" else name
    group = 1 + which  # heads of q for each head of k and v
    B, H, L, D = (2 // group, group, 25, 16) if DEVICE == "cpu" else (2, 4, 300, 64)
    L = max(L, 40) if name.endswith("logsparse") else L  # two tiles of the kernel
    if name == "combiner-routing":  # its specification computes L³ D numbers per head
        L, D = (40, 16) if DEVICE == "cpu" else (100, 32)
    attn = weft.make_attention(name, heads=H, head_dim=D, causal=causal, dropout=P, backend="triton", **options)
    wide = copy.deepcopy(attn).double().eval()
    monkeypatch.setattr(torch, "randint", lambda *_, device: torch.tensor([KEY], device=device))
    tensors = [torch.randn(B, L, heads, D).transpose(1, 2) for heads in (H, H // group, H // group, H)]
    mask = torch.rand(B, L) > 0.2 if masked else None
    i, j = np.arange(L)[:, None], np.arange(L)[None, :]
    column = np.broadcast_to(j, (L, L))
    if name == "combiner-fixed":  # a summary is dropped as a whole
        m = options["block_size"]
        column = np.where(i // m == j // m, j, L + j // m)
    if name == "combiner-logsparse":
        column = span_ends(i, j, L)
    if name == "combiner-routing":
        column = last_tokens(wide, tensors[1].double().repeat_interleave(group, 1), mask)
    if name == "linformer":
        column = column[:, : attn.kernel.shape[1]]  # slots
    rounds = options.get("hashes", 1)  # each has its own dropout
    drops = factors(rounds * B, H, L, column).view(rounds, B, H, L, -1).to(tensors[0].device)
    results = []
    for dtype in (torch.float64, torch.float32):
        *qkv, dout = (x.to(dtype).requires_grad_() for x in tensors)
        if dtype == torch.float64:
            q, k, v = wide.clean(qkv[0], *(x.repeat_interleave(group, 1) for x in qkv[1:3]), mask)
            each = torch.ones_like(drops)
            if name == "linformer":
                k, v = (wide.kernel[:L].T @ x for x in (k, v))
                weights = dense_logits(q, k).softmax(-1)
            else:
                unit = torch.eye(L, dtype=dtype).expand(B, H, L, L)
                weights = wide.info.naive(wide, q, k, unit, mask)
            if name == "reformer":  # a pair has the same probability in each round in which they meet
                rotations = wide.rotations
                for number in range(rounds):
                    wide.rotations = rotations[number, None]
                    each[number] = wide.info.naive(wide, q.detach(), k, unit, mask) > 0
            out = (weights * (drops * each).sum(0) / each.sum(0).clamp(min=1)) @ v
        else:
            out = attn(*qkv, mask)
        if mask is not None:
            out = out * mask[:, None, :, None]
        results.append((out, *torch.autograd.grad(out, qkv, dout, allow_unused=True, materialize_grads=True)))
    for truth, mine in zip(*results, strict=True):
        assert (truth - mine).norm() <= 1e-4 * truth.norm()


def numbers(attn, L) -> np.ndarray:
    """(L, n): the numbers of every query's keys, in the order of the plain version of a grid Combiner."""
    m = attn.block_size
    i, rows = np.arange(L)[:, None], -(-L // m)
    cells = {"row": i // m * m + np.arange(m), "column": np.arange(rows) * m + i % m}
    if attn.name == "combiner-axial":
        parts = [LinePart(0, "row", "all"), LinePart(1, "column", "others")]
    else:
        parts = attn.direct_parts() + attn.line_parts()[1]
    return np.concatenate([part.source * rows * m + cells[part.axis] for part in parts], 1)


EVERY_GRID = [(name, i, *flags) for name in GRIDS for i in (0, 1) for flags in product((True, False), (0, 1))]
# A mixture runs all kernels of -horizontal and -vertical, except with the summaries that PyTorch pools.
FEW_GRIDS = [(name, i, i == 0, i) for name in ("combiner-axial", "combiner-mixture") for i in (0, 1)]
FEW_GRIDS += [("combiner-axial-vertical", 1, False, 1)]


@pytest.mark.parametrize(("name", "which", "causal", "masked"), FEW_GRIDS if DEVICE == "cpu" else EVERY_GRID)
def test_grid_combiners_drop_what_the_plain_version_drops(name, which, causal, masked, monkeypatch):
    """The plain version drops the same keys and summaries of its softmax; a mixture those of each factorisation."""
    torch.manual_seed(0)
    B, H, L, D = (1, 1 + (name == "combiner-axial"), 5 - which, 16) if DEVICE == "cpu" else (2, 4, 300, 64)
    options = {"block_size": 2 if DEVICE == "cpu" else (9, 130)[which], **GRIDS[name][which]}
    attn = weft.make_attention(name, heads=H, head_dim=D, causal=causal, dropout=P, **options)
    monkeypatch.setattr(torch, "randint", lambda *_, device: torch.tensor([KEY], device=device))
    heads = H, max(1, H // 2), max(1, H // 2), H
    tensors = [torch.randn(B, L, h, D).transpose(1, 2) for h in heads]
    mask = torch.rand(B, L) > 0.2 if masked else None
    softmaxes = list(getattr(attn, "factorisations", [attn]))
    drops = [factors(B, H, L, numbers(each, L)).to(tensors[0].device) for each in softmaxes]
    results = []
    for backend, dtype in (("torch", torch.float64), ("triton", torch.float32)):
        *qkv, dout = (x.to(dtype).requires_grad_() for x in tensors)
        attn.backend = backend
        left = iter(drops)
        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.functional, "dropout", lambda p, rate, left=left: p * next(left))
            out = attn(*qkv, mask)
        assert len(list(left)) == (0 if backend == "torch" else len(drops))
        results.append((out, *torch.autograd.grad(out, qkv, dout)))
    for truth, mine in zip(*results, strict=True):
        assert (truth - mine).norm() < 1e-4 * truth.norm()


LENGTH = 99 if DEVICE == "cpu" else 297
SAMPLES = {  # options, causal, masked, ALiBi
    "drawn": ({"windows": 3, "keep": 0.8}, True, False, False),
    "masked": ({"windows": 2}, False, True, True),
    "once": ({"windows": 3}, False, False, False),
    "rectangles": ({"windows": (2, 2), "layout": (LENGTH // 3, 3)}, False, False, False),
    "given": ({"windows": 2}, True, True, True),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_subsampled_drops_each_source_of_a_sample(name, monkeypatch):
    """Also each copy of a source that a given sample repeats, but not the token that stands in for a sample."""
    torch.manual_seed(0)
    options, causal, masked, alibi = SAMPLES[name]
    B, H, L, D = (2, 2, LENGTH, 16) if DEVICE == "cpu" else (2, 4, LENGTH, 64)
    attn = weft.make_attention("subsampled", heads=H, head_dim=D, causal=causal, dropout=P, backend="triton", **options)
    key = torch.tensor([KEY]), round(P * 2**24)
    monkeypatch.setattr(weft.attention.subsampled, "dropout_key", lambda *call: key)
    if name == "drawn":
        monkeypatch.setattr(weft.attention.subsampled, "can_draw", lambda *call: True)  # in Triton's interpreter too
    tensors = [torch.randn(B, L, heads, D).transpose(1, 2) for heads in (H, H // 2, H // 2, H)]
    mask, bias = torch.rand(B, L) > 0.3 if masked else torch.ones(B, L) > 0, weft.ALiBi(H) if alibi else None
    given = torch.arange(L // 2, L).repeat(2, 2) if name == "given" else None  # none for the first targets, if causal
    *qkv, dout = (x.requires_grad_() for x in tensors)
    with nullcontext() if given is None else attn.fixed(given):
        out = attn(*qkv, mask if masked else None, bias)
    out = out * mask[:, None, :, None]
    mine = out, *torch.autograd.grad(out, qkv, dout)

    sources = attn.last_indices.long().to(mask.device).sort(-1).values
    real = mask[:, sources.clamp(max=L - 1)] & (sources < L)
    slot = (real.cumsum(-1) - 1)[:, None, :, None]  # of the real ones, in order
    drops = factors(B, H, L, np.arange(sources.shape[1])[None]).to(mask.device)
    b, h = torch.arange(B).view(B, 1, 1, 1, 1), torch.arange(H).view(H, 1, 1, 1)

    def kept(t, s):
        return drops[b, h, t, slot] if t.dim() == 5 else torch.ones_like(s)

    *qkv, dout = (x.detach().double().requires_grad_() for x in tensors)
    k, v = (x.repeat_interleave(2, 1) * mask[:, None, :, None] for x in qkv[1:])
    options = {"targets": attn.targets(L), "causal": causal, "mask": mask if masked else None, "bias": bias}
    out = sampled_attention(qkv[0], k, v, sources, gate=kept, **options) * mask[:, None, :, None]
    for truth, found in zip((out, *torch.autograd.grad(out, qkv, dout)), mine, strict=True):
        assert (truth - found).norm() < 1e-4 * truth.norm()


def test_dropout_is_repeated_from_the_seed_and_gone_in_eval():
    attn = weft.make_attention("local", heads=2, head_dim=16, dropout=0.5, backend="triton")
    q = torch.randn(1, 2, 40, 16)
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(attn(q, q, q))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    torch.testing.assert_close(attn.eval()(q, q, q), weft.attention_info("local").naive(attn, q, q, q))
