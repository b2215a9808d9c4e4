"""The attention layers of a model, what each requires of a mechanism, and which of them `where` chooses."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..attention import Attention
from ..layers.mssa import MSSA
from ..layers.multihead import MultiheadAttention
from .added import known
from .torch_nn import bypasses

Where = str | Callable[[str, nn.Module], bool] | None


@dataclass
class Layer:
    """An attention layer in a model."""

    path: str
    module: nn.Module
    places: list[tuple[nn.Module, str]]  # every (parent, name) of the layer; empty for the model itself
    kind: str  # "weft", "torch", "timm", "transformers", "added" (see added.py); "" if unknown
    needs: set[str] = field(default_factory=set)  # "cross", "bias", "rows", "pairs" (a matrix of logits)
    causal: bool | None = False  # None: decided at each call
    trouble: str = ""  # why no mechanism can be used here
    config: Any = None  # the transformers config that selects its attention
    rewritten: type | None = None  # its class in a swapped model, if all layers with this config change together

    @property
    def role(self) -> str:
        """Its role in the parent, if that is a torch.nn layer."""
        for parent, name in self.places:
            if isinstance(parent, (nn.TransformerDecoderLayer, nn.TransformerEncoderLayer)):
                return f"{'decoder' if isinstance(parent, nn.TransformerDecoderLayer) else 'encoder'} {name}"
        return ""


def find_layers(model: nn.Module) -> list[Layer]:
    """All attention layers, and other modules with "attention" in their class name, in model order."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent.named_children():
            places.setdefault(id(child), []).append((parent, name))
    known, unknown = [], []
    for path, module in model.named_modules():
        layer = Layer(path, module, places.get(id(module), []), "")
        if _recognise(layer, model):
            known.append(layer)
        elif "attention" in type(module).__name__.lower() and not isinstance(module, (Attention, nn.ModuleList)):
            layer.trouble = f"weft does not know {type(module).__module__}.{type(module).__name__}"
            unknown.append(layer)
    within = [layer.path for layer in known]
    unknown = [
        layer
        for layer in unknown
        if not any(_inside(w, layer.path) or _inside(layer.path, w) for w in within)
        and not any(_inside(layer.path, other.path) for other in unknown)
        and not type(layer.module).__module__.startswith("weft.")
    ]
    order = {id(module): i for i, module in enumerate(model.modules())}
    return sorted(known + unknown, key=lambda layer: order[id(layer.module)])


def is_chosen(where: Where, path: str, layer: nn.Module) -> bool:
    if where is None:
        return True
    if isinstance(where, str):
        return fnmatch.fnmatchcase(path, where)
    if not callable(where):
        raise TypeError(
            f"where must be a pattern on paths, such as 'layers.*.self_attn', or a function of path and layer, got "
            f"{where!r}; for a list of paths, use where=lambda path, layer: path in paths"
        )
    return bool(where(path, layer))


def whole_models(model: nn.Module) -> list[nn.Module]:
    """The outermost transformers models, which may be in a wrapper (torch.compile, DistributedDataParallel); if there
    is none, the model itself."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if hasattr(type(module), "set_attn_implementation") and not any(_inside(path, outer) for outer in found):
            found[path] = module
    return list(found.values()) or [model]


def _recognise(layer: Layer, model: nn.Module) -> bool:
    module = layer.module
    layer.config = getattr(module, "config", None)
    added = known(type(module))
    if added is not None:
        layer.kind, layer.causal, layer.needs = "added", added.causal, added.needs(module)
        layer.trouble = added.refuse(module)
        if type(module).__module__.startswith("x_transformers."):
            from .x_transformers_layers import needs

            layer.needs |= needs(layer.path, model)
            layer.causal = bool(module.causal) and "cross" not in layer.needs
        if type(module).__module__ == "timm.models.beit" and getattr(model, "rel_pos_bias", None) is not None:
            layer.needs.add("bias")  # shared by all layers
    elif isinstance(module, (MSSA, MultiheadAttention)):
        layer.kind, layer.causal = "weft", module.causal
        layer.needs = {"cross", "rows"} if getattr(module, "is_cross_attention", False) else set()
    elif isinstance(module, nn.MultiheadAttention):
        _recognise_torch(layer, module)
    elif _is_timm(module):
        layer.kind = "timm"
    elif _uses_interface(module):
        _recognise_transformers(layer, module)
    elif type(module).__name__.removeprefix("Weft") in ("BloomAttention", "MptAttention"):
        from .rewritten import REWRITTEN

        if type(module) in REWRITTEN:
            layer.kind, layer.causal, layer.needs = "transformers", True, {"bias"}
            layer.rewritten = REWRITTEN[type(module)]
            layer.config = _config_above(layer, model)
    return bool(layer.kind)


def _recognise_torch(layer: Layer, module: Any) -> None:
    layer.kind, layer.causal = "torch", None
    if bypasses(type(module)):
        layer.trouble = (
            f"{bypasses(type(module))} overrides forward without super().forward: register it with weft.adapt.add_layer"
        )
    elif module.bias_k is not None or module.add_zero_attn:
        layer.trouble = "it adds extra keys (add_bias_kv, add_zero_attn)"
    if layer.role == "decoder multihead_attn":
        layer.needs, layer.causal = {"cross", "rows"}, False
    elif any("pooling" in type(parent).__name__.lower() for parent, _ in layer.places):
        layer.needs, layer.causal = {"cross"}, False  # one learned query, as in SigLIP's head
    elif layer.role == "decoder self_attn":
        layer.causal = True


def _is_timm(module: nn.Module) -> bool:
    """Whether this is the attention of timm's vision transformers; its other layers are in timm_layers.py."""
    if not type(module).__module__.startswith(("timm.", "weft.adapt.timm")):
        return False
    from timm.layers import Attention as Plain

    from .timm import TimmAttention

    return type(module) in (Plain, TimmAttention)


def _uses_interface(module: nn.Module) -> bool:
    """Whether this transformers layer uses the attention interface, as all current ones do."""
    if not hasattr(getattr(module, "config", None), "_attn_implementation"):
        return False
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _recognise_transformers(layer: Layer, module: Any) -> None:
    layer.kind, layer.causal = "transformers", getattr(module, "is_causal", None)
    name = layer.path.rsplit(".", 1)[-1].lower()
    is_cross = getattr(module, "is_cross_attention", False) or any(
        part in name + type(module).__name__.lower() for part in ("cross", "encoder_attn", "encdecattention")
    )
    if is_cross:
        layer.needs, layer.causal = {"cross", "rows"}, False
    if hasattr(module, "has_relative_attention_bias"):
        layer.needs.add("bias")
    if getattr(module, "sinks", None) is not None or getattr(module, "attn_logit_softcapping", None):
        layer.needs.add("pairs")
    if layer.causal is None:
        layer.trouble = layer.trouble or "it is unknown whether it is causal"


def _config_above(layer: Layer, model: nn.Module) -> Any:
    """The config of the innermost transformers model around this layer."""
    found = None
    for path, module in model.named_modules():
        if _inside(layer.path, path) and hasattr(getattr(module, "config", None), "_attn_implementation"):
            found = module.config
    return found


def _inside(path: str, parent: str) -> bool:
    return path != parent and (not parent or path.startswith(parent + "."))
