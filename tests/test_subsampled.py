"""Subsampled attention: the recorded samples, its limits, legal sources for every target, replay, and speed's twin."""

import copy
import functools
from unittest.mock import Mock

import golden
import pytest
import torch

import weft
from weft.attention.subsampled.gather import sampled_attention
from weft.attention.subsampled.sampling import causal_windows
from weft.attention.subsampled.tiles import causal_tiles
from weft.core import dispatch

FILE = "ssa_1d.npz"


def random_qkv(B=2, H=2, L=16, D=8, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(B, H, L, D, dtype=dtype, generator=generator) for _ in range(3)]


def make(causal=False, heads=2, head_dim=8, **options):
    return weft.make_attention("subsampled", heads=heads, head_dim=head_dim, causal=causal, **options)


def drawn_alike(attn, *args):
    """The output and that of `naive`, of the same sample."""
    outs = []
    for version in (attn, functools.partial(attn.info.naive, attn)):
        torch.manual_seed(7)
        outs.append(version(*args))
    return outs


def recorded(name):
    return {key: torch.as_tensor(value) for key, value in golden.case(FILE, name).items()}


@pytest.mark.parametrize("name", [n for n in golden.names(FILE) if not n.startswith("sampler")])
def test_recorded_layers(name):
    case = recorded(name)
    L, windows, heads, alibi = case["cfg_L_windows_heads_alibi"].tolist()
    causal = not name.endswith("bidir")
    dim = case["x_TBC"].shape[-1]
    layer = weft.MultiheadAttention(
        dim, heads, attention="subsampled", windows=windows, causal=causal, qkv_bias=True, out_bias=True,
        dtype=torch.float64,
    )  # fmt: skip
    weights = {f"{p}.{w}": case[f"w/{p}_proj.{w}"] for p in "qkv" for w in ("weight", "bias")}
    weights |= {f"out.{w}": case[f"w/out_proj.{w}"] for w in ("weight", "bias")}
    layer.load_state_dict(weights)
    bias = weft.ALiBi(heads) if alibi and causal else None
    x = case["x_TBC"].transpose(0, 1)
    layer.eval()
    assert (layer(x, bias=bias).transpose(0, 1) - case["y_eval_TBC"]).abs().max() < 1e-9
    if not case["source_indices"].numel():
        layer.attention.sampling = False
    layer.train()
    with layer.attention.fixed(case["source_indices"] if case["source_indices"].numel() else torch.zeros(windows)):
        trained = layer(x, bias=bias).transpose(0, 1)
    expected = case["y_train_TBC"]
    sound = expected.isfinite().all(-1).all(-1)  # the authors' permutation leaves NaN rows; ours has none
    assert trained.isfinite().all() and sound.sum() >= L - 2
    assert (trained - expected)[sound].abs().max() < 1e-9


@pytest.mark.parametrize("name", [n for n in golden.names(FILE) if n.startswith("sampler1d_half_gaussian")])
def test_recorded_sampler(name):
    case = recorded(name)
    L, windows, sigma = case["L_windows_sigma"].tolist()
    sources = causal_windows(case["noise_concat"], windows, L // windows, sigma)
    assert sources.flatten().tolist() == case["indices"].tolist()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"windows": 3, "layout": (5, 3)},
        {"windows": 2, "layout": (4, 3), "biased": False},
        {"windows": 3, "layout": (5, 2), "channels": 3},
        {"windows": 2, "layout": (4, 2), "channels": 3, "biased": False},
    ],
)
def test_bands_equal_the_definition(causal, masked, options):
    L = options["layout"][0] * options["layout"][1] * options.get("channels", 1)
    torch.manual_seed(L)
    q, k, v = random_qkv(L=L)
    mask = torch.rand(2, L) < 0.4 if masked else None
    attn = make(causal, **options)
    bias = weft.RelativeBias2d(2, *attn.layout, channels=attn.channels)
    out, expected = drawn_alike(attn, q, k, v, mask, bias)
    real = slice(None) if mask is None else mask
    assert (out - expected).transpose(1, 2)[real].abs().max() < 1e-12


@pytest.mark.parametrize("layout", [(4, 6), (5, 7)])
@pytest.mark.parametrize(("biased", "channels"), [(False, 1), (True, 1), (True, 2)])
def test_grid_windows_equal_the_definition(layout, biased, channels):
    torch.manual_seed(1)
    L = layout[0] * layout[1] * channels
    q, k, v = random_qkv(L=L)
    attn = make(layout=layout, windows=(2, 3), biased=biased, channels=channels)
    assert sorted(t for t in attn.targets(L).flatten().tolist() if t < L) == list(range(L))
    out, expected = drawn_alike(attn, q, k, v)
    assert (out - expected).abs().max() < 1e-12


def test_the_colours_of_a_pixel_are_sampled_together():
    """32 x 32 pixels of three tokens, four windows of eight rows: whole pixels, from the rows up to the window's."""
    attn = make(True, layout=(32, 32), channels=3, windows=4, sigma=0.25)
    sources = attn.draw(3072)
    assert sources.shape == (4, 768) and attn.targets(3072) is None
    pixels = sources.view(4, 256, 3)
    assert (pixels[..., 1] == pixels[..., 0] + 1).all() and (pixels[..., 2] == pixels[..., 0] + 2).all()
    assert (pixels[..., 0] % 3 == 0).all() and (sources.amax(1) < 768 * torch.arange(1, 5)).all()
    with pytest.raises(ValueError, match="channels=3"):
        make(layout=(2, 2))(*random_qkv(L=12))


def test_the_bias_of_a_pixel_depends_on_its_offset_and_the_two_colours():
    bias = weft.RelativeBias2d(2, 4, 5, channels=3)
    i = torch.arange(60).view(1, 1, 60, 1)
    values = bias(i, i.transpose(2, 3))[0]
    assert values.shape == (2, 60, 60) and bias.table.shape == (2, 7 * 9 * 9)
    cell = values.view(2, 4, 5, 3, 4, 5, 3)
    assert torch.equal(cell[:, 1, 1, 0, 0, 3, 2], cell[:, 3, 0, 0, 2, 2, 2])  # the same offset and colours
    assert not torch.equal(cell[:, 1, 1, 0, 0, 3, 2], cell[:, 1, 1, 0, 0, 3, 1])
    assert values[0].unique().numel() == 7 * 9 * 9


@pytest.mark.parametrize("causal", [False, True])
def test_limits(causal):
    q, k, v = random_qkv(L=12)
    dense = weft.make_attention("full", heads=2, head_dim=8, causal=causal)(q, k, v)
    assert (make(causal, windows=1)(q, k, v) - dense).abs().max() < 1e-12
    assert torch.equal(make(causal).eval()(q, k, v), dense)
    blocks = [weft.make_attention("full", heads=2, head_dim=8, causal=causal)(*(t[:, :, a : a + 4] for t in (q, k, v)))
              for a in (0, 4, 8)]  # fmt: skip
    assert (make(causal, windows=3, sigma=0.0)(q, k, v) - torch.cat(blocks, 2)).abs().max() < 1e-12


@pytest.mark.parametrize("causal", [False, True])
def test_every_target_has_a_source(causal):
    """Any length, mask, seed, thinning: finite forward and backward; zeros only where nothing is legal."""
    for seed in range(60):
        torch.manual_seed(seed)
        L, W = int(torch.randint(1, 24, ())), int(torch.randint(1, 7, ()))
        attn = make(causal, windows=W, keep=[1.0, 0.3][seed % 2], biased=seed % 3 > 0, sigma=[0.0, 0.2, 3.0][seed % 3])
        q, k, v = (t.requires_grad_() for t in random_qkv(L=L, seed=seed))
        mask = None if seed % 5 == 0 else torch.rand(2, L) < [0.1, 0.5, 0.9][seed % 3]
        with torch.no_grad():
            if mask is not None:
                k[~mask[:, None].expand(2, 2, L)] = float("nan")
                v[~mask[:, None].expand(2, 2, L)] = float("inf")
        out = attn(q, k, v, mask)
        grads = torch.autograd.grad(out.square().sum(), (q, k, v))
        assert out.isfinite().all() and all(g.isfinite().all() for g in grads)
        real = torch.ones(2, L, dtype=torch.bool) if mask is None else mask
        legal = real.cumsum(1) > 0 if causal else real.any(1, keepdim=True).expand(2, L)
        assert torch.equal(out.ne(0).any(-1).all(1), legal)
        if mask is not None:
            assert all((g.transpose(1, 2)[~mask] == 0).all() for g in grads[1:])


def test_the_token_instead_of_a_sample_obeys_the_bias():
    """Token 3 is the only allowed source of target 3, and not in its sample."""
    q, k, v = torch.randn(3, 1, 1, 4, 2, dtype=torch.float64)
    mask, sources = torch.tensor([[False, False, False, True]]), torch.tensor([[0, 1, 2, 0]])

    def out(value):
        def bias(i, j):
            return 0.0 * (i + j) + value

        return sampled_attention(q, k, v, sources, causal=True, mask=mask, bias=bias)[0, 0, 3]

    assert torch.equal(out(1.0), v[0, 0, 3]) and not out(float("-inf")).any()


def test_causal_under_perturbation():
    for options in ({}, {"keep": 0.5}, {"biased": False}, {"layout": (5, 4)}):
        for t in (0, 6, 12, 19):
            q, k, v = random_qkv(L=20)
            attn = make(True, windows=3 if "layout" in options else 4, **options)
            with attn.fixed(attn.draw(20)):
                before = attn(q, k, v)
                for x in (q, k, v):
                    x[:, :, t + 1 :] = 100 * torch.randn_like(x[:, :, t + 1 :])
                assert torch.equal(attn(q, k, v)[:, :, : t + 1], before[:, :, : t + 1])


@pytest.mark.parametrize("causal", [False, True])
def test_one_fresh_sample_per_forward_reproducible(causal):
    q, k, v = random_qkv(L=32)
    attn = make(causal)
    torch.manual_seed(5)
    first, indices = attn(q, k, v), attn.last_indices
    second = attn(q, k, v)
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(attn(q, k, v), first)
    with attn.fixed(indices):
        assert torch.equal(attn(q, k, v), first)
        assert torch.equal(attn(q[1:], k[1:], v[1:])[0], first[1])  # shared by the batch, whatever the batch
    a, b = (attn.draw(32, torch.Generator().manual_seed(9)) for _ in range(2))
    assert torch.equal(a, b) and not torch.equal(a, attn.draw(32, torch.Generator().manual_seed(10)))


@pytest.mark.parametrize("options", [{"causal": True}, {"layout": (8, 4)}, {"layout": "graph", "keep": 0.5}])
def test_compiles_with_fresh_samples(options):
    torch._dynamo.reset()
    attn = make(**options)
    compiled = torch.compile(attn, fullgraph=True, backend="aot_eager")
    q, k, v = (t.requires_grad_() for t in random_qkv(L=32))
    torch.manual_seed(2)
    once, again = compiled(q, k, v), compiled(q, k, v)
    assert not torch.equal(once, again)
    torch.manual_seed(2)
    plain = attn(q, k, v)
    assert (once - plain).abs().max() < 1e-12
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (once, plain)), strict=True):
        assert (a - b).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("L", "W"), [(1200, 2), (900, 3)])
def test_tiles_equal_the_plain_version(L, W, dtype):
    q, k, v = (t.to(dtype).requires_grad_() for t in random_qkv(B=1, L=L, D=5))
    attn = make(True, head_dim=5, windows=W)
    sources = attn.draw(L)
    fast, plain = causal_tiles(q, k, v, sources), sampled_attention(q, k, v, sources, causal=True)
    weight = torch.randn_like(plain)
    results = [(y, *torch.autograd.grad(y, (q, k, v), weight)) for y in (fast, plain)]
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    for a, b in zip(*results, strict=True):
        assert a.dtype == dtype and (a - b).abs().max() < tolerance * max(1, b.abs().max().item())


def test_tiles_support_any_strides(monkeypatch):
    tiled = Mock(wraps=causal_tiles)
    monkeypatch.setattr("weft.attention.subsampled.causal_tiles", tiled)
    attn = make(True, windows=2)
    x = torch.randn(2, 1040, 2, 24, requires_grad=True)
    q, k, v = x.transpose(1, 2).chunk(3, -1)
    out = attn(q, k, v)
    tiled.assert_called_once()
    (got,) = torch.autograd.grad(out.sum(), x)
    expected = sampled_attention(q, k, v, attn.last_indices, causal=True)
    (want,) = torch.autograd.grad(expected.sum(), x)
    assert (out - expected).abs().max() < 1e-5 and (got - want).abs().max() < 1e-4


def test_sampling_switch_and_decoding():
    q, k, v = random_qkv(L=9)
    attn = make(True)
    dense = copy.deepcopy(attn).eval()(q, k, v)
    attn.sampling = False
    assert torch.equal(attn(q, k, v), dense)
    state, steps = attn.start(2), []
    for t in range(9):
        out, state = attn.step(*(x[:, :, t : t + 1] for x in (q, k, v)), state)
        steps.append(out)
    assert (torch.cat(steps, 2) - dense).abs().max() < 1e-12
    attn.sampling = True
    attn.eval()
    assert not torch.equal(attn(q, k, v), dense)
    with pytest.raises(ValueError, match="eval"):
        attn.step(*(x[:, :, :1] for x in (q, k, v)), attn.start(2))


def test_graph_layout_drops_sources_and_keeps_one():
    q, k, v = random_qkv(B=3, L=6)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0]]).bool()
    attn = make(layout="graph", keep=0.5, heads=2)
    used = torch.stack([attn.weights(q, k, v, mask)[0].ne(0).any(0) for _ in range(400)]).double()
    assert torch.equal(used.amin(1), used.amax(1))  # the same sources for every target
    assert abs(used.mean().item() - (0.5 + 0.5**6 / 6)) < 0.05  # half of them, and one where none would be left
    out = attn(q, k, v, mask)
    assert (out[1] - v[1, :, 2:3]).abs().max() < 1e-12 and (out[2] == 0).all()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"windows": 0}, "at least 1"),
        ({"windows": (2, 2)}, "layout"),
        ({"sigma": -0.1}, "fraction"),
        ({"sigma": float("inf")}, "biased=False"),
        ({"keep": 0.0}, "keep"),
        ({"layout": "2d"}, "layout"),
        ({"noise": "cauchy"}, "noise"),
        ({"layout": (4, 4), "windows": (2, 2), "causal": True}, "bands"),
        ({"layout": "graph", "causal": True}, "order"),
        ({"channels": 3}, "tokens per cell"),
    ],
)
def test_refusals(options, says):
    with pytest.raises(ValueError, match=says):
        make(**options)


def test_refuses_other_shapes():
    q, k, v = random_qkv(L=12)
    with pytest.raises(ValueError, match="self-attention"):
        make()(q, k[:, :, :8], v[:, :, :8])
    with pytest.raises(ValueError, match="cells"):
        make(layout=(3, 3))(q, k, v)
    attn = make()
    with attn.fixed(torch.arange(16)), pytest.raises(ValueError, match="fixed sample"):
        attn(q, k, v)


def test_tables_that_32_bits_cannot_index_are_refused(monkeypatch):
    monkeypatch.setattr(dispatch, "_cannot", lambda *call: "")
    attn = make(windows=2048, backend="triton")
    fits, far = (torch.empty(2, 2, length, 8, device="meta") for length in (2**20 - 2, 2**20 - 1))
    assert dispatch.use_kernel(attn, fits, fits, fits, None)
    with pytest.raises(ValueError, match=r"windows x \(length \+ 1\) below 2147483648, got 2048 x 1048576; use"):
        dispatch.use_kernel(attn, far, far, far, None)
    half, mask = fits[:, :, : 2**19], torch.ones(2, 2**19, dtype=torch.bool, device="meta")
    with pytest.raises(ValueError, match="of 2 sequences with a mask below 2147483648, got 2048 x 524289; use fewer"):
        attn(half, half, half, mask)
