"""The sparse mechanisms that Combiners are built on, against their index sets."""

import pytest
import torch

import weft
from weft.attention.partitions import log_spans

H, D = 2, 5


def qkv(L, seed=0, B=2):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(3, B, H, L, D, generator=g, dtype=torch.float64).unbind(0)


def dense(q, k, v, allowed, bias=None):
    """Softmax attention over an L x L mask: the truth, at small L."""
    s = q @ k.transpose(-1, -2) / D**0.5
    if bias is not None:
        i = torch.arange(q.shape[2])
        s = s + bias(i[None, None, :, None], i[None, None, None])
    s = s.masked_fill(~allowed, float("-inf"))
    alive = allowed.any(-1, keepdim=True)
    return (s.masked_fill(~alive, 0).softmax(-1).masked_fill(~alive, 0) * allowed) @ v


def fixed(L, m, c, leading=False):
    i, j = torch.arange(L)[:, None], torch.arange(L)[None]
    return (i // m == j // m) | (j % m >= m - c) | (leading & (j % m == 0))


def strided(L, m):
    i, j = torch.arange(L)[:, None], torch.arange(L)[None]
    return ((i - j).abs() <= m) | ((i - j) % m == 0)


def axial(L, m):
    i, j = torch.arange(L)[:, None], torch.arange(L)[None]
    return (i // m == j // m) | (i % m == j % m)


def logsparse(L, causal):
    allowed = torch.eye(L, dtype=torch.bool)
    for i in range(L):
        for a, size in log_spans(i):
            allowed[i, a + size - 1] = True
    return allowed if causal else allowed | allowed.flip(0, 1)


def powers(L):
    distance = (torch.arange(L)[:, None] - torch.arange(L)[None]).abs()
    return (distance & (distance - 1)) == 0


def pattern(name, options, L, causal):
    m = options.get("block_size", 1)
    allowed = {
        "sparse": lambda: (
            strided(L, m)
            if options.get("pattern") == "strided"
            else fixed(L, m, options.get("columns", 10), options.get("leading_column", False))
        ),
        "axial": lambda: axial(L, m),
        "logsparse": lambda: powers(L) if options.get("offsets") == "powers" else logsparse(L, causal),
    }[name]()
    return allowed.tril() if causal else allowed


CASES = [
    *[("sparse", {"block_size": m, "columns": c}) for m, c in ((4, 1), (5, 2), (3, 7), (1, 1), (40, 3), (4, 0))],
    ("sparse", {"block_size": 5, "columns": 2, "leading_column": True}),
    *[("sparse", {"pattern": "strided", "block_size": m}) for m in (1, 3, 4, 40)],
    *[("axial", {"block_size": m}) for m in (1, 3, 4, 40)],
    ("logsparse", {}),
    ("logsparse", {"offsets": "powers"}),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name, options", CASES, ids=str)
def test_index_sets(name, options, causal):
    for L in (1, 2, 5, 16, 17, 33, 39):
        attn = weft.make_attention(name, heads=H, head_dim=D, causal=causal, **options)
        q, k, v = qkv(L)
        allowed = pattern(name, options, L, causal)
        torch.testing.assert_close(attn(q, k, v), dense(q, k, v, allowed), atol=1e-12, rtol=0)
        mask = torch.rand(2, L, generator=torch.Generator().manual_seed(L)) < 0.6
        mask[1] = L > 5  # a row that is whole, and, in short sequences, a row without any token
        bias = weft.ALiBi(H)
        want = dense(q, k, v, allowed & mask[:, None, None], bias)
        torch.testing.assert_close(attn(q, k, v, mask, bias), want, atol=1e-12, rtol=0)


@pytest.mark.parametrize("leading", [False, True])
def test_the_study_of_wide_attention(leading):
    """One-way over the tokens behind the first, which sees and is seen by all."""
    for L in (1, 2, 6, 23):
        attn = weft.make_attention(
            "sparse", heads=H, head_dim=D, block_size=4, columns=1, leading_column=leading, cls=True, one_way=True
        )
        allowed = torch.ones(L, L, dtype=torch.bool)
        allowed[1:, 1:] = fixed(L - 1, 4, 1, leading).tril()
        q, k, v = qkv(L)
        mask = torch.ones(2, L, dtype=torch.bool)
        mask[0, L // 2 + 1 :] = False
        bias = weft.ALiBi(H)
        want = dense(q, k, v, allowed & mask[:, None, None], bias)
        torch.testing.assert_close(attn(q, k, v, mask, bias), want, atol=1e-12, rtol=0)
        torch.testing.assert_close(attn(q, k, v), dense(q, k, v, allowed), atol=1e-12, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("capacity", [2, 5, 64])
def test_routing_attends_within_runs(causal, capacity):
    L = 37
    attn = weft.make_attention("routing", heads=H, head_dim=D, causal=causal, clusters=3, capacity=capacity).double()
    q, k, v = qkv(L)
    mask = torch.ones(2, L, dtype=torch.bool)
    mask[0, 5:9] = False
    unit = torch.nn.functional.normalize(k, dim=-1)
    group = torch.einsum("bhld,hgd->bhlg", unit, attn.clusters.centroids).argmax(-1)
    group = group.masked_fill(~mask[:, None], -1)
    same = group[..., :, None] == group[..., None, :]
    run = (same.tril().sum(-1) - 1) // capacity  # how many of its cluster came before, in capacities
    allowed = same & (run[..., :, None] == run[..., None, :]) & mask[:, None, None]
    allowed = allowed.tril() if causal else allowed
    bias = weft.ALiBi(H)
    got = attn.eval()(q, k, v, mask, bias)
    torch.testing.assert_close(got, dense(q, k, v, allowed, bias), atol=1e-12, rtol=0)


def test_centroids_learn_in_training_only():
    torch.manual_seed(0)
    attn = weft.make_attention("routing", heads=H, head_dim=D, clusters=3, decay=0.5)
    q, k, v = (t.float() for t in qkv(20))
    start = attn.clusters.centroids.clone()
    attn.eval()(q, k, v)
    attn.train()(q, k, v)  # a call never sees its own batch
    assert torch.equal(attn.clusters.centroids, start)
    once = attn(q, k, v)
    assert not torch.equal(attn.clusters.centroids, start)
    torch.testing.assert_close(attn.clusters.centroids.norm(dim=-1), torch.ones(H, 3))
    assert torch.equal(attn.eval()(q, k, v), once)


def test_checkpointing_repeats_routing_exactly():
    torch.manual_seed(0)
    attn = weft.make_attention("routing", heads=H, head_dim=D, clusters=3, decay=0.2).double().train()
    grads = []
    state = {name: t.clone() for name, t in attn.state_dict().items()}
    for checkpoint in (False, True):
        attn.load_state_dict(state)
        attn(*qkv(20, 1))
        q, k, v = (t.requires_grad_() for t in qkv(20))
        if checkpoint:
            out = torch.utils.checkpoint.checkpoint(attn, q, k, v, use_reentrant=False)
        else:
            out = attn(q, k, v)
        grads.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
        grads.append(tuple(t.clone() for t in attn.clusters.buffers()))
    for a, b in zip(grads[0] + grads[1], grads[2] + grads[3], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name, options", CASES, ids=str)
def test_steps(name, options):
    L = 23
    attn = weft.make_attention(name, heads=H, head_dim=D, causal=True, **options)
    q, k, v = qkv(L)
    mask = torch.ones(2, L, dtype=torch.bool)
    mask[0, 3:6] = mask[1, :2] = False
    bias, state = weft.ALiBi(H), attn.start(2)
    whole = attn(q, k, v, mask, bias)
    for t in range(L):
        at = slice(t, t + 1)
        out, state = attn.step(q[:, :, at], k[:, :, at], v[:, :, at], state, mask[:, t], bias)
        torch.testing.assert_close(out[mask[:, t], :, 0], whole[mask[:, t], :, t], atol=1e-12, rtol=0)


def test_decoding_needs_a_block_size():
    for name in ("sparse", "axial"):
        with pytest.raises(ValueError, match="block_size or max_length"):
            weft.make_attention(name, heads=H, head_dim=D, causal=True).start(1)
