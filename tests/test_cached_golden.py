"""Cached attention and the cached pyramid against the authors' code: outputs, caches after each step, gradients."""

from __future__ import annotations

import math
import re

import golden
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from weft import CachedAttention, MultiheadAttention
from weft.models.pvt import PVT, PVTBlock, SpatialReductionAttention

Arrays = dict[str, np.ndarray]
TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}
RENAMED = {
    "attn_mem.q": "memory.q",
    "attn_mem.proj": "memory.out",
    "attn_mem.sr": "memory.reduce",
    "attn_mem.norm": "memory.norm",
    "linear_reset": "cache.reset_gate",
    "linear_update": "cache.update_gate",
    "linear_add": "cache.candidate",
    "Norm1": "cache.norm",
    "pos_emb": "position",
}


def tensor(a: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(a))


def weights(case: Arrays) -> dict[str, Tensor]:
    """The authors' parameters under our names."""
    ours: dict[str, Tensor] = {}
    for name, array in case.items():
        if not name.startswith("w/"):
            continue
        name, value = name[2:], tensor(array)
        if name.endswith("attn_mem.relative_position_index") or name.endswith("gr_cache"):
            continue
        if "attn_mem.relative_position_bias_table" in name:
            ours[name.replace("attn_mem.relative_position_bias_table", "memory.bias.table")] = value.T
        elif "attn_mem.kv" in name:
            for part, half in zip("kv", value.chunk(2), strict=True):
                ours[name.replace("attn_mem.kv", f"memory.{part}")] = half
        elif re.search(r"linear_(reset|update|add)\.weight$", name):  # [cache, tokens] there, [tokens, cache] here
            cache, tokens = value.chunk(2, 1)
            ours[renamed(name)] = torch.cat([tokens, cache], 1)
        else:
            ours[renamed(name)] = value
    return ours


def renamed(name: str) -> str:
    name = name.replace("attn_self_func.", "inner.")
    for old, new in RENAMED.items():
        name = re.sub(rf"(^|\.){re.escape(old)}\.", rf"\1{new}.", name)
    return name


def cached(inner: nn.Module, w: dict[str, Tensor], prefix: str, length: int) -> CachedAttention:
    """Our layer with the shape of the weights at `prefix`."""
    heads, dim = w[prefix + "lam"].shape[0], inner.dim if hasattr(inner, "dim") else 0
    width = w[prefix + "memory.q.weight"].shape[0]
    return CachedAttention(
        inner,
        width / dim,
        length,
        preset="authors",
        heads=heads,
        dim=dim,
        position="conv" if prefix + "position.weight" in w else "none",
        qkv_bias=prefix + "memory.q.bias" in w,
        prefix=int(math.isqrt(length) ** 2 != length),
    ).double()


def layer(case: Arrays) -> nn.Module:
    """The layer or the block of a case, with its weights."""
    w = weights(case)
    x = tensor(case["x_steps"][0] if "x_steps" in case else case["x"])
    T, D = x.shape[1:]
    if "norm1.weight" in w:  # a whole pyramid block
        reduction = w["attn.inner.sr.weight"].shape[-1] if "attn.inner.sr.weight" in w else 1
        heads = w["attn.lam"].shape[0]
        inner: nn.Module = SpatialReductionAttention(D, heads, reduction, "attn.inner.q.bias" in w).double()
        ratio = w["mlp.fc1.weight"].shape[0] / D
        made: nn.Module = PVTBlock(cached(inner, w, "attn.", T), D, ratio, eps=1e-5).double()
    elif "inner.relative_position_bias_table" in w:
        swin = pytest.importorskip("timm.models.swin_transformer", reason="the window layer is timm's")
        inner = swin.WindowAttention(D, w["lam"].shape[0], window_size=math.isqrt(T)).double()
        for kind in ("weight", "bias"):
            w[f"inner.qkv.{kind}"] = torch.cat([w.pop(f"inner.q.{kind}"), w.pop(f"inner.kv.{kind}")])
        index = w.pop("inner.relative_position_index")
        assert torch.equal(index, inner.relative_position_index)
        made = cached(inner, w, "", T)
    else:
        inner = MultiheadAttention(D, w["lam"].shape[0], qkv_bias="inner.q.bias" in w, out_bias=True).double()
        for kind in ("weight", "bias"):
            if f"inner.kv.{kind}" in w:
                w[f"inner.k.{kind}"], w[f"inner.v.{kind}"] = w.pop(f"inner.kv.{kind}").chunk(2)
            w[f"inner.out.{kind}"] = w.pop(f"inner.proj.{kind}")
        made = cached(inner, w, "", T)
    missing, unexpected = made.load_state_dict(w, strict=False)
    assert not unexpected and all(re.search(r"cache\.(cache|updates)$", name) for name in missing), (
        missing,
        unexpected,
    )
    return made


def call(made: nn.Module, x: Tensor, **kwargs: Tensor) -> Tensor:
    if isinstance(made, PVTBlock):
        side = math.isqrt(x.shape[1])
        return made(x, (side, side))
    return made(x, **kwargs)


def cache_of(made: nn.Module) -> Tensor:
    return (made.attn if isinstance(made, PVTBlock) else made).cache.cache


def steps(case: Arrays) -> list[tuple[Tensor, Tensor]]:
    if "x_steps" in case:
        return [(tensor(x), tensor(y)) for x, y in zip(case["x_steps"], case["y_steps"], strict=True)]
    found = sorted(name for name in case if re.fullmatch(r"y_step\d+", name))
    return [(tensor(case["x"]), tensor(case[name])) for name in found]


def layer_cases() -> list[tuple[str, str]]:
    return [(file, name) for file in ("grc.npz", "grc_pvt.npz") for name in golden.names(file)]


@pytest.mark.parametrize(("file", "name"), layer_cases())
def test_equals_the_authors_code(file: str, name: str) -> None:
    case = golden.case(file, name)
    if "img" in case:
        return whole_net(case)
    made = layer(case).train()
    for i, (x, y) in enumerate(steps(case)):
        torch.testing.assert_close(call(made, x), y, **TOLERANCE)
        if "cache_after_steps" in case:
            torch.testing.assert_close(cache_of(made), tensor(case["cache_after_steps"][i]), **TOLERANCE)
    for last in ("cache", "cache_after_2"):
        if last in case:
            torch.testing.assert_close(cache_of(made), tensor(case[last]), **TOLERANCE)
    if "grad_step/x" in case:
        gradient_step(made, case)
    evaluated(made, case)


def gradient_step(made: nn.Module, case: Arrays) -> None:
    kept = {name: value.clone() for name, value in made.state_dict().items()}
    x = tensor(case["grad_step/x"]).requires_grad_()
    loss = call(made, x).square().sum()
    loss.backward()
    torch.testing.assert_close(loss.detach(), tensor(case["grad_step/loss"]), **TOLERANCE)
    torch.testing.assert_close(x.grad, tensor(case["grad_step/dx"]), **TOLERANCE)
    made.load_state_dict(kept)


def evaluated(made: nn.Module, case: Arrays) -> None:
    made.eval()
    frozen = cache_of(made).clone()
    for name in case:
        if name.startswith("eval_x"):
            expected = tensor(case[name.replace("eval_x", "eval_y")])
            torch.testing.assert_close(call(made, tensor(case[name])), expected, **TOLERANCE)
    if "y_eval_masked" in case:  # windows that a shift has cut: a mask for the self branch only
        mask = tensor(case[next(name for name in case if name.startswith("mask_nW"))])
        made_y = call(made, tensor(case["x"]), mask=mask)
        torch.testing.assert_close(made_y, tensor(case["y_eval_masked"]), **TOLERANCE)
    assert torch.equal(cache_of(made), frozen)


def whole_net(case: Arrays) -> None:
    w = weights(case)
    stages = range(1, 5)
    dims = [w[f"patch_embed{s}.proj.weight"].shape[0] for s in stages]
    net = PVT(
        image_size=case["img"].shape[-1],
        channels=case["img"].shape[1],
        classes=w["head.weight"].shape[0],
        dims=dims,
        heads=[w[f"block{s}.0.attn.lam"].shape[0] for s in stages],
        mlp_ratios=[w[f"block{s}.0.mlp.fc1.weight"].shape[0] / d for s, d in zip(stages, dims, strict=True)],
        reductions=[w[key].shape[-1] if (key := f"block{s}.0.attn.inner.sr.weight") in w else 1 for s in stages],
        depths=[len({n.split(".")[1] for n in w if n.startswith(f"block{s}.")}) for s in stages],
        qkv_bias="block1.0.attn.inner.q.bias" in w,
        eps=1e-5,
        cache={
            "preset": "authors",
            "ratio": w["block1.0.attn.memory.q.weight"].shape[0] / dims[0],
            "position": "conv" if "block1.0.attn.position.weight" in w else "none",
            "qkv_bias": "block1.0.attn.memory.q.bias" in w,
        },
    ).double()
    missing, unexpected = net.load_state_dict(w, strict=False)
    assert not unexpected and all(re.search(r"cache\.(cache|updates)$", name) for name in missing)
    images = tensor(case["img"])
    for name in sorted(name for name in case if re.fullmatch(r"logits_step\d+", name)):
        torch.testing.assert_close(net(images), tensor(case[name]), **TOLERANCE)
    for name in case:
        if name.startswith("cache_after"):
            path = name.partition("/")[2].removesuffix(".gr_cache")
            torch.testing.assert_close(net.get_submodule(path).cache.cache, tensor(case[name]), **TOLERANCE)
    torch.testing.assert_close(net.eval()(images), tensor(case["logits_eval"]), **TOLERANCE)
