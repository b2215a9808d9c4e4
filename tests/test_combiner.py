"""Combiners against their definition: index sets, summaries, masks, lengths and block sizes."""

import combiner_reference as reference
import pytest
import torch

import weft
from weft.attention.summaries import SUMMARIES, Summary, max_of_others, running_max

H, D = 2, 4
LENGTHS = (1, 2, 7, 12, 17, 33)


def qkv(L, seed=0, B=1, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed + 100 * L)
    return torch.randn(3, B, H, L, D, generator=g, dtype=torch.float64).to(dtype).unbind(0)


def make(name, causal, **options):
    torch.manual_seed(3)
    return weft.make_attention(name, heads=H, head_dim=D, causal=causal, **options).double().eval()


def masks(L):
    """Nothing masked; left, right and interior padding; all but one; everything."""
    yield None
    for start, end in ((0, L // 2), (L - L // 3, L), (L // 3, L // 3 + 1 + L // 4), (1, L), (0, L)):
        mask = torch.ones(L, dtype=torch.bool)
        mask[start:end] = False
        yield mask


def sets_of(name, options, L, causal, attn, k, real):
    """The sets of every query of one head, k (L, D)."""
    m = options.get("block_size", 16)
    if name == "combiner-fixed":
        depth = options.get("levels", 2)
        if depth == 2:
            return lambda h: [reference.fixed(i, L, m, causal, options.get("own_span", False)) for i in range(L)]
        return lambda h: [reference.levels(i, L, m, depth, causal) for i in range(L)]
    if name == "combiner-logsparse":
        return lambda h: [reference.logsparse(i, L, causal) for i in range(L)]
    if name == "combiner-axial-vertical":
        return lambda h: [reference.vertical(i, L, m, causal) for i in range(L)]
    if name == "combiner-axial-horizontal":
        return lambda h: [reference.horizontal(i, L, m, causal, options.get("split", False)) for i in range(L)]
    if name == "combiner-mixture":
        return lambda h: [reference.joint(i, L, m, causal) for i in range(L)]
    assert name == "combiner-routing"

    def of_head(h):
        nearest, members, run = attn.clusters.nearest(k)[0, h].tolist(), {}, []
        for j in range(L):
            cluster = nearest[j] if real[j] else -1
            members[cluster] = members.get(cluster, 0) + 1
            run.append((cluster, (members[cluster] - 1) // options["capacity"]))
        return [reference.clusters(i, run, causal) for i in range(L)]

    return of_head


def children(m, depth):
    def of(span):
        """A span of more than one block is drawn from its children; the last one may be cut short."""
        size = next(m**t for t in range(1, depth + 1) if len(span) <= m**t and span[0] % m**t == 0)
        if size == m and len(span) <= m:
            return None
        inner = size // m
        return [span[a : a + inner] for a in range(0, len(span), inner)]

    return of


def check(name, options, causal, L, mask=None):
    attn = make(name, causal, **options)
    q, k, v = qkv(L)
    real = torch.ones(L, dtype=torch.bool) if mask is None else mask
    got = attn.weights(q, k, v, None if mask is None else mask[None])
    out = attn(q, k, v, None if mask is None else mask[None])
    sets = sets_of(name, options, L, causal, attn, k, real)
    pooling = next(module for module in attn.modules() if isinstance(module, Summary))
    depth = options.get("levels", 2)
    tree = children(options["block_size"], depth) if depth > 2 else None
    for h in range(H):
        want = reference.weights(q[0, h], k[0, h], sets(h), real, options.get("summary", "max"), pooling, tree)
        torch.testing.assert_close(got[0, h][real], want[real], atol=1e-10, rtol=0)
        torch.testing.assert_close(out[0, h][real], (want @ v[0, h])[real], atol=1e-10, rtol=0)
    return got, real


def check_support(got, real, causal):
    """Rows are distributions, positive on exactly what the query may see."""
    L = len(real)
    legal = real.expand(L, L)
    legal = legal.tril() if causal else legal
    rows = got[0][:, real]
    assert (rows >= 0).all()
    torch.testing.assert_close(rows.sum(-1), torch.ones_like(rows[..., 0]), atol=1e-12, rtol=0)
    assert torch.equal(rows > 0, legal[real].expand_as(rows))


VARIANTS = [
    *[("combiner-fixed", {"block_size": m}) for m in (1, 3, 4, 40)],
    *[("combiner-fixed", {"block_size": m, "levels": n}) for m, n in ((2, 3), (3, 3), (2, 4), (2, 6))],
    ("combiner-logsparse", {}),
    *[("combiner-axial-vertical", {"block_size": m}) for m in (1, 3, 4, 40)],
    *[("combiner-axial-horizontal", {"block_size": m}) for m in (1, 3, 4, 40)],
    ("combiner-axial-horizontal", {"block_size": 4, "split": True}),
    *[("combiner-mixture", {"block_size": m, "mixture": "joint"}) for m in (1, 3, 4)],
    *[("combiner-routing", {"clusters": g, "capacity": c}) for g, c in ((3, 2), (3, 5), (4, 64), (1, 1))],
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name, options", VARIANTS, ids=str)
def test_definition(name, options, causal):
    for L in LENGTHS:
        check_support(*check(name, options, causal, L), causal)
    for L in (7, 18):
        for mask in masks(L):
            check_support(*check(name, options, causal, L, mask), causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("summary", SUMMARIES)
@pytest.mark.parametrize(
    "name, options",
    [
        ("combiner-fixed", {"block_size": 4}),
        ("combiner-fixed", {"block_size": 2, "levels": 3}),
        ("combiner-logsparse", {}),
        ("combiner-axial-vertical", {"block_size": 4}),
        ("combiner-axial-horizontal", {"block_size": 4}),
        ("combiner-mixture", {"block_size": 4, "mixture": "joint"}),
        ("combiner-routing", {"clusters": 3, "capacity": 4}),
    ],
    ids=str,
)
def test_summaries(name, options, summary, causal):
    for L, mask in ((19, None), (18, torch.arange(18) % 5 != 2)):
        check_support(*check(name, {**options, "summary": summary}, causal, L, mask), causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key_summary", ["none", "wsum"])
def test_row_major(causal, key_summary):
    for own_span in (False,) if causal else (False, True):
        for L, m in ((1, 3), (7, 1), (12, 4), (13, 4), (9, 40), (18, 5)):
            attn = make("combiner-axial", causal, block_size=m, key_summary=key_summary, own_span=own_span)
            q, k, v = qkv(L)
            for mask in masks(L):
                real = torch.ones(L, dtype=torch.bool) if mask is None else mask
                got = attn.weights(q, k, v, None if mask is None else mask[None])
                check_support(got, real, causal)
                for h in range(H):
                    want = reference.row_major(q[0, h], k[0, h], m, causal, real, key_summary, own_span)
                    torch.testing.assert_close(got[0, h][real], want[real], atol=1e-10, rtol=0)


def test_row_major_projections_need_the_input():
    x = torch.randn(2, 11, 6, dtype=torch.float64)
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[0, 8:] = False
    for key_summary in ("proj", "wsum_proj"):
        layer = weft.MultiheadAttention(
            6,
            H,
            head_dim=D,
            attention="combiner-axial",
            key_summary=key_summary,
            input_dim=6,
            block_size=3,
            dtype=x.dtype,
        )
        q, k, v = layer.project(x)
        got = layer.weights(x, mask)
        torch.testing.assert_close(layer.merge(got @ v.masked_fill(~mask[:, None, :, None], 0)), layer(x, mask))
        check_support(got[:1], mask[0], False)
        noise = x.masked_fill(~mask[..., None], float("nan"))
        torch.testing.assert_close(layer(noise, mask)[mask], layer(x, mask)[mask])
        with pytest.raises(ValueError, match="give x="):
            layer.attention(q, k, v)
    with pytest.raises(ValueError, match="give input_dim"):
        make("combiner-axial", False, key_summary="proj")
    with pytest.raises(TypeError, match="does not read x"):
        make("combiner-axial", False)(q, k, v, x=x)


def test_worked_examples():
    """The examples of the specification, in the sets the tests compare with, and positive weights on their tokens."""
    assert reference.logsparse(7, 8, True) == ([7, 6], [[4, 5], [0, 1, 2, 3]])
    assert reference.logsparse(5, 8, True) == ([5, 4], [[0, 1, 2, 3]])
    assert reference.logsparse(6, 8, True) == ([6], [[4, 5], [0, 1, 2, 3]])
    assert reference.logsparse(4, 8, True) == ([4], [[0, 1, 2, 3]])
    assert reference.logsparse(0, 8, True) == ([0], [])
    assert reference.vertical(10, 12, 4, True) == ([2, 6, 8, 9, 10], [[0, 4], [1, 5], [3, 7]])
    assert reference.horizontal(10, 12, 4, True) == ([2, 6, 8, 9, 10], [[0, 1, 3], [4, 5, 7]])
    assert reference.fixed(10, 12, 4, True) == ([8, 9, 10], [[0, 1, 2, 3], [4, 5, 6, 7]])


DENSE = [
    ("combiner-fixed", {"block_size": 1}, 9, True),
    ("combiner-fixed", {"block_size": 9}, 9, True),
    ("combiner-fixed", {"block_size": 1}, 9, False),
    ("combiner-fixed", {"block_size": 30}, 9, False),
    *[("combiner-axial", {"block_size": m, "key_summary": s}, 9, True) for m in (1, 9) for s in ("none", "wsum")],
    ("combiner-axial-vertical", {"block_size": 5}, 10, True),
    ("combiner-axial-vertical", {"block_size": 5}, 10, False),
    ("combiner-axial-vertical", {"block_size": 1}, 10, True),
    ("combiner-axial-horizontal", {"block_size": 2}, 10, True),
    ("combiner-axial-horizontal", {"block_size": 2}, 10, False),
    ("combiner-axial-horizontal", {"block_size": 10}, 10, False),
    ("combiner-mixture", {"block_size": 2}, 4, True),
    ("combiner-mixture", {"block_size": 2}, 4, False),
]


@pytest.mark.parametrize("name, options, L, causal", DENSE, ids=str)
def test_dense_where_the_definition_says_so(name, options, L, causal):
    q, k, v = qkv(L, B=2)
    full = weft.make_attention("full", heads=H, head_dim=D, causal=causal)
    torch.testing.assert_close(make(name, causal, **options)(q, k, v), full(q, k, v), atol=1e-12, rtol=0)


def test_the_joint_mixture_is_not_dense():
    q, k, v = qkv(4)
    full = weft.make_attention("full", heads=H, head_dim=D, causal=True)(q, k, v)
    assert not torch.allclose(make("combiner-mixture", True, block_size=2, mixture="joint")(q, k, v), full)


@pytest.mark.parametrize("causal", [False, True])
def test_mixture_averages_any_list(causal):
    entries = ["combiner-fixed", ("combiner-axial", {"key_summary": "none"}), "combiner-logsparse"]
    q, k, v = qkv(21)
    got = make("combiner-mixture", causal, factorisations=entries, block_size=5, summary="mean")(q, k, v)
    alone = [
        make("combiner-fixed", causal, block_size=5, summary="mean"),
        make("combiner-axial", causal, block_size=5, key_summary="none"),
        make("combiner-logsparse", causal, summary="mean"),
    ]
    torch.testing.assert_close(got, sum(attn(q, k, v) for attn in alone) / 3, atol=1e-12, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("summary", ["max", "sum"])
def test_what_a_mixture_computes_once(summary, causal):
    """Axial factorisations share their direct sets; the mean is that of the factorisations alone."""
    names = ["combiner-axial-vertical", ("combiner-axial-horizontal", {"split": True}), "combiner-axial-horizontal"]
    mixture = make("combiner-mixture", causal, factorisations=names, block_size=5, summary=summary)
    q, k, v = (t.requires_grad_() for t in qkv(23, B=2))
    mask = torch.ones(2, 23, dtype=torch.bool)
    mask[0, 7:14] = mask[1, :] = False
    for given in (None, mask):
        got = mixture(q, k, v, given)
        want = torch.stack([attn(q, k, v, given) for attn in mixture.factorisations]).mean(0)
        torch.testing.assert_close(got, want, atol=1e-12, rtol=0)
        for a, b in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (got, want)), strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=0)
        with torch.no_grad():
            torch.testing.assert_close(mixture(q, k, v, given), want, atol=1e-12, rtol=0)


SMALL = [
    ("combiner-fixed", {"block_size": 3}),
    ("combiner-fixed", {"block_size": 2, "levels": 3}),
    ("combiner-logsparse", {}),
    ("combiner-axial", {"block_size": 3}),
    ("combiner-axial-vertical", {"block_size": 3}),
    ("combiner-axial-horizontal", {"block_size": 3}),
    ("combiner-mixture", {"block_size": 3, "mixture": "joint", "summary": "sum"}),
    ("combiner-mixture", {"block_size": 3, "summary": "deepsets-mean"}),
    ("combiner-routing", {"clusters": 2, "capacity": 3}),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name, options", SMALL, ids=str)
def test_gradients(name, options, causal):
    attn = make(name, causal, **options)
    q, k, v = (t.requires_grad_() for t in qkv(7, B=2))
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0, 2:4] = False
    assert torch.autograd.gradcheck(lambda *a: attn(*a, mask), (q, k, v), fast_mode=True)
    mask[:] = False
    out = attn(q, k, v, mask)
    assert not out.any()
    for grad in torch.autograd.grad(out.sum(), (q, k, v)):
        assert not grad.any()  # zeros, and no NaN


@pytest.mark.parametrize("name, options", SMALL, ids=str)
def test_the_future_does_not_matter(name, options):
    attn, L = make(name, True, **options), 20
    q, k, v = qkv(L)
    whole = attn(q, k, v)
    for t in (1, 2, 3, 6, 9, 16, 17, 19):
        other = [torch.cat([x[:, :, :t], 50 * torch.randn_like(x[:, :, t:])], 2) for x in (q, k, v)]
        # Exactly; but where the future moves runs in memory, sums are rounded in another order.
        atol = 1e-14 if name == "combiner-routing" else 0
        torch.testing.assert_close(attn(*other)[:, :, :t], whole[:, :, :t], atol=atol, rtol=0)
        shorter = attn(*(x[:, :, :t] for x in (q, k, v)))
        torch.testing.assert_close(shorter, whole[:, :, :t], atol=1e-12, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name, options", SMALL, ids=str)
def test_masked_memory_may_hold_anything(name, options, causal):
    attn = make(name, causal, **options)
    q, k, v = qkv(17, B=2)
    mask = torch.ones(2, 17, dtype=torch.bool)
    mask[0, 4:9] = mask[1, :3] = False
    want = attn(q, k, v, mask)
    bad = [t.masked_fill(~mask[:, None, :, None], float("nan")).requires_grad_() for t in (q, k, v)]
    got = attn(*bad, mask)
    real = mask[:, None].expand(2, H, 17)
    torch.testing.assert_close(got[real], want[real], atol=1e-13, rtol=0)
    for grad in torch.autograd.grad(got[real].square().sum(), bad):
        assert torch.isfinite(grad).all() and not grad[~real].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sum_in_half_precision_stays_finite(dtype):
    """A sum over a long span leaves the range of half precision, where its logit would be infinite."""
    q, k, v = (20 * t for t in qkv(600, dtype=dtype))
    for name in ("combiner-fixed", "combiner-axial-vertical"):
        attn = weft.make_attention(name, heads=H, head_dim=D, summary="sum")
        out = attn(q, k, v)
        assert out.dtype == dtype and torch.isfinite(out).all()


def test_running_max():
    for T in (1, 2, 3, 7, 16, 50):
        x = torch.randn(2, 3, T, 4)
        assert torch.equal(running_max(x), x.cummax(-2).values)
        assert torch.equal(running_max(x.requires_grad_()), x.cummax(-2).values)


def test_max_of_others():
    for T in (1, 2, 3, 7, 16, 50):
        x = torch.randint(9, (2, 3, T, 4)).float()  # with ties
        want = [torch.cat([x[..., :t, :], x[..., t + 1 :, :]], -2) for t in range(T)]
        want = torch.stack([rest.amax(-2) if T > 1 else torch.full_like(x[..., 0, :], -torch.inf) for rest in want], -2)
        assert torch.equal(max_of_others(x), want)
        assert torch.equal(max_of_others(x.requires_grad_()), want)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name, options", SMALL, ids=str)
def test_without_gradients_as_with_them(name, options, causal):
    """Without gradients the fused attention of the CPU runs, and pools are written place by place."""
    attn = make(name, causal, **options)
    q, k, v = qkv(50, B=2)
    mask = torch.ones(2, 50, dtype=torch.bool)
    mask[0, 4:19] = mask[1, 30:] = False
    for given in (None, mask):
        out = attn(*(t.clone().requires_grad_() for t in (q, k, v)), given)
        assert out.requires_grad
        torch.testing.assert_close(attn(q, k, v, given), out.detach(), atol=1e-12, rtol=0)


def test_refusals():
    for options, message in (
        ({"summary": "median"}, "no summary 'median'"),
        ({"own_span": True, "causal": True}, "causal=False"),
        ({"levels": 1}, "at least 2"),
        ({"levels": 3, "block_size": 1}, "larger block_size"),
    ):
        with pytest.raises(ValueError, match=message):
            weft.make_attention("combiner-fixed", heads=H, head_dim=D, **options)
    with pytest.raises(ValueError, match="'average' takes any"):
        make("combiner-mixture", True, factorisations=["combiner-fixed"], mixture="joint")
    with pytest.raises(ValueError, match="single positions"):
        make("combiner-fixed", True)(*qkv(5), bias=weft.ALiBi(H))
