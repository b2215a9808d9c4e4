"""The memory branch of cached attention: every token attends to the slots of a cache.

Zhang et al., Cached Transformers, https://arxiv.org/abs/2312.12742, equation 3

    o_mem = softmax(Q̄ K̄ᵀ / √(D_m / H)) V̄          Q̄ = X̄ W̄_q, K̄ = C W̄_k, V̄ = C W̄_v, all D_m wide
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...attention import Attention, make_attention
from ...core.positions import RelativeBias2d
from ..multihead import MultiheadAttention


class MemoryAttention(nn.Module):
    """`branch(x, slots)` -> (B, T, H, width / H), x (B, T, width), slots (1 or B, T_m, width).

    `reduction` treats the cache as an image, shrinks it with a strided convolution and normalises it, as
    spatial-reduction attention does with its tokens; `pool` averages cells of the image instead. `window` adds a
    relative position bias for tokens and slots of an h x w window. `mechanism` replaces full attention. `project` adds
    a separate output projection.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        project: bool = False,
        qkv_bias: bool = False,
        out_bias: bool = False,
        reduction: int = 1,
        pool: int = 1,
        window: tuple[int, int] | None = None,
        mechanism: Attention | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        place = {"device": device, "dtype": dtype}
        self.heads, self.reduction, self.pool, self.window = heads, reduction, pool, window
        self.q = nn.Linear(width, width, bias=qkv_bias, **place)
        self.k = nn.Linear(width, width, bias=qkv_bias, **place)
        self.v = nn.Linear(width, width, bias=qkv_bias, **place)
        self.out = nn.Linear(width, width, bias=out_bias, **place) if project else None
        self.attention = mechanism or make_attention("full", heads=heads, head_dim=width // heads)
        self.attention.to(device=device, dtype=dtype)
        if (self.attention.heads, self.attention.head_dim, self.attention.causal) != (heads, width // heads, False):
            raise ValueError(
                f"the cached branch needs a non-causal mechanism with heads={heads}, head_dim={width // heads}; "
                f"got {self.attention.name} with heads={self.attention.heads}, head_dim={self.attention.head_dim}, "
                f"causal={self.attention.causal}"
            )
        self.reduce: nn.Conv2d | None = None
        if reduction > 1:
            self.reduce = nn.Conv2d(width, width, reduction, stride=reduction, **place)
            self.norm = nn.LayerNorm(width, **place)
        self.bias = RelativeBias2d(heads, *window).to(device=device, dtype=dtype) if window else None

    def forward(self, x: Tensor, slots: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        slots = slots.to(x.dtype)
        if self.reads_image:
            if grid is None or grid[0] * grid[1] != slots.shape[1]:
                raise ValueError(f"{slots.shape[1]} slots do not form an image of {grid}: set grid=(height, width)")
            image = torch.unflatten(slots.transpose(1, 2), 2, grid)
            if self.reduce is not None:
                slots = self.norm(self.reduce(image).flatten(2).transpose(1, 2))
            else:  # cells that do not fill a whole pool are averaged too
                slots = F.avg_pool2d(image, self.pool, ceil_mode=True).flatten(2).transpose(1, 2)
        if self.bias is not None and not x.shape[1] == slots.shape[1] == self.bias.height * self.bias.width:
            raise ValueError(
                f"the windows are {self.bias.height} x {self.bias.width}, but there are {x.shape[1]} tokens and "
                f"{slots.shape[1]} slots"
            )
        q = self._split(self.q(x))
        k, v = (self._split(t).expand(x.shape[0], -1, -1, -1) for t in (self.k(slots), self.v(slots)))
        out = self.attention(q, k, v, None, self.bias).transpose(1, 2)
        if self.out is None:
            return out
        return torch.unflatten(self.out(out.flatten(2)), 2, (self.heads, -1))

    @property
    def reads_image(self) -> bool:
        """Whether the slots are shrunk as an image, whose size the call must give."""
        return self.reduce is not None or self.pool > 1

    def _split(self, x: Tensor) -> Tensor:
        return torch.unflatten(x, -1, (self.heads, -1)).transpose(1, 2)


def same_as(inner: nn.Module, width: int, heads: int) -> dict[str, Any]:
    """Options that make the cached branch attend like `inner`: its mechanism, spatial reduction or windows."""
    if isinstance(inner, MultiheadAttention):
        mechanism = inner.attention
        ready = f"weft.make_attention({mechanism.name!r}, heads={heads}, head_dim={width // heads}, …)"
        if mechanism.options is None:
            raise ValueError(
                f"cannot copy {mechanism.name}: it was not created by weft.make_attention, so its options are unknown; "
                f"set memory_attention={ready}"
            )
        made = make_attention(
            mechanism.name, heads=heads, head_dim=width // heads, max_length=mechanism.max_length, **mechanism.options
        )
        if getattr(made, "needs_input", False):
            raise ValueError(
                f"{mechanism.name} with {mechanism.options} reads the input of its layer, which a cache does not have: "
                "use memory_attention='full', or another mechanism"
            )
        return {"mechanism": made}
    if getattr(inner, "pool", None) is not None:
        raise ValueError("memory_attention='same' does not support layers that pool their keys: use 'full'")
    found: dict[str, Any] = {}
    reduce = getattr(inner, "sr", None)
    if isinstance(reduce, nn.Conv2d):
        found["reduction"] = reduce.kernel_size[0]
    window: Any = getattr(inner, "window_size", None)
    if hasattr(inner, "relative_position_bias_table"):
        found["window"] = tuple(window)
    return found
