"""PVT: exact parameter counts, multiply-adds compared with the paper, sizes, caches in every attention."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import weft
from weft import CachedAttention
from weft.lab.bench.pvt_sizes import PRINTED, PRINTED_BY_RATIO, cost, multiply_adds, timm_sizes
from weft.layers import branch_maps
from weft.layers.cached.memory_attention import MemoryAttention
from weft.models import PVT, pvt

SMALL = {
    "image_size": 64,
    "dims": (8, 16, 16, 32),
    "heads": (1, 2, 2, 4),
    "mlp_ratios": (2, 2, 2, 2),
    "depths": (1, 1, 1, 1),
    "classes": 5,
}


def millions(model: nn.Module) -> float:
    return round(sum(p.numel() for p in model.parameters()) / 1e6, 3)


@pytest.mark.parametrize(
    ("size", "plain", "cached"), [("tiny", 13.229, 15.671), ("small", 24.486, 29.357), ("medium", 44.208, 53.477)]
)
def test_counts_are_the_authors(size: str, plain: float, cached: float) -> None:
    with torch.device("meta"):
        assert millions(pvt(size)) == plain
        assert millions(pvt(size, cached=True, preset="authors")) == cached


@pytest.mark.parametrize(("ratio", "count"), [(0.125, 13.53), (0.25, 13.91), (1.0, 22.84)])
def test_counts_by_ratio(ratio: float, count: float) -> None:
    with torch.device("meta"):
        assert round(millions(pvt("tiny", cached=True, preset="authors", ratio=ratio)), 2) == count


def test_a_cached_layer_adds_what_the_paper_says() -> None:
    """9 D_m² for gates, queries, keys and values, a λ per head, positions, and the cached branch's reduction."""
    with torch.device("meta"):
        plain, cached = PVT(**SMALL), PVT(**SMALL, cache={})
    extra = sum(p.numel() for p in cached.parameters()) - sum(p.numel() for p in plain.parameters())
    expected = 0
    for dim, heads, reduction in zip(SMALL["dims"], SMALL["heads"], (8, 4, 2, 1), strict=True):
        w = dim // 2
        expected += 9 * w * w + heads + 9 * dim * 2 + dim + (w * w * reduction**2 + w + 2 * w if reduction > 1 else 0)
    assert extra == expected


def test_multiply_adds_are_the_formula() -> None:
    """T tokens, T_m = T slots: gates 6, queries 1, keys and values 2 T' / T for T' slots after the reduction."""
    with torch.device("meta"):
        plain, cached = PVT(**SMALL), PVT(**SMALL, cache={})
    image = torch.empty(1, 3, 64, 64, device="meta")
    base, none = multiply_adds(plain.train(), image)
    total, products = multiply_adds(cached.train(), image)
    extra = scores = 0
    for side, dim, reduction, prefix in zip((16, 8, 4, 2), SMALL["dims"], (8, 4, 2, 1), (0, 0, 0, 1), strict=True):
        T, w = side * side + prefix, dim // 2
        slots = T // reduction**2
        extra += 7 * T * w * w + 2 * slots * w * w + (T * w * w if reduction > 1 else 0)
        extra += 9 * side * side * dim * 2  # the convolution of positions, in groups of two channels
        scores += 2 * T * slots * w
    assert (none, products, total - base) == (0, scores, extra + scores)


def test_multiply_adds_are_close_to_the_papers() -> None:
    """Without the cached branch's products, as the paper seems to count; with all, cached ones are 2 to 4 % above."""
    plain, cached = PRINTED["tiny"]
    with torch.device("meta"):
        rows = [cost("", pvt("tiny"), None, "", plain), cost("", pvt("tiny", cached=True), 0.5, "paper", cached)]
        rows.append(cost("", pvt("tiny", cached=True, ratio=1.0), 1.0, "paper", PRINTED_BY_RATIO[1.0]))
    for row in rows:
        assert abs(row.as_printed / row.printed - 1) < 0.025
    assert [round(row.multiply_adds / 1e9, 2) for row in rows] == [1.93, 2.23, 3.01]


def test_counts_of_timms_models() -> None:
    pytest.importorskip("timm")
    plain, cached = timm_sizes(["vit-small"])
    assert round(plain.parameters / 1e6, 3) == 22.051
    w = 192  # in each of 12 layers: 9 D_m², a λ per head, a 3 x 3 convolution; the output projection is shared
    assert cached.parameters - plain.parameters == 12 * (9 * w * w + 6 + (9 * 2 + 1) * 2 * w)


def test_the_authors_vit_count() -> None:
    timm = pytest.importorskip("timm")
    for position, count in (("conv", 26.583), ("none", 26.495)):
        with torch.device("meta"):
            model = timm.create_model("vit_small_patch16_224")
            for block in model.blocks:
                block.attn = CachedAttention(block.attn, 0.5, 197, preset="authors", prefix=1, position=position)
        assert millions(model) == count


@pytest.mark.parametrize("preset", ["paper", "authors"])
def test_other_image_sizes_keep_the_cache(preset: str) -> None:
    torch.manual_seed(0)
    net = PVT(**SMALL, cache={"preset": preset})
    net(torch.randn(2, 3, 64, 64))
    shapes = [b.shape for name, b in net.named_buffers() if name.endswith("cache.cache")]
    assert [s[1] for s in shapes] == [256, 64, 16, 5]
    y = net(torch.randn(2, 3, 64, 96))
    assert y.shape == (2, 5) and y.isfinite().all()
    assert shapes == [b.shape for name, b in net.named_buffers() if name.endswith("cache.cache")]
    y.sum().backward()
    assert all(p.grad is not None for p in net.parameters())
    net.eval()
    images = torch.randn(3, 3, 64, 64)
    torch.testing.assert_close(net(images)[1:2], net(images[1:2]), rtol=1e-4, atol=1e-5)


def test_a_closed_cache_is_the_plain_pyramid() -> None:
    torch.manual_seed(0)
    plain = PVT(**SMALL)
    cached = PVT(**SMALL, cache={"position": "none"})
    renamed = {name.replace(".attn.", ".attn.inner."): value for name, value in plain.state_dict().items()}
    cached.load_state_dict(renamed, strict=False)
    for name, p in cached.named_parameters():
        if name.endswith(".lam"):
            p.data.fill_(-torch.inf)
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(cached(images), plain(images))
    assert {n for n in cached.no_weight_decay() if n.endswith("lam")} == {f"block{s}.0.attn.lam" for s in range(1, 5)}


def test_maps_of_both_branches() -> None:
    torch.manual_seed(0)
    net = PVT(**SMALL, cache={}).double()
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    net(images)
    before = {name: b.clone() for name, b in net.named_buffers()}
    maps = branch_maps(net, images)
    assert [m.name for m in maps] == [f"block{s}.0.attn" for s in range(1, 5)] and net.training
    for m, T in zip(maps, (256, 64, 16, 5), strict=True):
        for values in (m.own, m.memory):
            assert values.shape == (2, T) and values.min() == 0 and values.max() == 1
    torch.testing.assert_close(dict(net.named_buffers()), before, rtol=0, atol=0)
    seen = {}
    layer = net.block4[0].attn
    hook = layer.register_forward_pre_hook(lambda module, args: seen.update(x=args[0]))
    net.eval()(images)
    hook.remove()
    own, memory = layer.branches(seen["x"], (2, 2))
    values = memory.mean((2, 3))
    scaled = (values - values.amin(1, keepdim=True)) / (values.amax(1, keepdim=True) - values.amin(1, keepdim=True))
    torch.testing.assert_close(maps[3].memory, scaled)
    with pytest.raises(ValueError, match="no cached attention"):
        branch_maps(PVT(**SMALL), images)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="unknown PVT size"):
        pvt("huge")
    with pytest.raises(ValueError, match="cached=True"):
        pvt("tiny", cache={"ratio": 0.25})
    with pytest.raises(ValueError, match="multiples of 32"):
        PVT(**SMALL)(torch.randn(1, 3, 60, 64))


def test_caches_of_the_first_stages_are_pooled_and_positions_added() -> None:
    """The paper's text: pooling 4 and 2 in the first two stages, and a positional encoding in every cached layer."""
    model = PVT(cache={"pool": (4, 2)}, **SMALL).double()
    layers = [m for m in model.modules() if isinstance(m, CachedAttention)]
    assert [m.options.pool for m in layers] == [4, 2, 1, 1] and all(m.memory.reduce is None for m in layers)
    assert all(m.position is not None for m in layers)
    first = layers[0]
    slots, x = torch.randn(1, 256, 4).double(), torch.randn(1, 5, 4).double()
    means = slots.view(1, 4, 4, 4, 4, 4).mean((2, 4)).view(1, 16, 4)  # cells of 4 x 4
    by_hand = MemoryAttention(4, 1).double()
    by_hand.load_state_dict(first.memory.state_dict())
    torch.testing.assert_close(first.memory(x, slots, (16, 16)), by_hand(x, means))


def test_swins_caches_are_pooled_by_stage() -> None:
    timm = pytest.importorskip("timm")
    swin = timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=64, window_size=4, embed_dim=12, depths=(1, 1, 1, 1), num_classes=2
    )
    weft.cache(swin, 0.5, position="conv", pool=[4, 2])
    found = [m.options.pool for m in swin.modules() if isinstance(m, CachedAttention)]
    assert found == [4, 2, 1, 1] and swin(torch.randn(2, 3, 64, 64)).shape == (2, 2)
