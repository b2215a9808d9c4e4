"""Table 2: a gated recurrent cache against an attention-based one, which keeps the previous step's tokens.

    weft sweep experiments/cached/table2.py --only "PVT-Tiny/*"

Cached Transformers, https://arxiv.org/abs/2312.12742; data and recipe are in hosts.py. The paper does not say
how the attention-based cache pairs samples: here row by row in consecutive batches, without a cache in evaluation.
"""

from __future__ import annotations

from typing import Any

import torch
from hosts import host
from torch import Tensor, nn

from weft.lab.sweep import Cell
from weft.models.pvt import PVT, SpatialReductionAttention
from weft.tasks import TrainConfig
from weft.tasks.imagenet import StoredImages

TITLE = "Table 2: the gated recurrent cache against an attention-based one"
METRIC = "accuracy"

PAPER = {"ViT-S": (79.9, 80.0, 81.3), "PVT-Tiny": (75.1, 74.8, 78.4), "PVT-Small": (79.9, 79.6, 81.8)}


class PreviousStep(nn.Module):
    """An attention-based cache: in training, the layer also attends to its inputs of the previous step.

    Concatenates the tokens (ViT) or the reduced tokens (PVT); rows are paired by their index in the batch. Stores the
    input of every training forward, so it does not support activation checkpointing. The first step after a resume has
    no previous step.
    """

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self.previous = inner, None

    def forward(self, x: Tensor, *size: Any, **masks: Any) -> Tensor:
        if any(isinstance(mask, Tensor) for mask in masks.values()):
            raise ValueError("images have no padding: the cache does not support masks")
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


class AttentionCached(StoredImages):
    """ImageNet with the attention-based cache in every attention layer."""

    defaults = {**StoredImages.defaults, "model": "pvt-tiny"}

    def check(self, config: TrainConfig) -> None:
        if not config.model.startswith(("pvt-", "timm:vit")):
            raise ValueError(f"{self.name} supports --model pvt-SIZE or timm:vit…; got {config.model!r}")

    def host(self, config: TrainConfig, size: int, classes: int) -> nn.Module:
        model: Any = super().host(config, size, classes)
        pyramid = isinstance(model, PVT)
        for block in [b for s in range(1, 5) for b in getattr(model, f"block{s}")] if pyramid else model.blocks:
            block.attn = PreviousStep(block.attn)
        return model


TASKS = [AttentionCached("imagenet-previous-step", "ImageNet-1k (image-net.org)", "imagenet")]


def cells() -> list[Cell]:
    found = []
    for name, (plain, attention, recurrent) in PAPER.items():
        found.append(Cell(name, "no cache", host(name), plain))
        previous = host(name, task="imagenet-previous-step")
        found.append(Cell(name, "attention-based cache", previous, attention))
        found.append(Cell(name, "gated recurrent cache", host(name, 0.5), recurrent))
    return found
