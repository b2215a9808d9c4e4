"""More attention layers of timm for `weft.swap`: Swin, Swin V2, PVT v2, EVA, DINOv3, BEiT, MaxViT, CoAtNet, Hiera,
MViT v2, CAFormer, NesT, DaViT, SAM 2, TinyViT, Next-ViT, FastViT, VOLO, Twins, TNT, Visformer and ViTs with relative
positions."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers.attention import AttentionRope
from timm.models.beit import Attention as BeitAttention
from timm.models.davit import WindowAttention as DavitAttention
from timm.models.eva import EvaAttention
from timm.models.fastvit import Attention as FastVitAttention
from timm.models.hiera import MaskUnitAttention
from timm.models.hieradet_sam2 import MultiScaleAttention as Sam2Attention
from timm.models.maxxvit import Attention2d, AttentionCl
from timm.models.metaformer import Attention as MetaformerAttention
from timm.models.mvitv2 import MultiScaleAttention, cal_rel_pos_type, reshape_post_pool, reshape_pre_pool
from timm.models.nest import Attention as NestAttention
from timm.models.nextvit import EfficientAttention
from timm.models.pvt_v2 import Attention as ReducedAttention
from timm.models.swin_transformer import WindowAttention
from timm.models.swin_transformer_v2 import WindowAttention as CosineAttention
from timm.models.tiny_vit import Attention as TinyVitAttention
from timm.models.tnt import Attention as TntAttention
from timm.models.twins import GlobalSubSampleAttn, LocallyGroupedAttn
from timm.models.visformer import Attention as VisformerAttention
from timm.models.vision_transformer_relpos import RelPosAttention
from timm.models.volo import Attention as VoloAttention
from torch import Tensor

from .added import add_layer


def of_projection(layer: Any) -> tuple[int, int]:
    return layer.num_heads, layer.proj.in_features // layer.num_heads


for _rotary in (EvaAttention, AttentionRope):
    add_layer(_rotary, shape=lambda layer: (layer.num_heads, layer.head_dim))
for _grid in (MetaformerAttention, FastVitAttention):
    add_layer(_grid, shape=lambda layer: (layer.num_heads, layer.head_dim), tokens=False)
add_layer(DavitAttention, shape=of_projection)
add_layer(VoloAttention, shape=of_projection, tokens=False)
add_layer(Sam2Attention, shape=of_projection, cross=lambda layer: layer.q_pool is not None, tokens=False)
for _reduced in (EfficientAttention, ReducedAttention):
    add_layer(_reduced, shape=of_projection, cross=lambda layer: layer.sr is not None)
add_layer(WindowAttention, shape=of_projection, bias=True)
add_layer(GlobalSubSampleAttn, shape=of_projection, cross=lambda layer: layer.sr is not None, tokens=False)
add_layer(
    TinyVitAttention,
    shape=of_projection,
    bias=True,
    refuse=lambda layer: "" if layer.val_dim == layer.key_dim else "its values are wider than its keys",
)
add_layer(RelPosAttention, shape=lambda layer: (layer.num_heads, layer.head_dim), bias=True)
add_layer(NestAttention, shape=of_projection, tokens=False)
for _cls in (Attention2d, AttentionCl):
    add_layer(
        _cls,
        shape=lambda layer: (layer.num_heads, layer.dim_head),
        bias=lambda layer: layer.rel_pos is not None,
        tokens=False,
    )
add_layer(
    BeitAttention,
    shape=of_projection,
    bias=lambda layer: layer.relative_position_bias_table is not None,
)
add_layer(
    MaskUnitAttention,
    shape=lambda layer: (layer.heads, layer.head_dim),
    cross=lambda layer: layer.q_stride > 1,
    tokens=False,
)


def tnt_attention(layer: Any, attend: Any, x: Tensor) -> Tensor:
    q, k = layer.qk(x).unflatten(-1, (2, layer.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    v = layer.v(x).unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)
    out = attend(q, k, v, dropout=layer.attn_drop.p)
    return layer.proj_drop(layer.proj(out.transpose(1, 2).flatten(2)))


add_layer(
    TntAttention,
    tnt_attention,
    shape=lambda layer: (layer.num_heads, layer.head_dim),
    refuse=lambda layer: "" if layer.v.out_features == layer.hidden_dim else "its values are not as wide as its keys",
)


def visformer_attention(layer: Any, attend: Any, x: Tensor) -> Tensor:
    qkv = layer.qkv(x).flatten(2).unflatten(1, (3, layer.num_heads, -1)).permute(1, 0, 2, 4, 3)
    out = attend(*qkv.unbind(0), dropout=layer.attn_drop.p)
    return layer.proj_drop(layer.proj(out.transpose(2, 3).flatten(1, 2).unflatten(2, x.shape[2:])))


add_layer(VisformerAttention, visformer_attention, shape=lambda layer: (layer.num_heads, layer.head_dim), tokens=False)


def grouped_attention(layer: Any, attend: Any, x: Tensor, size: tuple[int, int]) -> Tensor:
    """Twins: windows of `ws` × `ws` tokens, with zeros around an image that they do not divide."""
    (H, W), ws, C = size, layer.ws, x.shape[-1]
    x = F.pad(x.unflatten(1, size), (0, 0, 0, -W % ws, 0, -H % ws))
    grid = (x.shape[0], x.shape[1] // ws, x.shape[2] // ws)
    x = x.unflatten(2, (-1, ws)).unflatten(1, (-1, ws)).transpose(2, 3).reshape(-1, ws * ws, C)
    q, k, v = layer.qkv(x).unflatten(-1, (3, layer.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    out = attend(q, k, v, dropout=layer.attn_drop.p).transpose(1, 2).reshape(*grid, ws, ws, C)
    out = out.transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :H, :W].flatten(1, 2)
    return layer.proj_drop(layer.proj(out))


add_layer(LocallyGroupedAttn, grouped_attention, shape=of_projection, tokens=False)


def cosine_attention(layer: Any, attend: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Swin V2: logits are cosines of q and k, times a learned factor per head."""
    if layer.q_bias is None:
        qkv = layer.qkv(x)
    else:
        bias = torch.cat((layer.q_bias, layer.k_bias, layer.v_bias))
        qkv = layer.qkv(x) + bias if layer.qkv_bias_separate else F.linear(x, layer.qkv.weight, bias)
    q, k, v = qkv.unflatten(-1, (3, layer.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    factor = layer.logit_scale.clamp(max=math.log(100)).exp() * q.shape[-1] ** 0.5  # attend divides by √D
    table = layer.cpb_mlp(layer.relative_coords_table).view(-1, layer.num_heads)
    added = 16 * table[layer.relative_position_index].permute(2, 0, 1).sigmoid()[None]
    if mask is not None:  # of shifted windows: one per window of an image
        added = added + mask.repeat(x.shape[0] // mask.shape[0], 1, 1)[:, None]
    out = attend(F.normalize(q, dim=-1) * factor, F.normalize(k, dim=-1), v, added=added, dropout=layer.attn_drop.p)
    return layer.proj_drop(layer.proj(out.transpose(1, 2).flatten(2)))


add_layer(
    CosineAttention,
    cosine_attention,
    shape=lambda layer: (layer.num_heads, layer.dim // layer.num_heads),
    bias=True,
)


def multiscale_attention(layer: Any, attend: Any, x: Tensor, feat_size: list[int]) -> tuple[Tensor, list[int]]:
    """MViT v2: pooled queries, keys and values, and a bias that depends on the query."""
    parts = layer.qkv(x).unflatten(-1, (3, layer.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    pooled, sizes = [], []
    for name, part in zip("qkv", parts, strict=True):
        pool, norm, size = getattr(layer, f"pool_{name}"), getattr(layer, f"norm_{name}"), feat_size
        if pool is not None:
            part, cls_token = reshape_pre_pool(part, feat_size, layer.has_cls_token)
            part, size = reshape_post_pool(pool(part), layer.num_heads, cls_token)
        pooled.append(part if norm is None else norm(part))
        sizes.append(size)
    q, k, v = pooled
    added = None
    if layer.rel_pos_type == "spatial":
        zeros = q.new_zeros(*q.shape[:3], k.shape[2])
        rel_pos = (layer.rel_pos_h, layer.rel_pos_w)
        added = cal_rel_pos_type(zeros, q, layer.has_cls_token, sizes[0], sizes[1], *rel_pos)
    out = attend(q, k, v, added=added)
    out = out + q if layer.residual_pooling else out
    return layer.proj(out.transpose(1, 2).flatten(2)), sizes[0]


def _strides(pool: Any) -> Any:
    return (1, 1) if pool is None else pool.stride


add_layer(
    MultiScaleAttention,
    multiscale_attention,
    shape=lambda layer: (layer.num_heads, layer.head_dim),
    cross=lambda layer: _strides(layer.pool_q) != _strides(layer.pool_k),
    bias=lambda layer: layer.rel_pos_type == "spatial",
    tokens=False,
)
