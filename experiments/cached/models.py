"""The paper's image models, plain, with the gated recurrent cache, and with an attention-based cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import weft
from experiments.images import Make, timm_model
from weft.models.pvt import PVT, SpatialReductionAttention, pvt

TIMM = {
    "ViT-S": "vit_small_patch16_224",
    "Swin-T": "swin_tiny_patch4_window7_224",
    "PVTv2-B2": "pvt_v2_b2",
    "PVTv2-B3": "pvt_v2_b3",
    "PVTv2-B4": "pvt_v2_b4",
}


def plain(name: str) -> Make:
    if name.startswith("PVT-"):
        return lambda size, classes: pvt(name[4:].lower(), image_size=size, classes=classes)
    return timm_model(TIMM[name])


def cached(name: str, ratio: float = 0.5, **options: Any) -> Make:
    """A cache around every attention, as many slots as tokens, reduced as its attention reduces."""

    def make(size: int, classes: int) -> nn.Module:
        if name.startswith("PVT-"):
            return pvt(name[4:].lower(), cached=True, ratio=ratio, cache=options, image_size=size, classes=classes)
        model = plain(name)(size, classes)
        weft.cache(model, ratio, **{"memory_attention": "same", **options})
        return model

    return make


class PreviousStep(nn.Module):
    """An attention-based cache: in training, keys and values also from what the layer was fed a step before.

    For ViT the tokens are joined, for PVT the reduced tokens; rows of the batch are paired as they come. It keeps what
    every forward in training saw, so it does not go with activation checkpointing.
    """

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self.previous = inner, None

    def forward(self, x: Tensor, *size: Any, **masks: Any) -> Tensor:
        if any(mask is not None for mask in masks.values()):
            raise ValueError("pictures have no padding: the cache takes no mask")
        if not self.training:
            return self.inner(x, *size)
        before, self.previous = self.previous, x.detach()
        if before is None or before.shape != x.shape:
            return self.inner(x, *size)
        return both_steps(self.inner, x, before.to(x.dtype), *size)


def both_steps(inner: Any, x: Tensor, before: Tensor, size: Any = None) -> Tensor:
    """The layer's attention with queries from x and keys and values from [before; x]."""
    if isinstance(inner, SpatialReductionAttention):
        sources = []
        for tokens in (before, x):
            if inner.sr is not None and inner.norm is not None:
                tokens = inner.norm(inner.sr(tokens.transpose(1, 2).unflatten(2, size)).flatten(2).transpose(1, 2))
            sources.append(tokens)
        q = inner.q(x).unflatten(-1, (inner.heads, -1)).transpose(1, 2)
        k, v = inner.kv(torch.cat(sources, 1)).unflatten(-1, (2, inner.heads, -1)).permute(2, 0, 3, 1, 4)
        return inner.merge(nn.functional.scaled_dot_product_attention(q, k, v))
    heads = inner.num_heads  # timm's Attention
    q = inner.qkv(x).chunk(3, -1)[0].unflatten(-1, (heads, -1)).transpose(1, 2)
    k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in inner.qkv(torch.cat([before, x], 1)).chunk(3, -1)[1:])
    return inner.proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def attention_cached(name: str) -> Make:
    def make(size: int, classes: int) -> nn.Module:
        model = plain(name)(size, classes)
        blocks = (
            [b for s in range(1, 5) for b in getattr(model, f"block{s}")] if isinstance(model, PVT) else model.blocks
        )
        for block in blocks:
            block.attn = PreviousStep(block.attn)
        return model

    return make
