"""Describe the changes of `weft.swap`, `weft.subsample` and `weft.cache` as data, to save and to reapply them.

torch.save({"weft": weft.describe(model), "model": model.state_dict()}, path)
weft.apply(plain, saved["weft"])       the same mechanisms and caches in an unchanged model
plain.load_state_dict(saved["model"])
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from .kinds import whole_models

RECORD = "weft_record"  # attribute of a changed layer or cache with its settings
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")  # names of what PyTorch has wrapped


def describe(model: nn.Module) -> dict[str, Any]:
    """{"swapped": {path: settings of weft.swap}, "cached": {path: settings of weft.cache}}; {} for a plain model.

    Paths are those of the plain model. The result can be written as JSON.
    """
    found: dict[str, dict[str, Any]] = {"swapped": {}, "cached": {}}
    for path, module in model.named_modules():
        record = module.__dict__.get(RECORD)
        if record is not None:
            found["cached" if "ratio" in record else "swapped"][_plain_path(model, path)] = record
    return {kind: layers for kind, layers in found.items() if layers}


def note(model: nn.Module) -> None:
    """Store the description in the config of a transformers model, so that save_pretrained writes it."""
    whole = whole_models(model)
    noted: set[int] = set()
    for module in model.modules():
        config: Any = vars(module).get("config")  # wrappers forward the attribute
        if not hasattr(config, "_attn_implementation") or id(config) in noted:
            continue
        noted.add(id(config))
        if module not in whole and "weft" not in vars(config):  # a part of the model that was not changed alone
            continue
        found = describe(module)
        if found:
            config.weft = found
        elif "weft" in vars(config):
            del config.weft


def apply(model: nn.Module, description: dict[str, Any]) -> list[Any]:
    """Apply a description of `describe` to a plain model; returns the reports, to be undone in reverse order."""
    from .surgery import cache, swap

    unknown = set(description) - {"swapped", "cached"}
    if unknown:
        raise ValueError(f"a description may have the keys 'swapped' and 'cached', got {', '.join(sorted(unknown))}")
    reports = []
    operations: dict[str, Callable[..., Any]] = {"swapped": partial(swap, probe=False), "cached": cache}
    for kind, operate in operations.items():
        for settings, paths in _by_settings(description.get(kind, {})):
            report = operate(model, where=partial(_is_among, paths), **settings)
            reports.append(report)
            missing = paths - set(report.replaced)
            if missing:
                path = min(missing)
                raise ValueError(
                    f"cannot apply the description to {path}: {report.left.get(path, 'there is no such layer')}; "
                    "build the model like the described one"
                )
    return reports


def _is_among(paths: set[str], path: str, module: nn.Module) -> bool:
    return path in paths


def _by_settings(layers: dict[str, dict[str, Any]]) -> list[tuple[dict[str, Any], set[str]]]:
    """Group the layers by their settings."""
    groups: dict[str, tuple[dict[str, Any], set[str]]] = {}
    for path, settings in layers.items():
        groups.setdefault(json.dumps(settings, sort_keys=True), (settings, set()))[1].add(path)
    return list(groups.values())


def _plain_path(model: nn.Module, path: str) -> str:
    """The path without caches around the layer (`inner` or `cached.inner`), and without wrappers of its parents."""
    from ..layers.cached import CachedAttention

    kept: list[str] = []
    module: Any = model
    for part in path.split(".") if path else []:
        cached = isinstance(module, CachedAttention) or (part == "cached" and RECORD in module.__dict__)
        if not cached and part not in WRAPPERS:
            kept.append(part)
        module = getattr(module, part)
    return ".".join(kept)
