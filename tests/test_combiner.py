"""Combiners: support of the weights, worked examples, mixtures and precision."""

import pytest
import torch
from promises import cases, noise
from torch.nn.utils import prune

import weft
from weft.attention.combiner.base import combiner_naive
from weft.attention.combiner.summaries import max_of_others, running_max

H, D = 2, 4


def qkv(L, seed=0, B=1, dtype=torch.float64):
    return noise(3, B, H, L, D, seed=seed + 100 * L).to(dtype).unbind(0)


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


def check_support(got, real, causal):
    """Rows are distributions, positive exactly on the legal keys."""
    L = len(real)
    legal = real.expand(L, L)
    legal = legal.tril() if causal else legal
    rows = got[0][:, real]
    assert (rows >= 0).all()
    torch.testing.assert_close(rows.sum(-1), torch.ones_like(rows[..., 0]), atol=1e-12, rtol=0)
    assert torch.equal(rows > 0, legal[real].expand_as(rows))


COMBINERS = [case for more in (False, True) for case in cases(more=more) if case.name.startswith("combiner")]


@pytest.mark.parametrize("case", COMBINERS, ids=str)
def test_weights_are_positive_on_all_legal_keys(case):
    attn = case.make(heads=H, head_dim=D)
    for L in (1, 7, 18):
        q, k, v = qkv(L)
        for mask in masks(L):
            real = torch.ones(L, dtype=torch.bool) if mask is None else mask
            check_support(attn.weights(q, k, v, None if mask is None else mask[None]), real, case.causal)


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
        attn = layer.attention
        want = attn.info.naive(attn, q, k, v, mask, x=x)
        torch.testing.assert_close(
            attn(q, k, v, mask, x=x).where(mask[:, None, :, None], 0), want.where(mask[:, None, :, None], 0)
        )
        noise = x.masked_fill(~mask[..., None], float("nan"))
        torch.testing.assert_close(layer(noise, mask)[mask], layer(x, mask)[mask])
        with pytest.raises(ValueError, match="pass x="):
            layer.attention(q, k, v)
    with pytest.raises(ValueError, match="set input_dim"):
        make("combiner-axial", False, key_summary="proj")
    with pytest.raises(TypeError, match="does not read x"):
        make("combiner-axial", False)(q, k, v, x=x)


@pytest.mark.parametrize(
    "name, options, L, i, direct, spans",
    [
        ("combiner-logsparse", {}, 8, 7, [6, 7], [[4, 5], [0, 1, 2, 3]]),
        ("combiner-logsparse", {}, 8, 5, [4, 5], [[0, 1, 2, 3]]),
        ("combiner-logsparse", {}, 8, 6, [6], [[4, 5], [0, 1, 2, 3]]),
        ("combiner-logsparse", {}, 8, 4, [4], [[0, 1, 2, 3]]),
        ("combiner-logsparse", {}, 8, 0, [0], []),
        ("combiner-axial-vertical", {"block_size": 4}, 12, 10, [2, 6, 8, 9, 10], [[0, 4], [1, 5], [3, 7]]),
        ("combiner-axial-horizontal", {"block_size": 4}, 12, 10, [2, 6, 8, 9, 10], [[0, 1, 3], [4, 5, 7]]),
        ("combiner-fixed", {"block_size": 4}, 12, 10, [8, 9, 10], [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ],
)
def test_worked_examples(monkeypatch, name, options, L, i, direct, spans):
    """The sets of `naive` are those of the specification's examples."""
    attn, sets = make(name, True, **options), []
    naive = attn.info.naive
    monkeypatch.setitem(naive.__globals__, "combiner_naive", lambda *args: sets.extend(args[-2:]))
    naive(attn, *qkv(L))
    past = torch.arange(L) <= i
    assert (sets[0][i] & past).nonzero()[:, 0].tolist() == direct
    members = [row.nonzero()[:, 0].tolist() for row in sets[1][i] & past]
    assert [span for span in members if span] == spans


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
def test_equals_full_attention_in_special_cases(name, options, L, causal):
    q, k, v = qkv(L, B=2)
    full = weft.make_attention("full", heads=H, head_dim=D, causal=causal)
    torch.testing.assert_close(make(name, causal, **options)(q, k, v), full(q, k, v), atol=1e-12, rtol=0)


def test_the_joint_mixture_is_not_dense():
    q, k, v = qkv(4)
    full = weft.make_attention("full", heads=H, head_dim=D, causal=True)(q, k, v)
    assert not torch.allclose(make("combiner-mixture", True, block_size=2, mixture="joint")(q, k, v), full)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("summary", ["max", "sum"])
def test_mixtures_with_shared_computation(summary, causal):
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sum_in_half_precision_stays_finite(dtype):
    """A sum over a long span would overflow half precision."""
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


def test_refusals():
    for options, message in (
        ({"summary": "median"}, "unknown summary 'median'"),
        ({"own_span": True, "causal": True}, "causal=False"),
        ({"levels": 1}, "at least 2"),
        ({"levels": 3, "block_size": 1}, "larger block_size"),
    ):
        with pytest.raises(ValueError, match=message):
            weft.make_attention("combiner-fixed", heads=H, head_dim=D, **options)
    with pytest.raises(ValueError, match="use mixture='average'"):
        make("combiner-mixture", True, factorisations=["combiner-fixed"], mixture="joint")
    with pytest.raises(ValueError, match="single positions"):
        make("combiner-fixed", True)(*qkv(5), bias=weft.ALiBi(H))


@pytest.mark.parametrize("causal", [False, True])
def test_routing_has_whole_clusters_by_default(causal):
    """Equations 11 and 12: the own cluster directly and every other one as a span, however large they are."""
    torch.manual_seed(0)
    L, options = 90, {"heads": 2, "head_dim": 8, "causal": causal, "clusters": 2}
    attn = weft.make_attention("combiner-routing", **options).double().eval()
    q, k, v = torch.randn(3, 1, 2, L, 8, dtype=torch.float64)
    group = (k @ attn.clusters.centroids.mT).argmax(-1)[:, :, :, None]
    own = group == group.mT  # (1, 2, L, L)
    other = (~own)[:, :, :, None]  # with two clusters, one span
    expected = combiner_naive(attn, q, k, v, None, own, other)
    assert own.sum(-1).max() > attn.clusters.size(2000) / 2  # larger than the runs of the capped form would allow
    torch.testing.assert_close(attn(q, k, v), expected, rtol=0, atol=1e-12)
    capped = weft.make_attention("combiner-routing", **options, capacity=32).double().eval()
    capped.load_state_dict(attn.state_dict())
    assert (capped(q, k, v) - expected).abs().max() > 0.01
    assert attn.clusters.size(1024) == 1024 and attn.clusters.size(4096) == 128


PARENTS = {  # Combiner -> its sparse parent with the same sets, and whether the direct set alone contains its support
    "combiner-fixed": ("sparse", {"block_size": 4}, {"block_size": 4, "columns": 0}, True),
    "combiner-axial-vertical": ("axial", {"block_size": 4}, {"block_size": 4}, True),
    "combiner-axial-horizontal": ("axial", {"block_size": 4}, {"block_size": 4}, True),
    "combiner-axial": ("axial", {"block_size": 4}, {"block_size": 4}, False),
    "combiner-logsparse": ("logsparse", {}, {}, False),
    "combiner-routing": ("routing", {"clusters": 3}, {"clusters": 3, "capacity": 4}, True),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", PARENTS)
def test_the_precondition_of_proposition_1(name, causal):
    """The support of the sparse parent lies in the direct set and the spans, which together are all legal tokens."""
    parent, options, theirs, direct = PARENTS[name]
    torch.manual_seed(0)
    size = {"heads": 2, "head_dim": 8, "causal": causal}
    combiner = weft.make_attention(name, **size, **options).double().eval()
    sparse = weft.make_attention(parent, **size, **theirs).double().eval()
    if name == "combiner-routing":
        sparse.clusters.load_state_dict(combiner.clusters.state_dict())
    q, k, v = torch.randn(3, 1, 2, 21, 8, dtype=torch.float64)
    ours, its = combiner.weights(q, k, v) > 0, sparse.weights(q, k, v) > 0
    legal = torch.ones(21, 21, dtype=torch.bool).tril() if causal else torch.ones(21, 21, dtype=torch.bool)
    assert (ours == legal).all() and not (its & ~ours).any()
    assert its.diagonal(dim1=-2, dim2=-1).all()
    if direct:
        # A direct weight follows the logit of its own pair: it grows without bound when the key follows the query.
        i, j = torch.nonzero(its[0, 0])[-1].tolist()
        aligned = k.clone()
        aligned[0, 0, j] = 60 * q[0, 0, i] / q[0, 0, i].norm()
        if name != "combiner-routing":  # there, another key may be in another cluster
            assert combiner.weights(q, aligned, v)[0, 0, i, j] > 0.99


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("combiner-axial-vertical", {}),
        ("combiner-mixture", {}),
        ("combiner-mixture", {"mixture": "joint"}),
        ("combiner-mixture", {"factorisations": ("combiner-fixed", "combiner-logsparse")}),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_a_changed_direction_counts_everywhere(name, options, causal):
    """In the members of a mixture, and in the plan of the kernel."""

    def plans(attn: weft.Attention) -> list:
        members = [attn, *getattr(attn, "factorisations", ())]
        return [m._plan() if callable(m._plan) else m._plan for m in members if hasattr(m, "_plan")]

    attn, wanted = make(name, not causal, **options), make(name, causal, **options)
    plans(attn)
    attn.causal = causal
    q, k, v = qkv(30)
    torch.testing.assert_close(attn(q, k, v), wanted(q, k, v))
    assert plans(attn) == plans(wanted)


def test_options_that_are_planned_for_are_read_only():
    mixture, horizontal = make("combiner-mixture", True), make("combiner-axial-horizontal", True, split=True)
    assert horizontal.split
    for attn, name, value in (
        (horizontal, "split", False),
        (mixture, "block_size", 4),
        (mixture, "mixture", "joint"),
        (mixture, "summary", "mean"),
    ):
        with pytest.raises(AttributeError, match=name):
            setattr(attn, name, value)


def test_members_on_different_grids_do_not_share_a_kernel(monkeypatch):
    attn = make("combiner-mixture", True, block_size=5)
    q, k, v = qkv(30)
    monkeypatch.setattr("weft.attention.combiner.mixture.grid_attention", lambda *_, **__: torch.zeros_like(q))
    assert not attn.run_kernel(q, k, v, None, None).any()
    attn.factorisations[1].block_size = 3
    torch.testing.assert_close(attn.run_kernel(q, k, v, None, None), attn.info.naive(attn, q, k, v))


class Adapted(torch.nn.Linear):
    """A layer with an adapter, as in peft: `weight` is that of the base."""

    def forward(self, x):
        return super().forward(x) + x.flip(-1)[..., : self.out_features]


@pytest.mark.parametrize(
    ("name", "options", "layers"),
    [
        ("combiner-fixed", {"summary": "deepsets-max"}, ("summary.query", "summary.key")),
        ("combiner-axial", {"key_summary": "wsum_proj", "input_dim": 8}, ("up", "down")),
    ],
)
def test_learned_summaries_call_their_layers(name, options, layers):
    """So that adapters around them, and hooks that compute their weights, have an effect."""
    attn, x = make(name, False, block_size=4, **options), noise(1, 11, 8)
    inputs = {"x": x} if "input_dim" in options else {}
    for path in layers:
        before, layer = attn(*qkv(11), **inputs), attn.get_submodule(path)
        layer.__class__ = Adapted
        assert not torch.allclose(attn(*qkv(11), **inputs), before)
        out = attn.to(torch.float32)(*qkv(11), **inputs)
        assert out.dtype == torch.float64
        attn.double()
        layer.__class__ = torch.nn.Linear
        torch.testing.assert_close(attn(*qkv(11), **inputs), before, atol=1e-6, rtol=0)
        pruned = prune.l1_unstructured(layer, "weight", 0.5)
        with torch.no_grad():
            pruned.weight_orig.mul_(2)
        after = attn(*qkv(11), **inputs)
        prune.remove(layer, "weight")
        torch.testing.assert_close(attn(*qkv(11), **inputs), after)
