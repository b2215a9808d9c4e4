"""The attributes to change, with their new values, to use a mechanism in a layer."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from ..attention import AttentionInfo, make_attention
from ..layers.mssa import MSSA
from ..layers.multihead import MultiheadAttention
from .added import LAYERS
from .core import Core, learns, rows_are_independent, trains
from .kinds import Layer
from .report import Missing, Patch
from .torch_nn import swapped_class

Settings = dict[str, Any]


def unfit(layer: Layer, info: AttentionInfo, settings: Settings, causal: bool | None) -> str:
    """Why this mechanism cannot be used in this layer; "" if it can."""
    causal = layer.causal if layer.causal is not None else causal
    if layer.trouble:
        return layer.trouble
    if causal and not info.causal:
        return f"the layer is causal, and {info.name} does not support that: {info.not_causal}"
    if causal is False and not info.bidirectional:
        return f"{info.name} supports only causal attention"
    if "cross" in layer.needs and not info.cross:
        return f"queries and keys differ in number, and {info.name} supports self-attention only"
    if "bias" in layer.needs and not info.bias:
        return f"the layer uses a position bias, which {info.name} does not support"
    if "pairs" in layer.needs and info.name != "full":
        return f"the layer changes the logits (a soft cap or sinks), which {info.name} does not have"
    if "rows" in layer.needs and not rows_are_independent(info.name, _given(settings)):
        return f"{info.name} mixes the queries of different positions, which would leak a decoder's future"
    return ""


def _given(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if value is not None}


def _core(module: nn.Module, info: AttentionInfo, causal: bool, settings: dict[str, Any], **shape: Any) -> Core:
    device, dtype = home(module)
    core = Core(info.name, causal=causal, **shape, **settings)
    return core.to(device=device, dtype=dtype).train(module.training)


def home(module: nn.Module) -> tuple[Any, Any]:
    """Device and dtype for new tensors of a layer. accelerate leaves offloaded layers on the meta device."""
    tensors = [*module.parameters(), *module.buffers()]
    like = next((t for t in tensors if t.is_floating_point()), None)
    if like is None:  # quantized
        return tensors[0].device if tensors else None, None
    if like.is_meta:
        hooks = (getattr(part, "_hf_hook", None) for part in module.modules())
        device = next((d for d in (getattr(hook, "execution_device", None) for hook in hooks) if d is not None), "meta")
        return device, like.dtype
    return like.device, like.dtype


def behind_hooks(layer: Layer, patches: list[Patch]) -> list[Patch] | str:
    """Patches for a layer whose instance has its own `forward`, which would hide the one of the new class."""
    new = next((patch.new for patch in patches if patch.owner is layer.module and patch.name == "__class__"), None)
    if new is None or "forward" not in vars(layer.module):
        return patches
    if "_old_forward" not in vars(layer.module):  # accelerate's hooks call this one
        return "its forward was replaced on the instance, so a swap would have no effect: swap before that"
    return [*patches, Patch(layer.module, "_old_forward", MethodType(new.forward, layer.module))]


def _plan_weft(layer: Layer, info: AttentionInfo, settings: Settings, causal: bool | None, prefix: int) -> Any:
    module = layer.module
    assert isinstance(module, (MSSA, MultiheadAttention))
    old = module.attention
    settings = {**settings, "max_length": settings["max_length"] or old.max_length}
    new = make_attention(
        info.name,
        heads=module.heads,
        head_dim=module.head_dim,
        causal=module.causal,
        dropout=old.dropout,
        **settings,
    )
    if isinstance(module, MultiheadAttention):
        if (new.reads_q and module.q is None) or (new.reads_k and module.k is None):
            return f"{info.name} reads queries and keys, but the layer has no projections for them"
    device, dtype = home(module)
    return [Patch(module, "attention", new.to(device=device, dtype=dtype).train(module.training))]


def _plan_torch(layer: Layer, info: AttentionInfo, settings: Settings, causal: bool | None, prefix: int) -> list[Patch]:
    module: Any = layer.module
    causal = bool(layer.causal if layer.causal is not None else causal)
    causal = (causal and info.causal) or not info.bidirectional
    shape = {"heads": module.num_heads, "head_dim": module.head_dim, "dropout": module.dropout}
    core = _core(module, info, causal, settings, **shape)
    cross = [Patch(module, "weft_cross", True)] if "cross" in layer.needs else []
    return [Patch(module, "weft", core), *cross, Patch(module, "__class__", swapped_class(type(module)))]


def _plan_added(layer: Layer, info: AttentionInfo, settings: Settings, causal: bool | None, prefix: int) -> list[Patch]:
    module, added = layer.module, LAYERS[type(layer.module)]
    heads, head_dim = added.shape(module)
    causal = bool(layer.causal if layer.causal is not None else causal)
    core = _core(module, info, causal, settings, heads=heads, head_dim=head_dim)
    patches = [Patch(module, "weft", core), Patch(module, "__class__", added.swapped)]
    if getattr(module, "fused_attn", None) is False:  # timm's layers call scaled_dot_product_attention only if True
        patches.append(Patch(module, "fused_attn", True))
    return patches


def _plan_timm(layer: Layer, info: AttentionInfo, settings: Settings, causal: bool | None, prefix: int) -> list[Patch]:
    from .timm import TimmAttention

    module: Any = layer.module
    shape = {"heads": module.num_heads, "head_dim": module.head_dim, "dropout": module.attn_drop.p}
    core = _core(module, info, bool(causal), settings, **shape)
    return [Patch(module, "weft", core), Patch(module, "prefix", prefix), Patch(module, "__class__", TimmAttention)]


def _plan_transformers(
    layer: Layer, info: AttentionInfo, settings: Settings, causal: bool | None, prefix: int
) -> list[Patch] | str:
    from .cached_layer import width_and_heads
    from .huggingface import Choice
    from .past import layer_state

    module: Any = layer.module
    given = _given(settings)
    patches = [Patch(layer_state(module), "choice", Choice(info.name, given))]
    if learns(info.name) or trains(info.name, bool(layer.causal), given) or info.name == "subsampled":
        # Part of the layer, so that it is trained, moved and saved with the model, and its sampling can be switched.
        try:
            dim, heads = width_and_heads(module)
        except ValueError as why:
            return str(why)
        own = getattr(module, "head_dim", None) or getattr(layer.config, "head_dim", None)
        longest = getattr(layer.config, "max_position_embeddings", None) if layer.causal else None
        settings = {**settings, "max_length": settings["max_length"] or longest}
        core = _core(module, info, bool(layer.causal), settings, heads=heads, head_dim=own or dim // heads)
        patches.append(Patch(module, "weft", core))
    elif "weft" in module._modules:  # of an earlier swap
        patches.append(Patch(module, "weft", Missing))
    return patches


PLANS: dict[str, Callable[..., list[Patch] | str]] = {
    "weft": _plan_weft,
    "torch": _plan_torch,
    "added": _plan_added,
    "timm": _plan_timm,
    "transformers": _plan_transformers,
}
