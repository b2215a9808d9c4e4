"""CRATE: a transformer in which every layer is a step of an explicit optimisation.

Yu et al., White-Box Transformers via Sparse Rate Reduction, https://arxiv.org/abs/2306.01129

    maximise R(Z) − Rᶜ(Z; U) − λ‖Z‖₀                      high rate, few subspaces, few non-zeros (eq 1)
    h  = z + MSSA(LN(z))                                  compress: a descent step on the coding rate Rᶜ (eqs 10, 18)
    z' = ISTA(LN(h))                                      sparsify: a proximal step in a dictionary (eq 17); no residual

`weft.inspect` measures this objective layer by layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..attention import attention_info
from ..core.contract import PositionBias, quiet_padding
from ..core.segments import Segments, documents_of
from ..core.sharding import refuse
from ..layers.ista import ISTA
from ..layers.mssa import MSSA

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"dim": 384, "heads": 6, "layers": 12},
    "small": {"dim": 576, "heads": 12, "layers": 12},
    "base": {"dim": 768, "heads": 12, "layers": 12},
    "large": {"dim": 1024, "heads": 16, "layers": 24},
}


class CRATELayer(nn.Module):
    """Compress, then sparsify: `layer(x, mask=None, bias=None)`, x (B, L, dim).

    `ista` has the options of `weft.ISTA`; the others are those of `weft.MSSA`. `kappa` uses the residual of eq 10,
    h = (1 − κγ) z + κγ MSSA(LN(z)), instead of eq 18's.
    """

    def __init__(
        self, dim: int, heads: int, *, kappa: float | None = None, ista: dict[str, Any] | None = None, **mssa: Any
    ):
        super().__init__()
        ista = dict(ista or {})
        if mssa.get("causal") and ista.get("variant") == "mm":
            raise ValueError("ISTA variant 'mm' counts later tokens too: use variant 'ista' for a causal layer")
        if kappa is not None and not mssa.get("tied"):
            raise ValueError(f"kappa={kappa} (the step of eq 10) needs the output map γU: set tied=True")
        place = {key: mssa[key] for key in ("device", "dtype") if key in mssa}
        self.norm1 = nn.LayerNorm(dim, **place)
        self.mssa = MSSA(dim, heads, **mssa)
        self.step = None if kappa is None else kappa * self.mssa.gamma
        self.norm2 = nn.LayerNorm(dim, **place)
        self.ista = ISTA(dim, **ista, **place)

    def compress(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        bias: PositionBias | None = None,
        *,
        segments: Tensor | Segments | None = None,
    ) -> Tensor:
        x = quiet_padding(x, mask)
        update = self.mssa(self.norm1(x), mask, bias, segments=segments)
        return x + update if self.step is None else (1 - self.step) * x + self.step * update

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        bias: PositionBias | None = None,
        *,
        segments: Tensor | Segments | None = None,
    ) -> Tensor:
        if segments is not None:
            segments = documents_of(segments, x)
            if self.ista.variant == "mm":
                raise ValueError("ISTA variant 'mm' counts the tokens of a row, so it does not support segments")
            x = quiet_padding(x, segments.mask)
        return self.ista(self.norm2(self.compress(x, mask, bias, segments=segments)), mask)


def crate_layers(layers: int, dim: int, heads: int, **options: Any) -> nn.ModuleList:
    """Identical layers, except that mechanisms with an option `seed` get a different seed in each layer."""
    drawn = attention_info(options.get("attention", "full")).options
    blocks = nn.ModuleList()
    for i in range(layers):
        own = {"seed": options.get("seed", drawn["seed"]) + i} if "seed" in drawn else {}
        blocks.append(CRATELayer(dim, heads, **{**options, **own}))
    return blocks


class Patches(nn.Module):
    """(B, C, height, width) -> (B, n, dim): row-major patches with channels last, then LN – linear – LN."""

    def __init__(self, image_size: int | tuple[int, int], patch: int, channels: int, dim: int):
        super().__init__()
        height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
        if height % patch or width % patch:
            raise ValueError(f"the image size {height} x {width} must be divisible by the patch size {patch}")
        self.shape, self.patch, self.grid = (channels, height, width), patch, (height // patch, width // patch)
        self.count, self.pixels = self.grid[0] * self.grid[1], channels * patch * patch
        self.embed = nn.Sequential(nn.LayerNorm(self.pixels), nn.Linear(self.pixels, dim), nn.LayerNorm(dim))

    def cut(self, images: Tensor) -> Tensor:
        """The patches, (B, n, pixels)."""
        if images.dim() != 4 or tuple(images.shape[1:]) != self.shape:
            raise ValueError(f"images must be (B, {', '.join(map(str, self.shape))}), got {tuple(images.shape)}")
        rows, columns = self.grid
        cells = torch.unflatten(torch.unflatten(images, 3, (columns, self.patch)), 2, (rows, self.patch))  # B C r p c p
        return cells.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)

    def forward(self, images: Tensor) -> Tensor:
        return self.embed(self.cut(images))


class CRATE(nn.Module):
    """Image classifier: images (B, C, height, width) -> logits (B, classes).

    `pooling` is "cls", or "mean" over all tokens including CLS. Further options go to every layer (see `CRATELayer`),
    for example `attention="subsampled"`, `tied`, `scale`, `ista={...}`.
    """

    def __init__(
        self,
        *,
        dim: int,
        heads: int,
        layers: int,
        classes: int = 1000,
        image_size: int | tuple[int, int] = 224,
        patch: int = 16,
        channels: int = 3,
        pooling: str = "cls",
        device: Any = None,
        dtype: torch.dtype | None = None,
        **layer: Any,
    ):
        super().__init__()
        if pooling not in ("cls", "mean"):
            raise ValueError(f"pooling must be 'cls' or 'mean', got {pooling!r}")
        self.pooling = pooling
        self.patches = Patches(image_size, patch, channels, dim)
        self.cls = nn.Parameter(torch.randn(1, 1, dim))
        self.positions = nn.Parameter(torch.randn(1, 1 + self.patches.count, dim))
        self.blocks = crate_layers(layers, dim, heads, **{"max_length": 1 + self.patches.count, **layer})
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)
        self.to(device=device, dtype=dtype)

    def features(self, images: Tensor) -> Tensor:
        """The last layer's tokens, (B, 1 + patches, dim), CLS first."""
        refuse("CRATE")
        x = self.patches(images)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, images: Tensor) -> Tensor:
        x = self.features(images)
        return self.head(self.norm(x[:, 0] if self.pooling == "cls" else x.mean(1)))

    def new_head(self, classes: int, *, probe: bool = False) -> CRATE:
        """Replace the head for another task, in place. With `probe`, freeze everything else (linear probing)."""
        weight = self.head.weight
        self.head = nn.Linear(self.head.in_features, classes, device=weight.device, dtype=weight.dtype)
        for p in self.parameters():
            p.requires_grad_(not probe)
        self.head.requires_grad_(True)
        return self


def crate(size: str = "tiny", **options: Any) -> CRATE:
    """A CRATE of a published size: "tiny", "small", "base" or "large". `options` of `CRATE` override its settings."""
    if size not in SIZES:
        raise ValueError(f"unknown CRATE size {size!r}; available: {', '.join(SIZES)}")
    return CRATE(**{**SIZES[size], **options})
