"""x-transformers for `weft.swap`: its `Attention` keeps everything around the core (`Attend`), which is replaced."""

from __future__ import annotations

import functools
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from x_transformers.attend import Intermediates
from x_transformers.x_transformers import Attention, AttentionLayers

from .added import LAYERS, add_layer, pairs
from .core import masked_full, rescaled

# Attributes of `Attend` that change the weights, and how.
CHANGES = {
    "pre_softmax_talking_heads": "talking heads",
    "post_softmax_talking_heads": "talking heads",
    "pre_scale_post_talking_heads": "talking heads",
    "l2_distance": "distances as logits",
    "selective": "selective attention",
    "cog_signed": "signed weights",
    "add_zero_kv": "an extra key",
    "head_learned_sink": "attention sinks",
    "softclamp_logits": "a soft cap on the logits",
    "cope": "contextual positions",
    "flash_pack_seq": "packed sequences of flash-attn",
}


def head_dim(layer: Any) -> int:
    return round(layer.scale**-2)


def refuse(layer: Any) -> str:
    core = layer._modules["attend"]
    found = [what for name, what in CHANGES.items() if getattr(core, name, None) not in (None, False)]
    weights = core.attn_fn
    if not (isinstance(weights, functools.partial) and weights.func is F.softmax and weights.keywords["dim"] == -1):
        found.append("other weights than softmax")
    if layer.num_mem_kv:
        found.append("memory keys (attn_num_mem_kv)")
    if layer.to_v is None or layer.to_v.out_features != layer.kv_heads * head_dim(layer):
        found.append("values of another width than keys")
    return f"it uses {' and '.join(dict.fromkeys(found))}, which no mechanism supports" if found else ""


def needs(path: str, model: nn.Module) -> set[str]:
    """What the `AttentionLayers` around a layer passes to it."""
    found: set[str] = set()
    for outer, stack in model.named_modules():
        prefix = f"{outer}.layers." if outer else "layers."
        if not isinstance(stack, AttentionLayers) or not path.startswith(prefix):
            continue
        number = int(path.removeprefix(prefix).split(".")[0])
        if stack.layer_types[number] == "c":
            found |= {"cross", "rows"} if stack.causal else {"cross"}
        elif stack.rel_pos is not None:
            found.add("bias")
    return found


def read(layer: Any, attend: Any, *args: Any, **kwargs: Any) -> Any:
    return Attention.forward(layer, *args, **kwargs)


def attend(
    layer: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    prev_attn: Tensor | None = None,
    attn_delta: Tensor | None = None,
    row_mask: Tensor | None = None,
    flash_pack_seq_kwargs: Any = None,
    causal: bool | None = None,
) -> tuple[Tensor, Intermediates]:
    """In place of `Attend.forward`."""
    core, original = layer.weft, layer._modules["attend"]
    if prev_attn is not None or attn_delta is not None:
        raise ValueError(f"{core.name} has no matrix of weights, which residual_attn and attn_delta need: remove them")
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat(1, groups, 1, 1) if groups > 1 else t for t in (k, v))  # head h reads key head h mod kv_heads
    q = rescaled(q, original.scale)
    causal = original.causal if causal is None else causal
    given: dict[str, Any] = {} if mask is None else pairs(mask, k.shape[0])
    if attn_bias is not None:
        given["added"] = attn_bias
    if causal and q.shape[2] != k.shape[2]:
        if core.name != "full":
            raise ValueError(f"{core.name} cannot continue a cache or memories of x-transformers: use cache_kv=False")
        dropout = original.dropout if layer.training else 0.0
        return masked_full(q, k, v, causal=True, dropout=dropout, **given), Intermediates()
    return core(q, k, v, causal=causal, dropout=original.dropout, **given), Intermediates()


add_layer(
    Attention,
    read,
    shape=lambda layer: (layer.heads, head_dim(layer)),
    causal=None,
    bias=lambda layer: any(
        x is not None for x in (layer.max_attend_past, layer.data_dependent_alibi, layer.rel_proj_pos_bias)
    ),
    refuse=refuse,
    tokens=False,
)
# A property hides the submodule `attend`, which stays in the state dict.
LAYERS[Attention].swapped.attend = property(lambda layer: functools.partial(attend, layer))  # type: ignore[attr-defined]
