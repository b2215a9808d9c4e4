"""The masked autoencoder of CRATE: an encoder of CRATE layers and a decoder of reversed CRATE layers.

Yu et al., White-Box Transformers via Sparse Rate Reduction, https://arxiv.org/abs/2306.01129 (the layers);
He et al., Masked Autoencoders Are Scalable Vision Learners, https://arxiv.org/abs/2111.06377 (the loss)

    encoder  h = z + MSSA(LN(z)),  z' = ISTA(LN(h))            masked patches become mask tokens; none is dropped
    decoder  y = LN(z) Aᵀ,         z' = y − MSSA(LN(y))
    loss     mean over masked patches of (prediction − patch)², each patch normalised by its own mean and deviation
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..core.positions import Constant, sinusoids
from ..core.sharding import refuse
from ..layers.mssa import MSSA
from .crate import CRATE, Patches, crate_layers


class CRATEDecoderLayer(nn.Module):
    """A reversed CRATE layer: first the dictionary, then a step away from the subspaces."""

    def __init__(self, dim: int, heads: int, **mssa: Any):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.dictionary = nn.Linear(dim, dim, bias=False)
        self.norm2 = nn.LayerNorm(dim)
        self.mssa = MSSA(dim, heads, **mssa)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dictionary(self.norm1(x))
        return y - self.mssa(self.norm2(y))


class CRATEMAE(nn.Module):
    """`loss, prediction, hidden = model(images)`: the prediction is (B, patches, pixels), `hidden` True where masked.

    `hidden` (B, patches) is optional; by default, a fraction `ratio` of the patches is drawn for each image.
    `classifier(classes)` returns a CRATE initialised with the encoder's weights.
    """

    def __init__(
        self,
        *,
        dim: int,
        heads: int,
        layers: int,
        decoder_layers: int | None = None,
        image_size: int | tuple[int, int] = 224,
        patch: int = 16,
        channels: int = 3,
        ratio: float = 0.75,
        ista: dict[str, Any] | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **mssa: Any,
    ):
        super().__init__()
        if not 0 < ratio < 1:
            raise ValueError(f"ratio is the fraction of patches to hide and must be between 0 and 1, got {ratio}")
        if dim % 4:
            raise ValueError(f"dim must be divisible by 4 (sine and cosine of row and column), got {dim}")
        self.ratio = ratio
        self.patches = Patches(image_size, patch, channels, dim)
        self.positions = Constant(partial(_positions, self.patches.grid, dim))
        self.cls = nn.Parameter(torch.empty(1, 1, dim))
        self.hidden_token = nn.Parameter(torch.empty(1, 1, dim))
        mssa = {"max_length": 1 + self.patches.count, **mssa}
        ista = {"threshold": 0.5, **(ista or {})}
        self._recipe = dict(dim=dim, heads=heads, layers=layers, patch=patch, channels=channels, ista=ista, **mssa)
        self._recipe["image_size"] = image_size
        self.blocks = crate_layers(layers, dim, heads, ista=ista, **mssa)
        decoder_layers = layers if decoder_layers is None else decoder_layers
        self.decoder = nn.ModuleList(CRATEDecoderLayer(dim, heads, **mssa) for _ in range(decoder_layers))
        self.norm = nn.LayerNorm(dim)
        self.pixels = nn.Linear(dim, self.patches.pixels)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for layer in self.decoder:  # as the encoder's dictionaries; with smaller values, all tokens become equal
            nn.init.kaiming_uniform_(layer.get_parameter("dictionary.weight"))
        for token in (self.cls, self.hidden_token):
            nn.init.normal_(token, std=0.02)
        self.to(device=device, dtype=dtype)

    def encode(self, images: Tensor, hidden: Tensor | None = None) -> Tensor:
        """The encoder's tokens, (B, 1 + patches, dim), CLS first. The mask token replaces hidden patches."""
        refuse("CRATEMAE")
        x = self.patches(images)
        if hidden is not None:
            # To compile this on a GPU, torch 2.11 needs options={"triton.mix_order_reduction": False}, as in the lab:
            # its default gives the token a gradient of shape (dim,), and autograd raises an error
            # (https://github.com/pytorch/pytorch/issues/178080).
            x = torch.where(hidden[..., None], self.hidden_token.to(x.dtype), x)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.positions(x.device)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, images: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        target = normalise(self.patches.cut(images))
        if hidden is None:
            hidden = random_patches(images.shape[0], self.patches.count, self.ratio, images.device)
        elif hidden.dtype != torch.bool or hidden.shape != target.shape[:2]:
            raise ValueError(f"hidden must be boolean {tuple(target.shape[:2])}, got {hidden.dtype} {hidden.shape}")
        elif not torch.compiler.is_compiling() and not hidden.any():  # waits for the device
            raise ValueError("hidden must have at least one True: the loss is the mean over hidden patches")
        x = self.encode(images, hidden)
        for block in self.decoder:
            x = block(x)
        prediction = self.pixels(self.norm(x[:, 1:]))
        error = (prediction - target).pow(2).mean(-1)
        return error.masked_fill(~hidden, 0).sum() / hidden.sum(), prediction, hidden

    def classifier(self, classes: int, **options: Any) -> CRATE:
        """A CRATE with a copy of the encoder, for fine-tuning or probing (`new_head(..., probe=True)`)."""
        model = CRATE(**{**self._recipe, "classes": classes, **options}).to(self.cls)
        shared = {k: v for k, v in self.state_dict().items() if k.startswith(("patches.", "blocks.", "cls"))}
        shared["positions"] = self.positions(self.cls.device)
        left = model.load_state_dict(shared, strict=False)
        assert not left.unexpected_keys and all(k.startswith(("norm.", "head.")) for k in left.missing_keys)
        return model


def random_patches(
    batch: int, count: int, ratio: float, device: torch.device, generator: torch.Generator | None = None
) -> Tensor:
    """Boolean (batch, count), True for a random fraction `ratio` of each row: at least one, never all."""
    n = min(max(round(ratio * count), 1), max(count - 1, 1))
    order = torch.rand(batch, count, device=device, generator=generator).argsort(1)
    return torch.zeros(batch, count, dtype=torch.bool, device=device).scatter(1, order[:, :n], True)


def normalise(patches: Tensor) -> Tensor:
    """Normalise each patch by its mean and standard deviation."""
    variance, mean = torch.var_mean(patches, -1, keepdim=True)
    return (patches - mean) / (variance + 1e-6).sqrt()


def _positions(grid: tuple[int, int], dim: int) -> Tensor:
    """Sinusoids of the row in half of the channels, of the column in the other half; zeros for CLS."""
    rows, columns = grid
    row = sinusoids(rows, dim // 2)[:, None].expand(rows, columns, -1)
    column = sinusoids(columns, dim // 2)[None].expand(rows, columns, -1)
    table = torch.cat([row, column], -1).flatten(0, 1)
    return torch.cat([table.new_zeros(1, dim), table])[None]
