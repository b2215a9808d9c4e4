"""A Vision Transformer with any attention mechanism.

Dosovitskiy et al., An Image is Worth 16x16 Words, https://arxiv.org/abs/2010.11929

    x = W · patch + positions, with a learned CLS vector first if pooling is "cls"
    x = EncoderBlock_l(x), l = 1 … layers
    logits = W · pool(LN(x))
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..core.positions import Constant
from ..core.sharding import refuse
from ..layers import sinusoids
from ..layers.encoder import NORM_EPS
from .build import AttentionChoice, encoder_blocks


class Normalised(nn.Module):
    """Normalises images (bytes, or floats in [0, 1]) and calls `model`, with further arguments unchanged."""

    def __init__(self, model: nn.Module, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.model = model
        self.mean, self.std = (Constant(partial(_per_channel, tuple(values))) for values in (mean, std))

    def forward(self, images: Tensor, *args: Tensor) -> Tensor:
        return self.model(_normalise(images, self.mean(images.device), self.std(images.device)), *args)


class ImageClassifier(nn.Module):
    """`model(images)`: (B, 3, size, size), bytes or floats in [0, 1], to logits (B, classes)."""

    def __init__(
        self,
        size: int,
        classes: int,
        *,
        patch: int = 4,
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        std: Sequence[float] = (0.5, 0.5, 0.5),
        dim: int = 256,
        heads: int = 8,
        head_dim: int = 32,
        layers: int = 6,
        mlp_dim: int = 512,
        attention: AttentionChoice = "full",
        attention_options: dict[str, Any] | None = None,
        pooling: Literal["mean", "cls"] = "mean",
        positions: Literal["learned", "sinusoid"] = "learned",
        dropout: float = 0.0,
        attention_dropout: float | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if size % patch:
            raise ValueError(f"size={size} must be divisible by patch={patch}")
        if pooling not in ("mean", "cls"):
            raise ValueError(f"pooling must be 'mean' or 'cls', got {pooling!r}")
        if positions not in ("learned", "sinusoid"):
            raise ValueError(f"positions must be 'learned' or 'sinusoid', got {positions!r}")
        place = {"device": device, "dtype": dtype}
        self.size, self.patch = size, patch
        self.mean, self.std = (Constant(partial(_per_channel, tuple(values)), device) for values in (mean, std))
        length = (size // patch) ** 2 + (pooling == "cls")
        self.embed = nn.Linear(3 * patch * patch, dim, **place)
        self.cls = nn.Parameter(torch.zeros(dim, **place)) if pooling == "cls" else None
        self.positions: nn.Parameter | Constant
        if positions == "learned":
            self.positions = nn.Parameter(torch.empty(length, dim, **place).normal_(std=0.02))
        else:
            self.positions = Constant(partial(sinusoids, length, dim, dtype=torch.float64), device)
        self.dropout = nn.Dropout(dropout)
        self.blocks = encoder_blocks(
            layers,
            attention,
            dim,
            heads,
            options=attention_options,
            head_dim=head_dim,
            causal=False,
            max_length=length,
            mlp_dim=mlp_dim,
            dropout=dropout,
            attention_dropout=attention_dropout,
            place=place,
        )
        self.norm = nn.LayerNorm(dim, eps=NORM_EPS, **place)
        self.head = nn.Linear(dim, classes, **place)

    def forward(self, images: Tensor) -> Tensor:
        if images.dim() != 4 or images.shape[1:] != (3, self.size, self.size):
            raise ValueError(f"images must be (B, 3, {self.size}, {self.size}), got {tuple(images.shape)}")
        refuse("ImageClassifier")
        x = _normalise(images, self.mean(images.device), self.std(images.device))
        p, side = self.patch, self.size // self.patch
        x = torch.unflatten(torch.unflatten(x, 3, (side, p)), 2, (side, p))
        x = x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        x = self.embed(x.to(self.embed.weight.dtype))
        if self.cls is not None:
            x = torch.cat([self.cls.expand(x.shape[0], 1, -1), x], 1)
        positions = self.positions(x.device) if isinstance(self.positions, Constant) else self.positions
        x = self.dropout(x + positions.to(x.dtype))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x[:, 0] if self.cls is not None else x.mean(1))


def _normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    if not images.is_floating_point():
        images = images.to(mean.dtype) / 255
    return (images - mean) / std


def _per_channel(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values).view(1, -1, 1, 1)
