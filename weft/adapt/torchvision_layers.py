"""torchvision's Swin and Swin V2 for `weft.swap`."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.models.swin_transformer import ShiftedWindowAttention, ShiftedWindowAttentionV2

from .added import add_layer


def shifted_windows(layer: Any, attend: Any, x: Tensor) -> Tensor:
    """`torchvision.models.swin_transformer.shifted_window_attention` with another core."""
    (height, width), heads = layer.window_size, layer.num_heads
    B, H, W, C = x.shape
    x = F.pad(x, (0, 0, 0, -W % width, 0, -H % height))
    rows, columns = x.shape[1] // height, x.shape[2] // width
    # A window that covers an axis needs no shift along it.
    shift = [layer.shift_size[0] if rows > 1 else 0, layer.shift_size[1] if columns > 1 else 0]

    def windows(t: Tensor) -> Tensor:
        """(B, rows * height, columns * width, C) -> (B * rows * columns, height * width, C)."""
        t = t.unflatten(2, (columns, width)).unflatten(1, (rows, height))
        return t.transpose(2, 3).flatten(3, 4).flatten(0, 2)

    tokens = windows(x.roll((-shift[0], -shift[1]), (1, 2)))
    bias, cosine = layer.qkv.bias, isinstance(layer, ShiftedWindowAttentionV2)
    if cosine and bias is not None:
        bias = torch.cat([bias[:C], torch.zeros_like(bias[:C]), bias[2 * C :]])
    q, k, v = F.linear(tokens, layer.qkv.weight, bias).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    if cosine:  # attend divides by √D
        factor = layer.logit_scale.clamp(max=math.log(100)).exp() * q.shape[-1] ** 0.5
        q, k = F.normalize(q, dim=-1) * factor, F.normalize(k, dim=-1)
    added = layer.get_relative_position_bias()
    if any(shift):
        # Tokens from opposite edges of the image, joined by the shift, don't see each other.
        i, j = (torch.arange(n, device=x.device) for n in x.shape[1:3])
        region_i = (i >= len(i) - height).int() + (i >= len(i) - shift[0]).int() * bool(shift[0])
        region_j = (j >= len(j) - width).int() + (j >= len(j) - shift[1]).int() * bool(shift[1])
        region = windows((3 * region_i[:, None] + region_j)[None, :, :, None])
        apart = (region != region.mT)[:, None].repeat(B, 1, 1, 1)
        added = added + torch.where(apart, -100.0, 0.0)
    out = attend(q, k, v, added=added, dropout=layer.attention_dropout).transpose(1, 2).flatten(2)
    out = F.dropout(F.linear(out, layer.proj.weight, layer.proj.bias), layer.dropout, layer.training)
    out = out.unflatten(1, (height, width)).unflatten(0, (B, rows, columns)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return out.roll((shift[0], shift[1]), (1, 2))[:, :H, :W].contiguous()


for _cls in (ShiftedWindowAttention, ShiftedWindowAttentionV2):
    add_layer(
        _cls,
        shifted_windows,
        shape=lambda layer: (layer.num_heads, layer.proj.in_features // layer.num_heads),
        bias=True,
        tokens=False,
    )
