"""Replace the mechanism of attention layers in an existing model, or add a cache to them.

    report = weft.swap(model, to="linear", where="blocks.*.attn")
    print(report)          lists replaced layers, and skipped layers with the reason
    report.undo()          restores the original model

The layers keep their projections and all other weights. A swapped layer stays the same object, but its class becomes a
subclass with another core (in transformers: with another attention function). A cache is wrapped around the layer.

What `swap` does, in this order:

1. kinds.py finds the attention layers. Those of libraries and of the user are registered in added.py, *_layers.py.
2. plans.py says why the mechanism does not fit a layer, or which attributes to change. `_operate` changes them.
3. probe.py runs a transformers model. Layers that raise an error keep their attention: steps 1 and 2 are repeated.
4. saved.py describes the changes, report.py reverts them.

In a forward pass, the new class of a layer calls `core.Core`. transformers layers call `huggingface.swapped_attention`,
with masks.py, packed.py (documents), biases.py, and decoding.py or past.py (key-value caches).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..attention import attention_info
from ..core.registry import check_options
from .added import LAYERS, is_named_attention
from .core import seeded
from .kinds import Layer, Where, find_layers, is_chosen, whole_models
from .plans import PLANS, behind_hooks, home, unfit
from .report import Patch, Report, Row
from .saved import RECORD, note
from .torch_nn import TorchMultiheadAttention

NOT_CHOSEN = "not chosen"


def swap(
    model: nn.Module,
    to: str,
    where: Where = None,
    *,
    causal: bool | None = None,
    max_length: int | None = None,
    prefix: int = 0,
    probe: bool = True,
    **options: Any,
) -> Report:
    """Replace the attention of `model`'s layers by the mechanism `to`, in place.

    `where` selects layers: a pattern on their paths ("layers.*.self_attn"), or a function of path and layer. `causal`
    is for mechanisms with parameters in layers that decide at each call. `prefix` is for timm's vision transformers
    (see `weft.timm.layer`). `options` go to the mechanism. Layers that cannot be changed are listed in the report with
    the reason. transformers layers are tested with forward passes over a few tokens; `probe=False` skips the test.
    """
    info = attention_info(to)
    if info.needs_max_length and max_length is None:
        raise ValueError(f"{to} has parameters per position: set max_length to the model's longest sequence")
    settings = {"max_length": max_length, **options}
    check_options(to, options)
    record = {"to": to, "causal": causal, "max_length": max_length, "prefix": prefix, **options}

    refused: dict[int, str] = {}  # id of a layer -> why, once it was tested

    def plan(layer: Layer, seed: int) -> list[Patch] | str:
        why = refused.get(id(layer.module)) or unfit(layer, info, settings, causal)
        if prefix and layer.kind != "timm":
            why = why or "prefix is for class tokens of vision transformers, which this layer does not have"
        if why:
            return why
        with seeded(seed):
            planned = PLANS[layer.kind](layer, info, settings, causal, prefix)
        planned = planned if isinstance(planned, str) else behind_hooks(layer, planned)
        return planned if isinstance(planned, str) else [*planned, Patch(layer.module, RECORD, record)]

    def finish(chosen: list[Layer], layers: list[Layer]) -> list[Patch]:
        return [*_switch_configs(chosen, layers), *_stop_nesting(model, chosen)]

    report = _operate(model, where, plan, finish, lambda layer: to)
    if probe and any(layer.__dict__.get("_weft") is not None for layer in report.layers):
        from .probe import refusals

        try:
            for whole in whole_models(model):
                refused |= refusals(whole, report.layers, max_length)
        except BaseException:
            report.undo()
            raise
        if refused:
            report.undo()
            report = _operate(model, where, plan, finish, lambda layer: to)
    _warn(model, report)
    return report


def cache(model: nn.Module, ratio: float = 0.5, where: Where = None, **options: Any) -> Report:
    """Wrap the attention layers of `model` in `weft.CachedAttention` with `options`, in place.

    Causal layers get `delayed=True` unless it is given, because the cache would leak the future otherwise. `pool` may
    be a list, one factor per stage of a pyramid (Swin, PVT v2); stages beyond its end get 1.
    """
    from ..layers.cached import CachedAttention

    layers = find_layers(model)
    reads_an_encoder = any(x.kind in ("transformers", "weft") and "cross" in x.needs for x in layers)
    pools = options.pop("pool", 1)
    stages = _stages(layers) if isinstance(pools, (list, tuple)) else {}

    def settings(layer: Layer) -> dict[str, Any]:
        found = {"delayed": True, **options} if layer.causal else dict(options)
        if isinstance(pools, (list, tuple)):
            found["pool"] = pools[stages[layer.path]] if stages[layer.path] < len(pools) else 1
        elif pools != 1:
            found["pool"] = pools
        return found

    def plan(layer: Layer, seed: int) -> list[Patch] | str:
        if not layer.kind or (layer.trouble and layer.kind not in ("torch", "transformers")):
            return layer.trouble
        if not layer.places:
            raise ValueError("the model itself is an attention layer: use weft.CachedAttention(layer)")
        if layer.kind == "added" and not LAYERS[type(layer.module)].tokens:
            return "it does not map tokens (B, L, dim) to as many tokens, which a cache needs"
        if any(isinstance(parent, CachedAttention) for parent, _ in layer.places):
            return "it already has a cache"
        if "cross" in layer.needs and layer.kind in ("torch", "transformers", "weft"):
            return "it attends to another sequence"
        if layer.causal and "delayed" not in options and (reads_an_encoder or layer.kind == "torch"):
            return "it belongs to a decoder, and the paper caches only the encoder: set delayed=True to cache both"
        if layer.kind == "torch" and not layer.module.batch_first:
            return "cached attention takes (B, L, dim): create the layer with batch_first=True"
        if layer.causal and options.get("delayed") is False:
            return "it is causal, and a cache of the current segment would leak the future: set delayed=True"
        wrap: Callable[..., nn.Module] = CachedAttention
        if layer.kind == "transformers":
            from .cached_layer import CachedLayer, uncacheable

            wrap, why = CachedLayer, uncacheable(layer)
            if why:
                return why
        device, dtype = home(layer.module)
        with seeded(seed):
            made = wrap(layer.module, ratio, device=device, dtype=dtype, **settings(layer)).train(layer.module.training)
        made.__dict__[RECORD] = {"ratio": ratio, **settings(layer)}
        if layer.kind == "torch":  # what nn.TransformerEncoderLayer reads; without a bias it takes no fast path
            made.batch_first, made.in_proj_bias = True, None  # type: ignore[assignment]
        return [Patch(parent, name, made) for parent, name in layer.places]

    def finish(chosen: list[Layer], layers: list[Layer]) -> list[Patch]:
        return _stop_nesting(model, chosen)

    def shown(layer: Layer) -> str:
        return f"cached, ratio {ratio}" + (", delayed" if settings(layer).get("delayed") else "")

    report = _operate(model, where, plan, finish, shown)
    _warn(model, report)
    return report


def _stages(layers: list[Layer]) -> dict[str, int]:
    """The stage of every layer: the number of other widths before it."""
    from ..layers.cached.inputs import width_and_heads

    widths: list[int] = []
    found = {}
    for layer in layers:
        width = width_and_heads(layer.module, None, None)[0]
        if width not in widths:
            widths.append(width)
        found[layer.path] = widths.index(width)
    return found


def _operate(
    model: nn.Module,
    where: Where,
    plan: Callable[[Layer, int], list[Patch] | str],
    finish: Callable[[list[Layer], list[Layer]], list[Patch]],
    shown: Callable[[Layer], str],
) -> Report:
    """Plan the changes of every layer, then change the model only if all plans succeed."""
    layers = find_layers(model)
    if not layers:
        similar = ", ".join(dict.fromkeys(type(m).__name__ for m in model.modules() if is_named_attention(type(m))))
        raise ValueError(
            f"{type(model).__name__} has no attention layer that weft knows{similar and f' ({similar} are not known)'}"
            ": register your own layer with weft.adapt.add_layer(cls, reader)"
        )
    if not any(is_chosen(where, layer.path, layer.module) for layer in layers):
        raise ValueError(f"where={where!r} matches none of the layers: {', '.join(layer.path for layer in layers)}")
    rows, patches, chosen = [], [], []
    for number, layer in enumerate(layers):
        why = NOT_CHOSEN
        if is_chosen(where, layer.path, layer.module):
            try:
                planned = plan(layer, (torch.initial_seed() + number) % 2**63)
            except ValueError as error:
                raise ValueError(f"{layer.path or type(layer.module).__name__}: {error}") from error
            if isinstance(planned, str):
                why = planned
            else:
                patches += planned
                chosen.append(layer)
                why = ""
        rows.append(Row(layer.path, type(layer.module).__name__, "" if why else shown(layer), why, why == NOT_CHOSEN))
    patches += finish(chosen, layers)
    for patch in patches:
        patch.apply()
    report = Report(rows, patches, [layer.module for layer in chosen], _is_changed, lambda: note(model))
    note(model)
    return report


def _warn(model: nn.Module, report: Report) -> None:
    """Warn if only part of the model was changed."""
    if report.refused:
        path, why = next(iter(report.refused.items()))
        warnings.warn(
            f"{type(model).__name__}: {len(report.refused)} of {len(report.refused) + len(report.replaced)} attention "
            f"layers keep their own attention, e.g. {path or 'the model itself'}: {why}; print the report for all",
            stacklevel=3,
        )


def _switch_configs(chosen: list[Layer], layers: list[Layer]) -> list[Patch]:
    """transformers layers read the name of their attention from a shared config, and share their masks.

    So all layers of a config get a function that looks up each layer's mechanism; the others run full attention.
    """
    configs: dict[int, Any] = {id(layer.config): layer.config for layer in chosen if layer.kind == "transformers"}
    if not configs:
        return []
    for layer in layers:
        if layer.trouble and id(layer.config) in configs:
            raise ValueError(
                f"{layer.path} cannot stay unchanged: {layer.trouble}, and layers that share a config share masks"
            )
    from .huggingface import SWAPPED

    patches = []
    for config in configs.values():
        sharing = [layer for layer in layers if layer.config is config]
        if config._attn_implementation != SWAPPED:
            # set_attn_implementation() may replace it later, so layers may have been swapped before.
            users = [layer.module for layer in sharing if not _is_changed(layer.module)]
            patches.append(Patch(config, "_attn_implementation_internal", SWAPPED, users=users, yields=True))
            for layer in sharing:
                if layer.rewritten is not None:
                    patches.append(Patch(layer.module, "config", config))
                    patches.append(Patch(layer.module, "__class__", layer.rewritten))
    return patches


def _stop_nesting(model: nn.Module, chosen: list[Layer]) -> list[Patch]:
    """Disable nested tensors in nn.TransformerEncoder, because swapped layers do not use the fast path."""
    changed = {id(layer.module) for layer in chosen if layer.kind == "torch"}
    patches = []
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and getattr(module, "use_nested_tensor", False):
            users: list[nn.Module] = [m for m in module.modules() if isinstance(m, nn.MultiheadAttention)]
            if any(id(user) in changed for user in users):
                patches.append(Patch(module, "use_nested_tensor", False, users=users))
    return patches


def _is_changed(module: nn.Module) -> bool:
    """Whether a layer is currently swapped."""
    state = module.__dict__.get("_weft")
    return isinstance(module, TorchMultiheadAttention) or (state is not None and state.choice is not None)
