"""Mechanisms in timm's vision transformers, tiny and random: nothing is downloaded."""

from __future__ import annotations

import pickle

import pytest
import torch

import weft

timm = pytest.importorskip("timm")

CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def vit(**changes):
    torch.manual_seed(0)
    settings = {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 4, "num_classes": 5, **changes}
    return timm.create_model("vit_tiny_patch16_224", **settings).eval()


def images() -> torch.Tensor:
    return torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def like_plain(plain, **changes):
    """A model with another attention layer, and the plain one's weights."""
    other = vit(**changes)
    other.load_state_dict(plain.state_dict(), strict=True)
    return other


@pytest.mark.parametrize("extras", [{}, {"qk_norm": True}, {"scale_attn_norm": True}, {"proj_bias": False}])
def test_full_is_the_library(extras):
    plain = vit(**extras)
    ours = like_plain(plain, attn_layer=weft.timm.layer("full"), **extras)
    torch.testing.assert_close(ours(images()), plain(images()), **CLOSE)


@pytest.mark.parametrize("name", weft.attentions())
def test_every_mechanism_loads_plain_weights(name):
    plain, info = vit(), weft.attention_info(name)
    if not info.bidirectional:
        pytest.skip("causal only")
    ours = like_plain(plain, attn_layer=weft.timm.layer(name, max_length=17))
    out = ours(images())
    layer, x = ours.blocks[0].attn, torch.randn(2, 17, 48)
    q, k, v = layer.qkv(x).view(2, 17, 3, 4, 12).permute(2, 0, 3, 1, 4)
    expected = layer.proj(layer.weft.form(False)(q, k, v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), expected, **CLOSE)
    # and its own checkpoint holds all of it
    again = vit(attn_layer=weft.timm.layer(name, max_length=17))
    again.load_state_dict(ours.state_dict(), strict=True)
    torch.testing.assert_close(again(images()), out, **CLOSE)


def test_an_incomplete_checkpoint_is_refused():
    ours = vit(attn_layer=weft.timm.layer("linformer", max_length=17))
    state = ours.state_dict()
    mine = [key for key in state if ".weft." in key]
    ours.load_state_dict({key: value for key, value in state.items() if key not in mine}, strict=True)
    with pytest.raises(RuntimeError, match="Missing"):
        ours.load_state_dict({key: value for key, value in state.items() if key != mine[0]} | {mine[0] + "x": 0})


def test_prefix_makes_blocks_rows_of_the_image():
    """With the class token moved behind the patches, local blocks as wide as the grid are its rows."""
    layer = weft.timm.layer("local", block_size=4, prefix=1)(48, num_heads=4).eval()
    x = torch.randn(1, 17, 48)
    changed = x.clone()
    changed[:, 1 + 4 : 1 + 8] += 1  # the second row of patches
    moved = (layer(x) - layer(changed)).abs().amax(-1)[0] > 1e-6
    assert moved.nonzero().flatten().tolist() == [5, 6, 7, 8]
    unaligned = weft.timm.layer("local", block_size=4)(48, num_heads=4).eval()
    moved = (unaligned(x) - unaligned(changed)).abs().amax(-1)[0] > 1e-6
    assert moved.nonzero().flatten().tolist() == list(range(4, 12))


def test_masks_and_causality():
    torch.manual_seed(0)
    plain = timm.layers.Attention(48, num_heads=4).eval()
    ours, linear = (weft.timm.layer(n)(48, num_heads=4).eval() for n in ("full", "linear"))
    ours.load_state_dict(plain.state_dict()), linear.load_state_dict(plain.state_dict())
    x = torch.randn(2, 9, 48)
    keys = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    keys[1, ..., -3:] = False
    pairs = torch.rand(2, 1, 9, 9) > 0.3
    pairs |= torch.eye(9, dtype=torch.bool)
    for mask in (keys, pairs, torch.randn(2, 4, 9, 9)):
        torch.testing.assert_close(ours(x, attn_mask=mask), plain(x, attn_mask=mask), **CLOSE)
    torch.testing.assert_close(ours(x, is_causal=True), plain(x, is_causal=True), **CLOSE)
    changed = x.clone()
    changed[1, -3:] += 1
    torch.testing.assert_close(linear(x, attn_mask=keys)[:, :6], linear(changed, attn_mask=keys)[:, :6], **CLOSE)
    changed = x.clone()
    changed[:, 5:] += 1
    torch.testing.assert_close(linear(x, is_causal=True)[:, :5], linear(changed, is_causal=True)[:, :5], **CLOSE)
    assert not torch.allclose(linear(x)[:, :5], linear(changed)[:, :5], atol=1e-3)
    with pytest.raises(ValueError, match="use 'full'"):
        linear(x, attn_mask=pairs)
    with pytest.raises(ValueError, match="prefix"):
        weft.timm.layer("full", prefix=1)(48, num_heads=4)(x, is_causal=True)


def test_dropout_matches_the_library():
    model = vit(attn_layer=weft.timm.layer("full"), attn_drop_rate=0.5)
    assert torch.equal(model(images()), model(images()))
    model.train()
    assert not torch.equal(model(images()), model(images()))


def test_autocast():
    """Norms give q and k in single precision, with v in half."""
    plain = vit(qk_norm=True)
    ours = like_plain(plain, attn_layer=weft.timm.layer("full"), qk_norm=True)
    linear = like_plain(plain, attn_layer=weft.timm.layer("linear"), qk_norm=True)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        torch.testing.assert_close(ours(images()), plain(images()), atol=1e-2, rtol=1e-2)
        assert linear(images()).isfinite().all()


def test_layers_can_be_pickled():
    model = vit(attn_layer=weft.timm.layer("local", block_size=4))
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(images()), model(images()))
    chosen = weft.timm.layer("local", block_size=4)  # timm keeps it in the model
    again = pickle.loads(pickle.dumps(chosen))
    assert repr(again(8, num_heads=2)) == repr(chosen(8, num_heads=2))


@pytest.mark.parametrize(("name", "options"), [("local", {"block_size": 4, "prefix": 1}), ("synthesizer", {})])
def test_layers_are_saved_and_loaded(name, options, tmp_path):
    sizes = {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 4}
    model = vit(attn_layer=weft.timm.layer(name, max_length=17, **options))
    weft.timm.save(model, tmp_path, **sizes)
    again = weft.timm.load(tmp_path).eval()
    assert torch.equal(again(images()), model(images()))
    assert weft.describe(again) == weft.describe(model) and len(weft.describe(model)["swapped"]) == 2
    assert pickle.loads(pickle.dumps(model))._model_args.keys() == model._model_args.keys()


def test_wrong_names_and_options_are_refused():
    with pytest.raises(ValueError, match="unknown attention"):
        weft.timm.layer("lokal")
    with pytest.raises(TypeError, match="no option"):
        vit(attn_layer=weft.timm.layer("local", blok_size=4))
