"""The output projection of a layer from another library, before which the heads are mixed.

`CachedAttention` mixes heads before the output projection (equation 2 of the paper). Layers of timm, transformers and
PyTorch return their output after it, so a hook on the projection module changes the heads on their way in.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NAMES = ("proj", "out_proj", "o_proj", "out", "dense", "c_proj", "out_lin", "o", "to_out", "wo")
LIBRARIES = ("torch.nn.", "timm.", "transformers.")  # their projections read whole heads in order


def output_projection(inner: nn.Module, heads: int) -> nn.Module | None:
    """The module that projects the joined heads of `inner`; None if there is none under a usual name."""
    for name in NAMES:
        found = getattr(inner, name, None)
        width = channels_in(found)
        if width is not None and width % heads == 0:
            return found
    return None


def channels_in(projection: Any) -> int | None:
    """Input channels of a linear layer, or of transformers' Conv1D, whose weight is transposed."""
    if isinstance(projection, nn.Linear):
        return projection.in_features
    return projection.weight.shape[0] if hasattr(projection, "nf") else None


def is_known(inner: nn.Module) -> bool:
    """Whether the layer is from a library whose layout of heads is known."""
    return any(f"{cls.__module__}.".startswith(LIBRARIES) and cls is not nn.Module for cls in type(inner).__mro__)


def returns_heads(inner: nn.Module) -> bool:
    """Whether a layer without an output projection returns its heads: in BERT, the next module projects them."""
    return any(cls.__module__.startswith("transformers.") for cls in type(inner).__mro__)


def call(inner: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call the layer such that it calls its output projection as a module.

    `nn.MultiheadAttention` reads the projection's weights instead. So its function gets the identity as projection
    (one extra D x D product, which changes no value), and the projection is applied to the result.
    """
    if type(inner).forward is not nn.MultiheadAttention.forward:
        return inner(x, *args, **kwargs)
    return _call_torch(inner, x, *args, **kwargs)


def _call_torch(
    inner: Any,
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    key, value = query if key is None else key, query if value is None else value
    separate = not inner._qkv_same_embed_dim
    query, key, value = (t.transpose(0, 1) for t in (query, key, value))
    heads, weights = F.multi_head_attention_forward(
        query,
        key,
        value,
        inner.embed_dim,
        inner.num_heads,
        inner.in_proj_weight,
        inner.in_proj_bias,
        inner.bias_k,
        inner.bias_v,
        inner.add_zero_attn,
        inner.dropout,
        torch.eye(inner.embed_dim, dtype=query.dtype, device=query.device),
        None,
        training=inner.training,
        key_padding_mask=key_padding_mask,
        need_weights=need_weights,
        attn_mask=attn_mask,
        use_separate_proj_weight=separate,
        q_proj_weight=inner.q_proj_weight if separate else None,
        k_proj_weight=inner.k_proj_weight if separate else None,
        v_proj_weight=inner.v_proj_weight if separate else None,
        average_attn_weights=average_attn_weights,
        is_causal=is_causal,
    )
    return inner.out_proj(heads.transpose(0, 1)), weights
