"""Each baseline against its formula, written out plainly: O(L²) references straight from the papers' index sets."""

from __future__ import annotations

import math

import pytest
import torch
from promises import HEAD_DIM, HEADS, qkv

import weft
from weft.attention.bigbird import random_plan

EXACT = {"atol": 1e-10, "rtol": 1e-8}


def make(name, **options):
    torch.manual_seed(0)
    return weft.make_attention(name, heads=HEADS, head_dim=HEAD_DIM, **options).double().eval()


def over_set(q, k, v, legal):
    """softmax(q kᵀ/√D) v over the pairs (i, j) that `legal` allows, (L, L) or (H, L, L)."""
    logits = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return logits.masked_fill(~legal, float("-inf")).softmax(-1) @ v


def pairs(L, rule):
    return torch.tensor([[bool(rule(i, j)) for j in range(L)] for i in range(L)])


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("L", (1, 7, 20))
def test_full(causal, L):
    q, k, v = qkv(L)
    expected = over_set(q, k, v, pairs(L, lambda i, j: j <= i or not causal))
    torch.testing.assert_close(make("full", causal=causal)(q, k, v), expected, **EXACT)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("block", (1, 3, 4, 50))
def test_local(causal, block):
    q, k, v = qkv(14)
    legal = pairs(14, lambda i, j: i // block == j // block and (j <= i or not causal))
    torch.testing.assert_close(
        make("local", block_size=block, causal=causal)(q, k, v), over_set(q, k, v, legal), **EXACT
    )


@pytest.mark.parametrize("window", (1, 2, 3, 4, 5, 9, 100))
@pytest.mark.parametrize("g", (0, 1, 3))
@pytest.mark.parametrize("causal", (False, True))
def test_longformer(window, g, causal):
    L = 37

    def legal(i, j):
        if causal:
            return j <= i and (i - j < window or j < g or i < g)
        near = abs(i - j) <= window // 2 if window % 2 else i - window // 2 + 1 <= j <= i + window // 2
        return near or i < g or j < g

    q, k, v = qkv(L)
    attn = make("longformer", window=window, global_tokens=g, causal=causal)
    torch.testing.assert_close(attn(q, k, v), over_set(q, k, v, pairs(L, legal)), **EXACT)


@pytest.mark.parametrize("L", (1, 4, 8, 9, 16, 33, 47, 48))
def test_bigbird(L):
    m, r = 4, 3
    plan = random_plan(L, m, r, HEADS, seed=2)
    n = -(-L // m)
    legal = torch.stack(
        [
            pairs(
                L,
                lambda i, j, h=h: (b := i // m) in (0, n - 1) or j // m in {0, b - 1, b, b + 1, n - 1, *plan[h, b - 1]},
            )
            for h in range(HEADS)
        ]
    )
    q, k, v = qkv(L)
    attn = make("bigbird", block_size=m, random_blocks=r, seed=2)
    torch.testing.assert_close(attn(q, k, v), over_set(q, k, v, legal), **EXACT)


@pytest.mark.parametrize("length", (48, 320, 2048))
def test_bigbird_draws_each_block_once_and_never_one_of_the_band(length):
    plan = random_plan(length, 16, 3, 4, seed=1)
    n = length // 16
    for b in range(1, n - 1):
        for h in range(4):
            drawn = [x for x in plan[h, b - 1] if x >= 0]
            assert len(set(drawn)) == len(drawn)
            assert not set(drawn) & {0, b - 1, b, b + 1, n - 1}
            assert all(x * 16 < 1024 for x in drawn)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("L", (1, 63, 64, 65, 130))
def test_linear(causal, L):
    q, k, v = qkv(L)
    a, b = torch.nn.functional.elu(q) + 1, torch.nn.functional.elu(k) + 1
    products = a @ b.transpose(-1, -2)
    if causal:
        products = products.tril()
    expected = products @ v / (products.sum(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(make("linear", causal=causal)(q, k, v), expected, **EXACT)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("L", (1, 64, 65, 130))
def test_performer_relu(causal, L):
    q, k, v = qkv(L)
    products = (q.relu() + 1e-3) @ (k.relu() + 1e-3).transpose(-1, -2)
    products = products.tril() if causal else products
    expected = products / products.sum(-1, keepdim=True) @ v
    torch.testing.assert_close(make("performer", kernel="relu", causal=causal)(q, k, v), expected, **EXACT)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("L", (1, 64, 65, 130))
@pytest.mark.parametrize("scale", (1.0, 30.0))
def test_performer_softmax(causal, L, scale):
    """Against the formula, with the largest p · t of the keys in each sum; exact also for large keys."""
    attn = make("performer", features=5, causal=causal)
    q, k, v = qkv(L)
    k = k * scale
    projected, e = [], []  # p_m · t and p_m · t - |t|²/2, for queries and for keys
    for x in (q, k):
        t = x / HEAD_DIM**0.25
        projected.append(t @ attn.projection.T)
        e.append(projected[-1] - t.square().sum(-1, keepdim=True) / 2)
    a = (e[0] - projected[0].amax(-1, keepdim=True)).exp() + 1e-6
    expected = torch.zeros_like(v)
    for i in range(L):
        keys = slice(0, i + 1 if causal else L)
        b = (e[1][:, :, keys] - projected[1][:, :, keys].amax((-1, -2), keepdim=True)).exp() + 1e-6
        p = (a[:, :, i : i + 1] @ b.transpose(-1, -2)).squeeze(2)
        expected[:, :, i] = (p[..., None] * v[:, :, keys]).sum(2) / p.sum(-1, keepdim=True)
    torch.testing.assert_close(attn(q, k, v), expected, **EXACT)


def test_performer_features_are_orthogonal_and_approach_softmax():
    attn = make("performer", features=HEAD_DIM)
    directions = torch.nn.functional.normalize(attn.projection, dim=-1)
    torch.testing.assert_close(directions @ directions.T, torch.eye(HEAD_DIM, dtype=torch.float64), atol=1e-6, rtol=0)
    q, k, v = (x * 0.5 for x in qkv(20))
    exact = make("full")(q, k, v)

    def error(features):
        attn = make("performer", features=features, epsilon=0.0)
        total = []
        for seed in range(8):
            torch.manual_seed(seed)
            attn.redraw()
            total.append((attn(q, k, v) - exact).norm() / exact.norm())
        return torch.stack(total).mean()

    assert error(2048) < 0.25 * error(32) and error(2048) < 0.1


def test_linformer():
    q, k, v = qkv(11)
    attn = make("linformer", rank=4, max_length=16)
    F = attn.kernel[:11].detach()
    k2, v2 = (torch.einsum("lr,bhld->bhrd", F, x) for x in (k, v))
    everything = torch.ones(11, 4, dtype=torch.bool)
    torch.testing.assert_close(attn(q, k, v), over_set(q, k2, v2, everything), **EXACT)


@pytest.mark.parametrize("iterations", (0, 20))
def test_sinkhorn(iterations):
    m, n = 3, 4
    attn = make("sinkhorn", block_size=m, max_length=m * n, iterations=iterations)
    q, k, v = qkv(m * n)
    q_b, k_b, v_b = (x.unflatten(2, (n, m)) for x in (q, k, v))
    R = k_b.sum(3) @ attn.sort.detach()
    for _ in range(iterations):
        R = R.log_softmax(-1)
        R = R.log_softmax(-2)
    R = R.softmax(-1)
    everything = torch.ones(m, m, dtype=torch.bool)
    sorted_k, sorted_v = (torch.einsum("bhnN,bhNsd->bhnsd", R, x) for x in (k_b, v_b))
    expected = over_set(q_b, k_b, v_b, everything) + over_set(q_b, sorted_k, sorted_v, everything)
    torch.testing.assert_close(attn(q, k, v), expected.flatten(2, 3), **EXACT)


def test_sinkhorn_really_sorts():
    """The sorting has an effect and a gradient (in the published code it has neither)."""
    attn = make("sinkhorn", block_size=3, max_length=12)
    q, k, v = qkv(12)
    before = attn(q, k, v)
    before.square().sum().backward()
    assert attn.sort.grad.abs().max() > 1e-3
    with torch.no_grad():
        attn.sort.mul_(-1)
    assert (attn(q, k, v) - before).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ("random", "factorized", "dense"))
@pytest.mark.parametrize("dot", (False, True))
@pytest.mark.parametrize("causal", (False, True))
def test_synthesizer(kind, dot, causal):
    L = 9
    attn = make("synthesizer", kind=kind, rank=3, dot=dot, causal=causal, max_length=12)
    q, k, v = qkv(L)
    f = [p.detach() for p in attn.factors]
    R = {
        "random": lambda: f[0][:, :L, :L],
        "factorized": lambda: torch.einsum("hir,hrj->hij", f[0][:, :L], f[1][:, :, :L]),
        "dense": lambda: torch.einsum("bhie,hej->bhij", torch.einsum("bhid,hde->bhie", q, f[0]).relu(), f[1][:, :, :L]),
    }[kind]()
    logits = R + (q @ k.transpose(-1, -2) / math.sqrt(HEAD_DIM) if dot else 0)
    logits = logits.expand(2, HEADS, L, L).masked_fill(~pairs(L, lambda i, j: j <= i or not causal), float("-inf"))
    torch.testing.assert_close(attn(q, k, v), logits.softmax(-1) @ v, **EXACT)


@pytest.mark.parametrize("causal", (False, True))
def test_reformer(causal):
    L, chunk = 29, 3
    attn = make("reformer", chunk=chunk, buckets=4, hashes=2, causal=causal)
    q, k, v = qkv(L)
    expected, total = torch.zeros_like(v), torch.zeros(2, HEADS, L, dtype=torch.float64)
    shared = torch.nn.functional.normalize(q, dim=-1)
    for rotation in attn.rotations:
        turned = q @ rotation
        bucket = torch.cat([turned, -turned], -1).argmax(-1)
        for b in range(2):
            for h in range(HEADS):
                seen: dict[int, int] = {}
                run = []
                for t in range(L):
                    x = bucket[b, h, t].item()
                    run.append((x, seen.get(x, 0) // chunk))
                    seen[x] = seen.get(x, 0) + 1
                for i in range(L):
                    P = [j for j in range(L) if run[j][0] == run[i][0] and run[i][1] - run[j][1] in (0, 1)]
                    P = [j for j in P if j <= i or not causal]
                    P = [j for j in P if j != i] or [i]
                    e = (q[b, h, i] @ shared[b, h, P].T / math.sqrt(HEAD_DIM)).exp()
                    expected[b, h, i] += e @ v[b, h, P]
                    total[b, h, i] += e.sum()
    torch.testing.assert_close(attn(q, k, v), expected / total[..., None], **EXACT)


def test_reformer_does_not_read_k():
    q, k, v = qkv(12)
    attn = make("reformer", chunk=3, buckets=4)
    assert torch.equal(attn(q, k, v), attn(q, torch.randn_like(k), v)) and not attn.reads_k
