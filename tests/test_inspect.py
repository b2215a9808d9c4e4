"""Measurements, attention views and figures agree with the model."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch

import weft
from weft import inspect
from weft.inspect import figures
from weft.inspect.measure import nonzero
from weft.inspect.views import attention_views
from weft.models import CRATE, CRATEText, LanguageModel, TextClassifier, TextMatcher


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def crate_text(**options) -> CRATEText:
    return CRATEText(19, 2, dim=12, heads=3, layers=3, **options)


def padded_ids() -> torch.Tensor:
    ids = torch.randint(1, 19, (5, 11))
    ids[1, 7:] = 0
    return ids


def test_measurements_follow_their_definitions_on_real_tokens():
    """Computed by hand on one example without padding; independent of the batch size."""
    model, ids = crate_text(), padded_ids()
    found = inspect.measure(model, [ids])
    assert {name: tuple(v.shape) for name, v in found.items()} == dict.fromkeys(
        ("rate", "subspace_rate", "projected_rate", "nonzero"), (3, 5)
    )
    again = inspect.measure(model, [ids], batch_size=2)
    for name in found:
        torch.testing.assert_close(found[name], again[name])
    model.eval()
    x = torch.cat([model.cls, model.embed(ids[1:2, :7])], 1)
    x = x + weft.layers.sinusoids(8, 12)
    with torch.no_grad():
        for i, block in enumerate(model.blocks):
            w = block.mssa.project(block.norm1(x))[0].double()
            unit = w / w.norm(dim=-1, keepdim=True)
            gram = torch.eye(4).double() + 4 / (8 * 0.01) * unit.mT @ unit
            torch.testing.assert_close(found["projected_rate"][i, 1], 0.5 * torch.logdet(gram).sum())
            h = block.compress(x).double()
            rate = inspect.subspace_rate(h, block.mssa.bases.double())[0]
            torch.testing.assert_close(found["subspace_rate"][i, 1], rate)
            x = block(x)
            torch.testing.assert_close(found["nonzero"][i, 1], (x != 0).double().mean())


def test_a_crate_inside_closed_caches_is_measured_like_itself():
    model, ids = crate_text(tied=True, kappa=0.5), padded_ids()
    expected = inspect.measure(model, [ids])
    weft.cache(model, ratio=0.5)
    model.train()(ids)
    for block in model.blocks:
        torch.nn.init.constant_(block.mssa.lam, -1e4)
    torch.testing.assert_close(inspect.measure(model, [ids]), expected)


def test_a_block_that_is_several_layers_is_measured_in_each():
    """Shared weights, as in ALBERT: like layers with equal weights."""
    options = {"max_length": 12, "dim": 12, "heads": 2, "head_dim": 6, "mlp_dim": 12, "layers": 4}
    apart, shared = (TextMatcher(19, 2, **options) for _ in range(2))
    one, other, *_ = shared.encoder.blocks
    shared.encoder.blocks = torch.nn.ModuleList([one, other, one, one])
    apart.load_state_dict(shared.state_dict())
    inputs = [padded_ids(), padded_ids()]
    found, expected = (inspect.measure(model, inputs, batch_size=2)["rate"] for model in (shared, apart))
    torch.testing.assert_close(found, expected)
    found, expected = (inspect.tokens_per_layer(model, inputs)[0] for model in (shared, apart))
    torch.testing.assert_close(found, expected)


def test_measuring_does_not_change_the_model():
    model, ids = crate_text(dropout=0.1).train(), padded_ids()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inspect.measure(model, [ids])
    inspect.attention_views(model, [ids])
    assert model.training and all(m.training for m in model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match="no weft attention blocks to measure"):
        inspect.measure(torch.nn.Linear(2, 2), [torch.randn(1, 2)])


def test_buffers_written_in_evaluation_are_restored():
    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("last", None)
            self.attention = weft.MultiheadAttention(8, 2)

        def forward(self, x):
            self.calls += 1
            self.last = x
            return self.attention(x)

    model = Counting()
    inspect.attention_views(model, [torch.randn(1, 4, 8)])
    assert model.calls == 0 and model.last is None


def test_a_diverged_model_is_an_error():
    model = TextClassifier(19, 2, max_length=12, dim=16, heads=2, head_dim=4, layers=2, mlp_dim=8)
    model.encoder.blocks[1].feedforward_norm.weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="layer 2 returns NaN or infinity"):
        inspect.measure(model, [padded_ids()])
    assert model.training and not any(m._forward_hooks for m in model.modules())


def test_nonzero_counts_exact_zeros_of_real_tokens():
    z = torch.tensor([[[0.0, 1.0], [0.0, 0.0], [3.0, -1.0]]])
    assert nonzero(z).item() == 0.5
    assert nonzero(z, torch.tensor([[True, True, False]])).item() == 0.25


@pytest.mark.parametrize("name", weft.attentions())
def test_views_equal_the_effective_attention_of_every_mechanism(name):
    """Map times values is the output; one row alone, by the gradient, is that row of the map."""
    info = weft.attention_info(name)
    layer = weft.MultiheadAttention(12, 3, attention=name, causal=not info.bidirectional, max_length=10).double().eval()
    x = torch.randn(2, 10, 12).double()
    torch.manual_seed(5)
    views, output = inspect.attention_views(layer, [x])
    assert len(views) == 1 and views[0].mechanisms == [name] * 3
    torch.manual_seed(5)
    torch.testing.assert_close(layer(x), output)  # looking changes nothing, not even what is drawn
    v = layer.project(x)[2]
    expected = layer.merge(views[0].map.double() @ v)
    torch.testing.assert_close(expected, output, rtol=1e-5, atol=1e-5)
    torch.manual_seed(5)
    long, _ = inspect.attention_views(layer, [x], map_up_to=4, row=-1)
    assert long[0].map is None
    torch.testing.assert_close(long[0].row, views[0].map[:, :, -1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("summary", ["proj", "wsum_proj"])
@pytest.mark.parametrize("map_up_to", [256, 4])
def test_views_of_a_mechanism_that_reads_the_input(summary, map_up_to):
    layer = weft.MultiheadAttention(12, 3, attention="combiner-axial", key_summary=summary, input_dim=12)
    x = torch.randn(2, 9, 12)
    (view,), _ = attention_views(layer, x, row=2, map_up_to=map_up_to)
    torch.testing.assert_close(view.row, layer.weights(x)[:, :, 2])
    assert (view.map is None) == (map_up_to == 4)


def test_views_of_grouped_keys_have_all_heads():
    layer, x = weft.MultiheadAttention(16, 4, kv_heads=2).eval(), torch.randn(2, 10, 16)
    (short,), (long,) = (inspect.attention_views(layer, [x], map_up_to=n)[0] for n in (10, 4))
    assert len(long.mechanisms) == 4
    torch.testing.assert_close(long.row, short.row)


def test_names_of_your_own_modules():
    model = torch.nn.Sequential()
    model.add_module("myweft", weft.MultiheadAttention(8, 2))
    (view,), _ = inspect.attention_views(model, torch.randn(1, 5, 8))
    assert view.path == "myweft"


def test_rows_in_inference_mode():
    layer = weft.MultiheadAttention(16, 4).eval()
    with torch.inference_mode():
        x, mask = torch.randn(2, 10, 16), torch.arange(10) < torch.tensor([[10], [7]])
        (short,), (long,) = (inspect.attention_views(layer, [x, mask], map_up_to=n)[0] for n in (10, 4))
    torch.testing.assert_close(long.row, short.row)


def test_mechanisms_are_called_with_or_without_names():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attend = weft.make_attention("local", heads=1, head_dim=4)

        def forward(self, images):
            q = images.flatten(2).mT[:, None]
            return self.attend(q=q, k=q, v=q)

    (view,), _ = attention_views(Model().eval(), torch.randn(1, 4, 3, 3))
    assert view.map.shape == (1, 1, 9, 9) and view.windows is None


def test_inspection_needs_no_other_library():
    code = "import sys; sys.modules.update(dict.fromkeys(['transformers', 'timm'])); import weft.inspect"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_mixed_layers_are_one_view_and_two_documents_two():
    model = TextClassifier(
        19, 2, max_length=12, dim=16, heads=4, head_dim=4, layers=2, mlp_dim=8, attention=["full", "local"]
    )
    views, _ = inspect.attention_views(model, [padded_ids()])
    assert [v.mechanisms for v in views] == [["full", "full", "local", "local"]] * 2
    assert views[0].map.shape == (5, 4, 12, 12)
    matcher = TextMatcher(19, max_length=11, dim=16, heads=2, head_dim=4, layers=2, mlp_dim=8)
    first, second = padded_ids(), padded_ids()[:, :6]
    views, _ = inspect.attention_views(matcher, [first, second])
    assert [v.call for v in views] == [1, 1, 2, 2]
    assert [v.row.shape[-1] for v in views] == [11, 11, 6, 6]
    assert inspect.measure(matcher, [first, second])["rate"].shape == (2, 5)


def test_caches_inside_mixed_layers_have_their_own_view():
    model = TextClassifier(
        19,
        2,
        max_length=12,
        dim=16,
        heads=4,
        head_dim=4,
        layers=1,
        mlp_dim=8,
        attention=["full", "local", "linear", "full"],
    )
    weft.cache(model, 1.0, where=lambda path, layer: "blocks.0.attention.blocks.0" not in path, length=5)
    model(padded_ids())  # a training step writes the caches
    views, _ = inspect.attention_views(model.eval(), [padded_ids()])
    assert [(v.path, v.memory, v.row.shape[-1]) for v in views] == [
        ("encoder.blocks.0.attention", False, 12),
        ("encoder.blocks.0.attention.memory", True, 5),
    ]
    assert [v.mechanisms for v in views] == [["full", "local", "linear", "full"], ["full"] * 3]


def test_cached_layers_show_their_share_and_their_slots():
    cached = weft.CachedAttention(weft.MultiheadAttention(8, 2), ratio=0.5, length=6)
    cached.lam.data = torch.tensor([0.0, 2.0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cache is empty: nothing was trained here
        views, _ = inspect.attention_views(cached, [torch.randn(1, 4, 8)])
    assert [v.row.shape[-1] for v in views] == [4, 6]
    ((path, share),) = inspect.cache_shares(torch.nn.Sequential(cached))
    assert path == "0"
    torch.testing.assert_close(share, torch.tensor([0.5, 0.880797]).double(), rtol=0, atol=1e-6)


def test_token_parts_and_coherence_come_from_the_model():
    model = CRATE(dim=16, heads=2, layers=2, classes=3, image_size=8, patch=2)
    images = torch.randn(2, 3, 8, 8)
    part, tokens, channels = inspect.tokens_per_layer(model, [images], size=5)
    assert part.shape == (2, 5, 5)
    last = model.features(images[:1])[0].double()
    torch.testing.assert_close(part[-1], last[tokens][:, channels], check_dtype=False)
    (path, G, count), _ = inspect.subspace_coherence(model, directions=3)
    assert path == "blocks.0.mssa" and G.shape == (6, 6) and count == 3
    U = torch.nn.functional.normalize(model.blocks[0].mssa.subspaces.weight.double(), dim=1)
    largest = (U[:8] @ U[8:].T).abs().max()
    assert G[:3, 3:].max() <= largest + 1e-12


def test_figures_draw():
    pytest.importorskip("matplotlib")
    model, ids = crate_text(), padded_ids()
    measures = {"train": inspect.measure(model, [ids]), "validation": inspect.measure(model, [ids[:2]])}
    views, _ = inspect.attention_views(model, [ids])
    words = ["[CLS]", "$x", *(f"word{i}" for i in range(10))]
    drawn = {
        "curves": figures.layer_curves(measures),
        "heat": figures.token_heatmaps(inspect.tokens_per_layer(model, [ids])[0]),
        "subspaces": figures.subspaces(inspect.subspace_coherence(model)),
        "text": figures.attention_over_text(views[0].row[0], words, heads=[0, 2], width=30),
        "maps": figures.attention_maps(views[0].map[0]),
        "share": figures.cache_share([("a", torch.tensor([0.2, 0.9]))]),
    }
    lines = drawn["curves"].axes[0].get_lines()
    assert torch.allclose(torch.tensor(lines[0].get_ydata()), measures["train"]["rate"].mean(1))
    assert [t.get_text() for t in drawn["text"].axes[0].texts][1] == r"\$x"
    assert len(drawn["text"].axes) == 2 and len(drawn["maps"].axes) == 3
    for figure in drawn.values():
        figure.canvas.draw()


def test_a_single_argument_needs_no_list():
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, batch_first=True), 2).eval()
    weft.swap(model, "full")
    x = torch.randn(1, 5, 8)  # without its batch, the model accepts it too
    torch.testing.assert_close(weft.inspect.measure(model, x), weft.inspect.measure(model, [x]), rtol=0, atol=0)
    crate = weft.models.CRATE(dim=8, heads=2, layers=1, classes=2, image_size=8, patch=4).eval()
    images = torch.rand(2, 3, 8, 8)
    assert weft.inspect.attention_views(crate, images)[0][0].map.shape == (2, 2, 5, 5)


def test_a_mask_does_not_lower_the_precision_of_coding_rates():
    z = torch.randn(7, 5, dtype=torch.float64)
    mask = torch.ones(7, dtype=torch.bool)
    torch.testing.assert_close(inspect.coding_rate(z, mask=mask), inspect.coding_rate(z), rtol=1e-12, atol=0)


class Packed(torch.nn.Module):
    def __init__(self, attention: str):
        super().__init__()
        sizes = dict(max_length=16, dim=16, heads=2, layers=1, positions="none")
        self.inner = LanguageModel(19, attention=attention, **sizes)

    def forward(self, ids, segments=None):
        return self.inner(ids, None, segments)


@pytest.mark.parametrize("end", [11, 13])
@pytest.mark.parametrize("name", ["full", "local", "combiner-fixed", "logsparse"])
def test_packed_documents_are_one_view(name, end):
    """Even if they are gathered into several calls of the mechanism. Padding is not shown or measured."""
    model, ids = Packed(name).eval(), torch.randint(19, (1, 13))
    segments = torch.tensor([[1, 1, 1, 1, 2, 2, 2, *[3] * (end - 7), *[0] * (13 - end)]])
    for map_up_to in (4, 64):
        (view,), _ = inspect.attention_views(model, [ids, segments], row=-1, map_up_to=map_up_to)
        (last,), _ = inspect.attention_views(model, [ids[:, 7:end]], row=-1)
        assert view.mask is None if end == 13 else view.mask.tolist() == (segments > 0).tolist()
        torch.testing.assert_close(view.row[..., 7:end], last.row)
        assert not view.row[..., :7].any() and not view.row[..., end:].any()
    changed = ids.masked_fill(segments == 0, 5)
    rates = [inspect.measure(model, [x, segments])["rate"] for x in (ids, changed)]
    torch.testing.assert_close(*rates)


def test_an_example_without_tokens_is_an_error(tmp_path):
    ids = torch.zeros(1, 5, dtype=torch.long)
    with pytest.raises(ValueError, match="no real tokens, only padding"):
        inspect.report(TextClassifier(19, 2, max_length=9, dim=8, heads=2, layers=1), ids, out=tmp_path / "page.html")
