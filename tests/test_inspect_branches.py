"""The two branches of cached layers, as views, figures and on the page."""

from __future__ import annotations

import html
import json
import re
import warnings

import pytest
import torch
from test_inspect_page import browser, payload, run_browser
from test_pvt import SMALL

import weft
from weft import inspect
from weft.inspect import figures
from weft.layers.cached import branch_maps
from weft.models import TextClassifier
from weft.models.pvt import PVT


@pytest.fixture(autouse=True)
def seeded_and_quiet():
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="this cache was never written")
        yield


def text_model(**options) -> tuple[TextClassifier, torch.Tensor]:
    model = TextClassifier(19, 2, max_length=12, dim=16, heads=2, head_dim=4, layers=2, mlp_dim=8, **options)
    weft.cache(model, ratio=0.5)
    ids = torch.randint(1, 19, (2, 9))
    ids[1, 6:] = 0
    model(ids)
    return model, ids


def vit() -> tuple[torch.nn.Module, torch.Tensor]:
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", img_size=48, embed_dim=24, depth=2, num_heads=3, num_classes=3)
    weft.cache(model, ratio=0.5)
    images = torch.rand(2, 3, 48, 48)
    model(images)
    return model, images


def unit(values: torch.Tensor) -> torch.Tensor:
    return (values - values.min()) / (values.max() - values.min())


@pytest.mark.parametrize("whole", [True, False])
def test_models_that_were_compiled_and_called(whole):
    """Hooks do not run in graphs that were compiled before."""
    model, ids = text_model()
    model.eval()

    def looked():
        views, _ = inspect.attention_views(model, [ids])
        return [v.map for v in views], inspect.measure(model, [ids])

    expected = looked()
    for part in (model,) if whole else model.encoder.blocks:
        part.compile(backend="eager")
    with torch.no_grad():
        for _ in range(2):
            model(ids)
    assert len(branch_maps(model, ids)) == 2
    torch.testing.assert_close(looked(), expected)


def test_text_views_are_the_real_tokens():
    """Computed by hand from the layer's branches, without padding."""
    model, ids = text_model()
    views, windows = inspect.branch_views(model, [ids[1:]])
    alone, _ = inspect.branch_views(model, [ids[1:, :6]])
    assert not windows and [v.own.shape for v in views] == [(7,), (7,)]  # CLS and six words
    for view, cut in zip(views, alone, strict=True):
        torch.testing.assert_close((view.own, view.memory), (cut.own, cut.memory), rtol=1e-4, atol=1e-5)
    layer = model.get_submodule(views[1].path)
    seen = {}
    hook = layer.register_forward_pre_hook(
        lambda _, given, named: seen.update(given=given, named=named), with_kwargs=True
    )
    model.eval()(ids[1:])
    hook.remove()
    for values, branch in zip(views[1][1:3], layer.branches(*seen["given"], **seen["named"]), strict=True):
        torch.testing.assert_close(values, unit(branch.mean((2, 3))[0, :7]).double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(views[0].share, torch.full((2,), 0.5).double())


def test_image_views_exclude_the_class_token():
    model, images = vit()
    with torch.no_grad():  # a class token far from all patches must not wash the picture out
        model.cls_token += 100
    ((path, own, memory, _), _), _ = inspect.branch_views(model, [images])
    assert path == "blocks.0.attn" and own.shape == memory.shape == (3, 3)
    x = model._pos_embed(model.patch_embed(images[:1]))
    layer = model.eval().blocks[0]
    for values, branch in zip((own, memory), layer.attn.branches(layer.norm1(x)), strict=True):
        torch.testing.assert_close(values, unit(branch.mean((2, 3))[0, 1:]).view(3, 3).double(), rtol=1e-3, atol=1e-3)
        assert values.min() == 0 and values.max() == 1


def test_a_pyramid_has_an_image_per_stage_and_pixels_a_grid():
    model = PVT(**SMALL, cache={})
    images = torch.rand(1, 3, 64, 96)
    model(images)
    views, _ = inspect.branch_views(model, [images])
    assert [tuple(v.own.shape) for v in views] == [(16, 24), (8, 12), (4, 6), (2, 3)]
    model, ids = text_model()
    views, _ = inspect.branch_views(model, [ids[:1]], grid=(3, 3))
    assert [tuple(v.memory.shape) for v in views] == [(3, 3), (3, 3)]


def test_window_layers_are_listed_and_excluded():
    timm = pytest.importorskip("timm")
    model = timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=56, embed_dim=8, depths=(1, 1), num_heads=(2, 2), num_classes=3
    )
    weft.cache(model, ratio=0.5)
    images = torch.rand(1, 3, 56, 56)
    model(images)
    views, windows = inspect.branch_views(model, [images])
    assert windows == ["layers.0.blocks.0.attn"] and [v.path for v in views] == ["layers.1.blocks.0.attn"]


def test_figures_show_both_branches():
    pytest.importorskip("matplotlib")
    for model, inputs, shape in ((*text_model(), (1, 10)), (*vit(), (3, 3))):
        views, _ = inspect.branch_views(model, [inputs])
        figure = figures.branches(views)
        drawn = [axis.images[0].get_array() for axis in figure.axes[:4]]
        assert [tuple(values.shape) for values in drawn] == [shape] * 4
        torch.testing.assert_close(torch.tensor(drawn[1].data).flatten(), views[0].memory.flatten())
        figure.canvas.draw()


@pytest.mark.parametrize("attention", ["full", "subsampled", "combiner-fixed"])
def test_report_on_cached_text(tmp_path, attention):
    model, ids = text_model(attention=attention)
    data = payload(inspect.report(model, ids, out=tmp_path / "page.html").read_text("utf-8"))
    first, second = data["branches"]["examples"]
    assert [layer["name"] for layer in first] == ["layer 1", "layer 2"]
    assert first[0]["maps"]["shape"] == [2, 10] and second[0]["maps"]["shape"] == [2, 7]
    own, memory = data["attention"]["layers"][:2]
    assert own["mechanisms"][0] == attention and own["examples"][0]["tokens"] == "shared"
    # As many slots as tokens, and still no words: what the cache holds is not this text.
    assert memory["examples"][0]["row"]["shape"][1] == 10 and memory["examples"][0]["tokens"] is None


def test_report_lists_layers_without_maps(tmp_path):
    plain = TextClassifier(19, 2, max_length=12, dim=16, heads=2, head_dim=4, layers=1, mlp_dim=8)
    ids = torch.randint(1, 19, (1, 9))
    data = payload(inspect.report(plain, ids, out=tmp_path / "plain.html").read_text("utf-8"))
    assert data["branches"] == {"examples": [], "missing": ""}
    layer = weft.CachedAttention(
        weft.MultiheadAttention(8, 2), length=4, delayed=True, scope="stream", eval_update=True
    )
    data = payload(inspect.report(layer, torch.randn(1, 5, 8), out=tmp_path / "streams.html").read_text("utf-8"))
    assert data["branches"]["examples"] == [] and "would change this model's streams" in data["branches"]["missing"]


def test_the_last_real_token_reads_the_slots():
    """Even if the input is too long for a map."""
    sizes = dict(max_length=12, dim=16, heads=2, layers=1, positions="none", attention="linear")
    model = weft.models.LanguageModel(19, **sizes)
    weft.cache(model, length=4)
    ids, mask = torch.randint(1, 19, (2, 9)), torch.arange(9) < torch.tensor([[6], [9]])
    model(ids, mask), model(ids, mask)
    (_, short), (_, long) = (inspect.attention_views(model, [ids, mask], row=-1, map_up_to=n)[0] for n in (64, 3))
    torch.testing.assert_close(long.row, torch.stack([short.map[0, :, 5], short.map[1, :, 8]]))
    torch.testing.assert_close(short.row, long.row)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("name", ["GPT2", "Llama"])
def test_maps_of_transformers_decoders(name, swapped):
    """Their key-value cache must not hold the tokens twice."""
    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=19, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, bos_token_id=1)
    sizes |= dict(eos_token_id=2) if name == "GPT2" else dict(intermediate_size=16)
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = getattr(transformers, f"{name}Model")(config).eval()
    if swapped:
        weft.swap(model, "full")
    weft.cache(model, length=4)
    ids = torch.randint(1, 19, (1, 9))
    maps = []
    for use_cache in (False, True):
        model.config.use_cache = use_cache
        views, windows = inspect.branch_views(model, [ids])
        assert len(views) == 2 and not windows
        maps.append([torch.stack([view.own, view.memory]) for view in views])
    torch.testing.assert_close(*maps)


@pytest.mark.parametrize("eval_update", [False, True])
def test_streams_are_inspected_with_other_rows_and_kept(eval_update):
    options = dict(length=4, delayed=True, scope="stream", eval_update=eval_update)
    layer = weft.CachedAttention(weft.MultiheadAttention(8, 2), **options)
    x = torch.randn(2, 5, 8)
    layer(x), layer(x)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    for rows in (1, 3):
        inspect.attention_views(layer, [torch.randn(rows, 5, 8)])
    first, second = (inspect.attention_views(layer, [x])[1] for _ in range(2))
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    assert torch.equal(first, second) and torch.equal(first, layer.eval()(x))


@browser
def test_pages_in_a_browser(tmp_path):
    script = """
        const pairs = [...document.querySelectorAll('.pair:not(.original)')];
        const report = {names: pairs.map(p => p.querySelector('b').textContent),
          sizes: pairs.flatMap(p => [...p.querySelectorAll('canvas')].map(c => [c.height, c.width])),
          original: document.querySelectorAll('.pair.original').length,
          line: document.querySelector('.card p').textContent};
        const out = document.createElement('pre'); out.id = 'report'; out.textContent = JSON.stringify(report);
        document.body.append(out);
    """
    found = []
    for name, (model, inputs) in {"text": text_model(), "vit": vit()}.items():
        page = inspect.report(model, inputs, out=tmp_path / f"{name}.html")
        dom = run_browser(tmp_path, page, script)
        assert "<h2>Self and cache</h2>" in dom
        found.append(json.loads(html.unescape(re.search(r'<pre id="report">(.*?)</pre>', dom, re.S)[1])))
    text, image = found
    assert text["names"] == image["names"] == ["layer 1", "layer 2"]
    assert text["sizes"] == [[1, 10]] * 4 and text["original"] == 0
    assert image["sizes"] == [[3, 3]] * 4 and image["original"] == 1
    assert "attention of “[CLS]”." in text["line"]
    assert "attention of “[CLS]” over the slots of the cache" in image["line"]
