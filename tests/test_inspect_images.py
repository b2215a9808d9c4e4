"""Inspection of image models: windows, pyramids, class tokens and registers."""

from __future__ import annotations

import html
import json
import re

import pytest
import torch
from browser import browser, payload, run_browser, shown, unpacked
from test_pvt import SMALL

import weft
from weft import inspect
from weft.inspect.views import attention_views
from weft.models.pvt import PVT


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("map_up_to", [4, 64])
def test_class_tokens_that_were_moved_are_shown_in_front(map_up_to):
    timm = pytest.importorskip("timm")
    sizes = dict(img_size=32, patch_size=8, embed_dim=24, depth=1, num_classes=3)
    model = timm.create_model("vit_tiny_patch16_224", **sizes).eval()
    weft.swap(model, "local", block_size=4, prefix=1)
    layer, seen = model.blocks[0].attn, []
    layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    for row in (0, 5, -1):
        (view,), _ = inspect.attention_views(model, torch.rand(1, 3, 32, 32), row=row, map_up_to=map_up_to)
        q, k, _ = layer.qkv(seen[-1]).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
        expected = layer._core(q, k, torch.eye(17).expand(1, 3, 17, 17), None, False)
        torch.testing.assert_close(view.row, expected[:, :, row])
        if view.map is not None:
            torch.testing.assert_close(view.map, expected)


def test_windows_of_an_image_are_put_together():
    """Shifted windows, and padding of an image that they do not divide."""
    timm = pytest.importorskip("timm")
    from timm.models.swin_transformer import window_partition

    sizes = dict(img_size=(40, 56), window_size=4, embed_dim=8, depths=(2,), num_heads=(2,), num_classes=3)
    model = timm.create_model("swin_tiny_patch4_window7_224", **sizes).eval()
    weft.swap(model, "full")
    image = torch.rand(1, 3, 40, 56)
    views, output = inspect.attention_views(model, image)
    torch.testing.assert_close(output, model(image))
    for view, shift in zip(views, (0, 2), strict=True):
        cells = torch.arange(1, 141).view(10, 14).roll((-shift, -shift), (0, 1))
        cells = torch.nn.functional.pad(cells, (0, 2, 0, 2))
        assert view.windows.grid == (10, 14)
        assert torch.equal(view.windows.tokens + 1, window_partition(cells[None, ..., None], (4, 4)).flatten(1))
    (example,) = shown(model, [image], pictures=image, map_up_to=256)["layers"][1]["examples"]
    assert example["tokens"] == "shared" and example["grid"] == [10, 14] and example["query"] == 0
    row, map_, tokens = unpacked(example["row"]), unpacked(example["windows"]["map"]), example["windows"]["tokens"]
    (window,) = (i for i, w in enumerate(tokens) if 0 in w)
    kept = [t >= 0 for t in tokens[window]]
    found = row[:, [t for t in tokens[window] if t >= 0]]
    torch.testing.assert_close(found, map_[:, window, tokens[window].index(0), kept], atol=0.01, rtol=0)
    torch.testing.assert_close(row.sum(1), found.sum(1))


def test_windows_in_another_order_are_not_shown_as_the_image():
    timm = pytest.importorskip("timm")
    model = timm.create_model("davit_tiny", embed_dims=(16, 16, 16, 16), num_heads=(1, 1, 1, 1)).eval()
    with pytest.warns(UserWarning, match="keep their own attention"):
        weft.swap(model, "full")
    images = torch.rand(1, 3, 64, 64)
    found = shown(model, [images], pictures=images, map_up_to=256)
    first = found["layers"][0]["examples"][0]
    assert first["parts"] == 9 and first["tokens"] is None and found["examples"][0]["grid"] is None


@pytest.mark.parametrize("learned", [False, True])
def test_queries_that_are_no_tokens_of_the_image(learned):
    class Pool(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.queries = torch.nn.Parameter(torch.randn(1, 1, 3, 8), requires_grad=learned)
            self.attend = weft.make_attention("full", heads=1, head_dim=8)

        def forward(self, x):
            keys = x.flatten(1, 2)[:, None]
            return self.attend(self.queries, keys, keys)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.pool = Pool()

        def forward(self, images):
            return self.pool(images.movedim(1, -1))

    (view,), _ = attention_views(Model().eval(), torch.randn(1, 8, 4, 4))
    assert view.windows is None and view.map.shape == (1, 1, 3, 16)


@browser
def test_windows_in_a_browser(tmp_path):
    """A click on a cell shows its attention in its window, over the whole image."""
    timm = pytest.importorskip("timm")
    sizes = dict(img_size=32, window_size=4, embed_dim=8, depths=(1,), num_heads=(2,), num_classes=3)
    model = timm.create_model("swin_tiny_patch4_window7_224", **sizes).eval()
    weft.swap(model, "full")
    page = inspect.report(model, torch.rand(1, 3, 32, 32), out=tmp_path / "swin.html")
    dom = run_browser(
        tmp_path,
        page,
        """
        const box = document.querySelectorAll('.frame')[1].getBoundingClientRect();
        document.querySelectorAll('.frame')[1].dispatchEvent(new MouseEvent('click',
          {clientX: box.left + .95 * box.width, clientY: box.top + .05 * box.height}));
        const canvas = document.querySelector('[data-head="1"] canvas'), shades = [...canvas.getContext('2d')
          .getImageData(0, 0, 8, 8).data].filter((_, i) => i % 4 === 3);
        const report = {line: document.querySelector('.card p').textContent,
          shown: shades.map(a => Number(a > 0)).join('')};
        const out = document.createElement('pre'); out.id = 'report'; out.textContent = JSON.stringify(report);
        document.body.append(out);
        """,
    )
    found = json.loads(html.unescape(re.search(r'<pre id="report">(.*?)</pre>', dom, re.S)[1]))
    assert "attention of “row 1, column 8” in its window" in found["line"]
    assert found["shown"] == "00001111" * 4 + "00000000" * 4


@browser
def test_queries_of_a_pyramid_are_not_named_after_its_keys(tmp_path):
    """Its layers read fewer keys than they have queries; names of the keys would be those of other places."""
    timm = pytest.importorskip("timm")
    sizes = dict(embed_dims=(8, 8), depths=(1, 1), num_heads=(1, 1), sr_ratios=(4, 2), mlp_ratios=(1, 1))
    model = timm.create_model("pvt_v2_b0", **sizes).eval()
    weft.swap(model, "full")
    page = inspect.report(model, torch.rand(1, 3, 32, 32), out=tmp_path / "pvt.html")
    assert payload(page.read_text("utf-8"))["attention"]["layers"][0]["examples"][0]["map"]["shape"] == [1, 64, 4]
    assert "attention of “query 1”" in run_browser(tmp_path, page, "")


def test_the_keys_of_a_pyramid_are_an_image():
    """Not that of the slots of its caches, which may be of another size."""
    model = PVT(**SMALL, cache={})
    images = torch.rand(1, 3, 64, 96)
    model(images)
    weft.swap(model, "full")
    found = shown(model, [images])
    assert found["examples"][0]["grid"] == [2, 3]
    last = found["layers"][-2]["examples"][0]
    assert last["row"]["shape"] == [4, 7] and last["tokens"][:2] == ["[CLS]", "row 1, column 1"]


def test_every_stage_of_a_pyramid_has_its_image():
    timm = pytest.importorskip("timm")
    sizes = dict(embed_dims=(8, 8), depths=(1, 1), num_heads=(1, 1), sr_ratios=(4, 1), mlp_ratios=(1, 1))
    model = timm.create_model("pvt_v2_b0", **sizes)
    weft.swap(model, "full")
    found = shown(model, [torch.rand(1, 3, 32, 64)])
    first, second = (layer["examples"][0] for layer in found["layers"])
    assert found["examples"][0]["grid"] == [2, 4] and first["tokens"] == "shared"
    assert second["grid"] == [4, 8] and second["tokens"][-1] == "row 4, column 8"


def test_images_with_registers_and_of_another_size():
    timm = pytest.importorskip("timm")
    sizes = dict(img_size=16, patch_size=8, embed_dim=24, num_heads=2, depth=1, num_classes=3)
    model = timm.create_model("vit_small_patch14_reg4_dinov2", dynamic_img_size=True, **sizes)
    weft.swap(model, "full")
    for rows, columns in ((2, 2), (3, 4)):
        found = shown(model, [torch.rand(1, 3, 8 * rows, 8 * columns)])
        (example,) = found["examples"]
        assert example["grid"] == [rows, columns]
        assert example["tokens"][:2] == ["[CLS]", "register 1"]
        assert example["tokens"][4:6] == ["register 4", "row 1, column 1"]
        assert len(example["tokens"]) == 5 + rows * columns and found["layers"][0]["examples"][0]["tokens"] == "shared"


def test_a_single_register_is_no_class_token():
    timm = pytest.importorskip("timm")
    sizes = dict(img_size=16, patch_size=8, embed_dim=24, num_heads=2, depth=1, num_classes=3)
    model = timm.create_model("vit_medium_patch16_reg1_gap_256", **sizes)
    weft.swap(model, "full")
    (example,) = shown(model, [torch.rand(1, 3, 16, 16)])["examples"]
    assert example["tokens"][:2] == ["register 1", "row 1, column 1"]


@browser
def test_registers_in_a_browser(tmp_path):
    timm = pytest.importorskip("timm")
    sizes = dict(img_size=16, patch_size=8, embed_dim=24, num_heads=2, depth=1, num_classes=3)
    model = timm.create_model("vit_small_patch14_reg4_dinov2", **sizes)
    weft.swap(model, "full")
    page = inspect.report(model, torch.rand(1, 3, 16, 16), out=tmp_path / "page.html")
    dom = run_browser(tmp_path, page, "")
    assert "of it on [CLS] to register 4, the rest on the image" in dom
