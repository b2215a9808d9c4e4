"""Vision models whose layers have their own biases, rotations, cosines or pooled queries: exact with `full`."""

from __future__ import annotations

import copy

import pytest
import torch

import weft

timm = pytest.importorskip("timm")
torchvision = pytest.importorskip("torchvision")
from timm.models import davit, hiera, maxxvit, metaformer, mvitv2, nest, swin_transformer_v2, tnt, twins, visformer  # noqa: E402
from torchvision.models import swin_transformer as tv  # noqa: E402

VIT = {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 4, "num_classes": 5}
SWIN = {"img_size": 32, "window_size": 4, "embed_dim": 24, "depths": (2,), "num_heads": (2,), "num_classes": 5}


def maxxvit_of(block: str, **settings):
    transformer = maxxvit.MaxxVitTransformerCfg(dim_head=16, window_size=(4, 4), **settings)
    sizes = {"embed_dim": (32,), "depths": (1,), "block_type": (block,), "stem_width": 16}
    return maxxvit.MaxxVit(maxxvit.MaxxVitCfg(**sizes, transformer_cfg=transformer), img_size=32, num_classes=5)


def mvit():
    sizes = {"depths": (1, 1), "embed_dim": (24, 48), "num_heads": (1, 2), "stride_q": ((1, 1), (2, 2))}
    config = mvitv2.MultiScaleVitCfg(**sizes, stride_kv=((2, 2), (2, 2)), use_cls_token=True)
    return mvitv2.MultiScaleVit(config, img_size=32, num_classes=5)


def caformer():
    mixers = [metaformer.SepConv, metaformer.Attention]
    norms = [metaformer.LayerNorm2dNoBias, metaformer.LayerNormNoBias]
    return metaformer.MetaFormer(depths=(1, 2), dims=(16, 32), token_mixers=mixers, norm_layers=norms, num_classes=5)


def twins_svt():
    """Windows of 3 x 3 in 8 x 8 patches, then keys at every second patch."""
    sizes = {"depths": (2,), "embed_dims": (16,), "num_heads": (2,), "mlp_ratios": (2,), "sr_ratios": (2,), "wss": (3,)}
    return twins.Twins(img_size=32, num_classes=5, **sizes)


def transformer_in_transformer():
    return tnt.TNT(img_size=32, embed_dim=24, inner_dim=8, depth=1, num_heads_inner=2, num_heads_outer=3, num_classes=5)


def convolution_and_attention():
    sizes = {"init_channels": 8, "embed_dim": 32, "depth": (1, 1, 1), "num_heads": 2, "num_classes": 5}
    return visformer.Visformer(img_size=64, attn_stage="011", **sizes)


def davit_of_windows():
    return davit.DaVit(
        depths=(1,), embed_dims=(16,), num_heads=(2,), attn_types=("spatial",), window_size=4, num_classes=5
    )


def torchvision_swin(block, downsample):
    sizes = {"patch_size": [4, 4], "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 2], "window_size": [4, 4]}
    return torchvision.models.SwinTransformer(**sizes, num_classes=5, block=block, downsample_layer=downsample)


# Every model with its number of layers, and those that need a bias or have fewer queries than keys.
MODELS = {
    "EVA": (lambda: timm.create_model("eva02_tiny_patch14_224", **{**VIT, "img_size": 56}), 2, 0, 0),
    "DINOv3": (lambda: timm.create_model("vit_small_patch16_dinov3", **VIT), 2, 0, 0),
    "BEiT": (lambda: timm.create_model("beit_base_patch16_224", **VIT), 2, 2, 0),
    "BEiT, shared bias": (
        lambda: timm.create_model(
            "beit_base_patch16_224", **VIT, use_rel_pos_bias=False, use_shared_rel_pos_bias=True, use_abs_pos_emb=True
        ),
        *(2, 2, 0),
    ),
    "SwinV2": (lambda: timm.create_model("swinv2_tiny_window8_256", **SWIN), 2, 2, 0),
    "MaxViT": (lambda: maxxvit_of("M"), 2, 2, 0),
    "MaxViT, channels first": (lambda: maxxvit_of("M", use_nchw_attn=True, rel_pos_type="mlp"), 2, 2, 0),
    "CoAtNet": (lambda: maxxvit_of("T", rel_pos_type="bias_tf"), 1, 1, 0),
    "Hiera": (lambda: hiera.Hiera((32, 32), embed_dim=16, stages=(1, 1, 1, 1), num_classes=5), 4, 0, 3),
    "MViTv2": (mvit, 2, 2, 1),
    "CAFormer": (caformer, 2, 0, 0),
    "NesT": (lambda: nest.Nest(32, embed_dims=(16, 32), num_heads=(2, 2), depths=(1, 1), num_levels=2), 2, 0, 0),
    "Twins": (twins_svt, 2, 0, 1),
    "TNT": (transformer_in_transformer, 2, 0, 0),
    "Visformer": (convolution_and_attention, 2, 0, 0),
    "DaViT": (davit_of_windows, 1, 0, 0),
    "relative positions": (lambda: timm.create_model("vit_relpos_small_patch16_224", **VIT), 2, 2, 0),
    "torchvision Swin": (lambda: torchvision_swin(tv.SwinTransformerBlock, tv.PatchMerging), 4, 4, 0),
    "torchvision Swin V2": (lambda: torchvision_swin(tv.SwinTransformerBlockV2, tv.PatchMergingV2), 4, 4, 0),
}


def built(name: str):
    """With every parameter in play: no zero at the start, no flat attention."""
    torch.manual_seed(0)
    model = MODELS[name][0]().eval()
    for key, parameter in model.named_parameters():
        if parameter.dim() > 1 and ("head" in key or "rel" in key or not parameter.any()):
            torch.nn.init.normal_(parameter, std=0.5)
        elif "qkv.weight" in key or "q_proj.weight" in key or "k_proj.weight" in key:
            torch.nn.init.normal_(parameter, std=2 / parameter.shape[1] ** 0.5)
        elif parameter.dim() == 1 and ("norm" in key or "gamma" in key or "ls" in key) and "bias" not in key:
            torch.nn.init.ones_(parameter)
    larger = ("DINOv3", "BEiT", "BEiT, shared bias", "relative positions", "Visformer")
    size = 56 if name == "EVA" else 64 if name in larger else 32
    return model, torch.randn(2, 3, size, size)


@pytest.mark.parametrize("name", MODELS)
def test_full_is_exact_others_run_and_undo_restores(name):
    (model, x), (_, layers, biased, crossed) = built(name), MODELS[name]
    expected, state = model(x), copy.deepcopy(model.state_dict())
    model.zero_grad()
    expected.square().mean().backward()
    gradients = {key: p.grad.clone() for key, p in model.named_parameters()}

    report = weft.swap(model, "full")
    assert len(report.replaced) == layers and not report.left
    torch.testing.assert_close(model(x), expected, atol=1e-4, rtol=1e-4)
    model.zero_grad()
    model(x).square().mean().backward()
    for key, p in model.named_parameters():
        scale = 1e-4 * gradients[key].abs().max().item() + 1e-6
        torch.testing.assert_close(p.grad, gradients[key], atol=scale, rtol=1e-3, msg=key)
    report.undo()

    for to, able in (("local", layers - crossed), ("linear", layers - biased)):
        options = {"block_size": 3} if to == "local" else {}
        report = weft.swap(model, to, **options)
        assert (len(report.replaced), len(report.left)) == (able, layers - able)
        if able:
            model.zero_grad()
            out = model.train()(x)
            out.square().mean().backward()
            assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
            assert not torch.allclose(model.eval()(x), expected, atol=1e-3)
            assert len(weft.describe(model)["swapped"]) == able
        report.undo()
        model.load_state_dict(state)  # running means of batch norms
        assert torch.equal(model(x), expected) and not weft.describe(model)


def test_cosine_attention_is_refused_by_name_where_it_does_not_fit():
    model, _ = built("SwinV2")
    with pytest.warns(UserWarning, match=r"layers.0.blocks.0.attn: the layer uses a position bias, which linear"):
        weft.swap(model, "linear")


@pytest.mark.parametrize("options", [{"qkv_bias": False}, {"qkv_bias_separate": True}], ids="+".join)
def test_adapters_around_projections_are_called(options):
    class Adapter(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.weight, self.inner = inner.weight, inner

        def forward(self, x):
            return self.inner(x) + 3 * x.repeat(1, 1, 3)

    layer = swin_transformer_v2.WindowAttention(16, (4, 4), 2, **options).double().eval()
    layer.qkv, x = Adapter(layer.qkv), torch.randn(2, 16, 16, dtype=torch.float64)
    for bias in (layer.q_bias, layer.v_bias):
        if bias is not None:
            torch.nn.init.normal_(bias)
    expected = layer(x)
    weft.swap(torch.nn.ModuleList([layer]), "full")
    torch.testing.assert_close(layer(x), expected)


CACHED = ["TNT", "DaViT", "relative positions", "EVA", "DINOv3", "BEiT", "BEiT, shared bias", "SwinV2"]


@pytest.mark.parametrize("name", MODELS)
def test_caches_are_put_around_layers_of_tokens(name):
    model, x = built(name)
    if name not in CACHED:
        with pytest.warns(UserWarning, match="does not map tokens"):
            assert not weft.cache(model, 0.5).replaced
        return
    assert not weft.cache(model, 0.5).left
    model.train()(x).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", ["EVA", "BEiT", "Hiera", "CAFormer", "NesT"])
def test_models_without_fused_attention(name):
    timm.layers.set_fused_attn(False)
    try:
        model, x = built(name)
    finally:
        timm.layers.set_fused_attn(True)
    expected = model(x)
    report = weft.swap(model, "full")
    torch.testing.assert_close(model(x), expected, atol=1e-4, rtol=1e-4)
    report.undo()
    assert not any(layer.fused_attn for layer in report.layers)


@pytest.mark.parametrize("name", CACHED)
def test_the_memory_of_a_cache_does_not_use_the_mechanism(name):
    """Swapped to `full` and cached is the same as cached."""
    models = []
    for swapped in (False, True):
        model, x = built(name)
        if swapped:
            weft.swap(model, "full")
        weft.cache(model, 0.5)
        models.append(model)
    models[1].load_state_dict(models[0].state_dict())
    outs = []
    for model in models:
        torch.manual_seed(1)
        model.train()(x)  # writes the cache
        outs.append(model.eval()(x))
    torch.testing.assert_close(*outs, atol=1e-4, rtol=1e-4)
