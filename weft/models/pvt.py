"""Pyramid Vision Transformer, plain and cached.

Wang et al., Pyramid Vision Transformer: A Versatile Backbone for Dense Prediction without Convolutions,
https://arxiv.org/abs/2102.12122; cached: Zhang et al., Cached Transformers, https://arxiv.org/abs/2312.12742

Four stages. Each cuts its input into patches (strides 4, 2, 2, 2), adds learned positions and runs pre-norm blocks.
A strided convolution (8, 4, 2, 1) shrinks the image of tokens for keys and values. The last stage adds a class token.
Parameter names are those of the published models, so their weights load.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.softmax import softmax_attention
from ..layers.cached import CachedAttention

DEPTHS = {"tiny": (2, 2, 2, 2), "small": (3, 4, 6, 3), "medium": (3, 4, 18, 3), "large": (3, 8, 27, 3)}


class SpatialReductionAttention(nn.Module):
    """softmax(Q Kᵀ / √d) V with keys and values from LN(conv(x)), which shrinks each side by `reduction`."""

    def __init__(self, dim: int, heads: int, reduction: int = 1, qkv_bias: bool = True):
        super().__init__()
        if heads < 1 or dim % heads:
            raise ValueError(f"dim={dim} must be divisible by heads={heads}")
        self.dim, self.heads = dim, heads
        self.q = nn.Linear(dim, dim, bias=qkv_bias)
        self.kv = nn.Linear(dim, 2 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.sr = nn.Conv2d(dim, dim, reduction, stride=reduction) if reduction > 1 else None
        self.norm = nn.LayerNorm(dim) if reduction > 1 else None

    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        return self.merge(self.per_head(x, feat_size))

    def per_head(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        """The heads before the output projection, (B, H, T, d), for cached attention."""
        q = torch.unflatten(self.q(x), -1, (self.heads, -1)).transpose(1, 2)
        source = x
        if self.sr is not None and self.norm is not None:
            image = torch.unflatten(x.transpose(1, 2), 2, feat_size)
            source = self.norm(self.sr(image).flatten(2).transpose(1, 2))
        k, v = torch.unflatten(self.kv(source), -1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.attend(q, k, v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return softmax_attention(q, k, v)

    def merge(self, heads: Tensor) -> Tensor:
        return self.proj(heads.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class PVTBlock(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)); `drop_path` drops a branch for whole samples."""

    def __init__(self, attn: nn.Module, dim: int, mlp_ratio: float, eps: float = 1e-6, drop_path: float = 0.0):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=eps), nn.LayerNorm(dim, eps=eps)
        self.attn, self.mlp, self.drop_path = attn, MLP(dim, int(dim * mlp_ratio)), drop_path

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        x = x + self._drop(self.attn(self.norm1(x), size))
        return x + self._drop(self.mlp(self.norm2(x)))

    def _drop(self, branch: Tensor) -> Tensor:
        if not self.training or self.drop_path == 0.0:
            return branch
        kept = torch.rand(branch.shape[0], 1, 1, device=branch.device) >= self.drop_path
        return branch * kept / (1 - self.drop_path)


class PatchEmbedding(nn.Module):
    def __init__(self, channels: int, dim: int, patch: int):
        super().__init__()
        self.proj = nn.Conv2d(channels, dim, patch, stride=patch)
        self.norm = nn.LayerNorm(dim)

    def forward(self, image: Tensor) -> tuple[Tensor, tuple[int, int]]:
        image = self.proj(image)
        return self.norm(image.flatten(2).transpose(1, 2)), (image.shape[2], image.shape[3])


class PVT(nn.Module):
    """`model(images)` -> logits. `cache={...}` wraps every attention in `weft.CachedAttention` with these options.

    A cache has as many slots as its stage has tokens at `image_size`. For other sizes, positions are interpolated and
    caches are resampled.
    """

    def __init__(
        self,
        *,
        image_size: int = 224,
        channels: int = 3,
        classes: int = 1000,
        dims: Sequence[int] = (64, 128, 320, 512),
        heads: Sequence[int] = (1, 2, 5, 8),
        mlp_ratios: Sequence[float] = (8, 8, 4, 4),
        reductions: Sequence[int] = (8, 4, 2, 1),
        depths: Sequence[int] = DEPTHS["tiny"],
        drop_path: float = 0.0,
        qkv_bias: bool = True,
        eps: float = 1e-6,
        cache: dict[str, Any] | None = None,
    ):
        super().__init__()
        if image_size % 32:
            raise ValueError(f"image_size must be a multiple of 32, got {image_size}")
        rates = torch.linspace(0, drop_path, sum(depths), device="cpu").tolist()
        side = image_size
        pools = (cache or {}).get("pool")  # one factor per stage
        for stage in range(4):
            patch = 4 if stage == 0 else 2
            side //= patch
            prefix = int(stage == 3)
            dim = dims[stage]
            blocks = []
            for _ in range(depths[stage]):
                attn: nn.Module = SpatialReductionAttention(dim, heads[stage], reductions[stage], qkv_bias)
                if cache is not None:
                    options = {"position": "conv", "memory_attention": "full" if pools else "same", **cache}
                    if pools:
                        options["pool"] = pools[stage] if stage < len(pools) else 1
                    attn = CachedAttention(attn, grid=(side, side), prefix=prefix, **options)
                blocks.append(PVTBlock(attn, dim, mlp_ratios[stage], eps, rates.pop(0)))
            setattr(self, f"patch_embed{stage + 1}", PatchEmbedding(channels, dim, patch))
            setattr(self, f"pos_embed{stage + 1}", nn.Parameter(torch.zeros(1, side * side + prefix, dim)))
            setattr(self, f"block{stage + 1}", nn.ModuleList(blocks))
            channels = dim
        self.side = side  # of the last stage's image
        self.cls_token = nn.Parameter(torch.zeros(1, 1, channels))
        self.norm = nn.LayerNorm(channels, eps=eps)
        self.head = nn.Linear(channels, classes)
        for name, parameter in self.named_parameters():
            if name.startswith("pos_embed") or name == "cls_token":
                nn.init.trunc_normal_(parameter, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.stages(images)[-1])[:, 0])

    def stages(self, images: Tensor) -> list[Tensor]:
        """The tokens after each stage, (B, h w, dim); in the last stage, the class token comes first."""
        if images.dim() != 4 or images.shape[2] % 32 or images.shape[3] % 32:
            raise ValueError(
                f"images must be (B, channels, h, w) with h and w multiples of 32, got {tuple(images.shape)}"
            )
        found = []
        for stage in range(1, 5):
            x, size = getattr(self, f"patch_embed{stage}")(images)
            positions = self._positions(stage, size)
            if stage == 4:
                x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1)
            x = x + positions
            for block in getattr(self, f"block{stage}"):
                x = block(x, size)
            found.append(x)
            if stage < 4:
                images = torch.unflatten(x.transpose(1, 2), 2, size)
        return found

    def _positions(self, stage: int, size: tuple[int, int]) -> Tensor:
        table = getattr(self, f"pos_embed{stage}")
        side = self.side * 2 ** (4 - stage)
        if size == (side, side):
            return table
        prefix = table.shape[1] - side * side
        image = torch.unflatten(table[:, prefix:].transpose(1, 2), 2, (side, side))
        resized = F.interpolate(image, size=size, mode="bilinear").flatten(2).transpose(1, 2)
        return torch.cat([table[:, :prefix], resized], 1)

    def group_matcher(self, coarse: bool = False) -> Callable[[str], tuple[int, int]]:
        """Order of a parameter's layer, for timm's layer decay: the first patches, the blocks, then the head."""

        def order(name: str) -> tuple[int, int]:
            found = re.match(r"(block|patch_embed|pos_embed)(\d)(\.\d+)?", name)
            if not found:
                return (4, 0) if name == "cls_token" else (5, 0)
            kind, stage, block = found[1], int(found[2]), int((found[3] or ".0")[1:])
            return (0, 0) if stage == 1 and kind != "block" else (stage, block if kind == "block" else 0)

        return order

    def no_weight_decay(self) -> set[str]:
        """Parameters without weight decay: positions, the class token, and λ (decay would pull σ(λ) to ½)."""
        names = [name for name, _ in self.named_parameters()]
        return {n for n in names if n.startswith("pos_embed") or n == "cls_token" or n.endswith(".lam")}


def pvt(
    size: str = "tiny",
    *,
    cached: bool = False,
    ratio: float = 0.5,
    preset: str = "paper",
    cache: dict[str, Any] | None = None,
    **options: Any,
) -> PVT:
    """PVT-Tiny, Small, Medium or Large; `cached` adds the gated recurrent cache to every attention layer."""
    if size not in DEPTHS:
        raise ValueError(f"unknown PVT size {size!r}; available: {', '.join(DEPTHS)}")
    if not cached and cache is not None:
        raise ValueError("cache= has options of cached attention: set cached=True too")
    settings = {"ratio": ratio, "preset": preset, **(cache or {})} if cached else None
    return PVT(depths=DEPTHS[size], cache=settings, **options)
