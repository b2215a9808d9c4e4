"""Chunked sums over the past: the causal form of attention with feature maps.

    num_i = Σ_{j ≤ i} (a_i · b_j) e^{g_j - G_i} v_j          G_i = max_{j ≤ i} g_j

With g = 0 this is plain linear attention. If the key features are exponentials, the scale g keeps them relative to
the running maximum, so nothing overflows and nothing depends on the future.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .blocks import ceil_div, pad_length


def causal_sum(a: Tensor, b: Tensor, v: Tensor, g: Tensor | None = None, *, chunk: int = 64) -> Tensor:
    """a, b (B, H, L, F), v (B, H, L, D), g (B, H, L) -> (B, H, L, D). Time and memory are linear in L."""
    B, H, L, _ = a.shape
    c = min(chunk, L)
    n = ceil_div(L, c)
    a, b, v = (torch.unflatten(pad_length(x, n * c), 2, (n, c)) for x in (a, b, v))
    past = torch.ones(c, c, dtype=torch.bool, device=a.device).tril()
    inside = (a @ b.transpose(-1, -2)).masked_fill(~past, 0)
    if g is None:
        states = b.transpose(-1, -2) @ v  # (B, H, n, F, D): the contribution of each chunk
        # Not `cumsum - states`: gradients of queries without keys are large and would not cancel fully in float32.
        before = F.pad(states[:, :, :-1].cumsum(2), (0, 0, 0, 0, 1, 0))
        out = inside @ v + a @ before
        return out.flatten(2, 3)[:, :, :L]

    g = torch.unflatten(F.pad(g, (0, n * c - L), value=float("-inf")), 2, (n, c))
    top = torch.unflatten(g.flatten(2).cummax(-1).values, 2, (n, c))
    top = torch.where(top.isfinite(), top, 0)  # no scale before the first real key
    end = top[..., -1]
    start = torch.cat([end[..., :1], end[..., :-1]], -1)  # where the previous chunk ended
    added = (b * (g - end[..., None]).exp()[..., None]).transpose(-1, -2) @ v
    fade = (start - end).clamp(max=0).exp()
    state, carried = torch.zeros_like(added[:, :, 0]), []
    # Not by index: the backward of each index would fill a tensor of the size of all chunks.
    for kept, new in zip(fade[..., None, None].unbind(2), added.unbind(2), strict=True):
        carried.append(state)
        state = state * kept + new
    near = (g[..., None, :] - top[..., :, None]).masked_fill(~past, float("-inf")).exp()
    far = (start[..., None] - top).clamp(max=0).exp()[..., None]
    out = (inside * near) @ v + (a * far) @ torch.stack(carried, 2)
    return out.flatten(2, 3)[:, :, :L]
