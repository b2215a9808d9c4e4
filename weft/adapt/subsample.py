"""Train a model with subsampled attention, by a named schedule, and make it dense again.

The Information Pathways Hypothesis, https://arxiv.org/abs/2306.01705

    report = weft.subsample(model, "S12-L8", sigma=(0.2, 0.35))    8 windows in the last 12 layers
    print(report)                                                  lists replaced and skipped layers
    weft.make_dense(model)                                         dense fine-tuning: same model, same optimizer state
    report.undo()                                                  restores the original model

A schedule is `S{layers}-L{windows}`: `Sall-L4` uses all layers; a final U (`S16-L4U`) samples without local bias.
σ is linear in the layer index, from the model's first layer to its deepest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from ..attention import make_attention
from ..attention.subsampled import Subsampling
from ..layers.mixed import MixedAttention
from ..layers.mssa import MSSA
from ..layers.multihead import MultiheadAttention
from .kinds import Where, find_layers, is_chosen
from .report import Patch, Report, Row
from .saved import RECORD, _is_among


@dataclass(frozen=True)
class Schedule:
    layers: int | None  # number of last layers; None for all
    windows: int
    biased: bool


def parse_schedule(name: str) -> Schedule:
    """`S12-L8`, `Sall-L4` (or `S-all-L4`), and either with a final U for unbiased."""
    match = re.fullmatch(r"S(\d+|-?all)-L(\d+)(U?)", name)
    if not match or not int(match[2]):
        raise ValueError(f"a schedule must be like S12-L8 (last 12 layers, 8 windows) or Sall-L4, got {name!r}")
    layers = None if match[1].endswith("all") else int(match[1])
    return Schedule(layers, int(match[2]), biased=not match[3])


def subsample(
    model: nn.Module,
    schedule: str,
    sigma: float | tuple[float, float] = 0.2,
    *,
    where: Where = None,
    **options: Any,
) -> Report:
    """Put subsampled attention into the last layers of `model` that have `full` attention, in place.

    Models of other libraries are changed as by `weft.swap(model, to="subsampled")`.

    `sigma` is one number, or its values in the first and the deepest layer. `where` selects layers by a pattern on
    their paths or a function of path and layer; use it to exclude cross-attention layers with a context of the same
    width, which cannot be detected unless they have `is_cross_attention = True`. `options` go to the mechanism.
    """
    plan = parse_schedule(schedule)
    paths = [(path, m) for path, m in model.named_modules() if isinstance(m, (MSSA, MultiheadAttention))]
    if not paths:
        return _subsample_others(model, plan, sigma, where, options)
    excluded = {path: why for path, m in paths if (why := _excluded(path, m, where))}
    number = _number_layers(model, [path for path, _ in paths if path not in excluded])
    depth = max(number.values(), default=-1) + 1
    count = depth if plan.layers is None else plan.layers
    if count > depth:
        raise ValueError(f"{schedule} needs {count} layers, but the model has {depth}")
    first, last = sigma if isinstance(sigma, tuple) else (sigma, sigma)
    rows, patches, records = [], [], []
    for path, layer in paths:
        now, why = "", excluded.get(path, "")
        if not why and number[path] < depth - count:
            why = f"one of the first {depth - count} layers, which stay dense"
        elif not why and layer.attention.name != "full":
            why = f"its attention is {layer.attention.name}, not full"
        if not why:
            here = first + (last - first) * number[path] / max(depth - 1, 1)
            new = _subsampled(layer, plan, here, options)
            patches.append(Patch(layer, "attention", new))
            settings = {"windows": plan.windows, "sigma": here, "biased": plan.biased, **options}
            records.append(Patch(layer, RECORD, {"to": "subsampled", **settings}))
            now = f"subsampled, windows={plan.windows}, " + (f"sigma={here:.4g}" if plan.biased else "unbiased")
        rows.append(Row(path, type(layer).__name__, now, why))
    if count and not patches:
        raise ValueError("no layer could be subsampled: " + "; ".join(f"{r.path}: {r.why}" for r in rows))
    for patch in [*patches, *records]:  # after the options of all layers have been accepted
        patch.apply()
    return Report(rows, [*patches, *records])


def _subsample_others(
    model: nn.Module, plan: Schedule, sigma: float | tuple[float, float], where: Where, options: dict[str, Any]
) -> Report:
    """The last layers of a transformers, timm or torch model; one swap for each σ."""
    from .surgery import swap

    layers = [x.path for x in find_layers(model) if not x.trouble and not _excluded(x.path, x.module, where)]
    count = len(layers) if plan.layers is None else plan.layers
    if not layers:
        raise ValueError(f"{type(model).__name__} contains no attention layer that weft knows (MultiheadAttention, …)")
    if count > len(layers):
        raise ValueError(f"the schedule needs {count} layers, but the model has {len(layers)} attention layers")
    first, last = sigma if isinstance(sigma, tuple) else (sigma, sigma)
    groups: dict[float, list[str]] = {}
    for number in range(len(layers) - count, len(layers)):
        groups.setdefault(first + (last - first) * number / max(len(layers) - 1, 1), []).append(layers[number])
    settings = {"windows": plan.windows, "biased": plan.biased, **options}
    reports = []
    for here, paths in groups.items():
        reports.append(swap(model, "subsampled", partial(_is_among, set(paths)), sigma=here, **settings))
    rows = {row.path: row for report in reports for row in report.rows if not row.not_chosen}
    every = [rows.get(row.path, row) for row in (reports[0].rows if reports else [])]
    if not any(row.now for row in every):
        raise ValueError("no layer could be subsampled: " + "; ".join(f"{row.path}: {row.why}" for row in every))
    patches, changed = [p for r in reports for p in r.patches], [m for r in reports for m in r.layers]
    return Report(every, patches, changed, reports[0].is_changed, reports[0].note)


def subsampling(model: nn.Module, on: bool) -> int:
    """Switch sampling on or off in all layers that support it, and return their number.

    On: sample in training, dense in eval() (the default). Off: dense in training too.
    """
    found = [m for m in model.modules() if isinstance(m, Subsampling)]
    if not found:
        raise ValueError("the model has no subsampled attention: add it with weft.subsample(model, 'Sall-L4')")
    for module in found:
        module.sampling = None if on else False
    return len(found)


def make_dense(model: nn.Module) -> int:
    """Use dense attention from now on, also in training; parameters and optimizer state do not change."""
    return subsampling(model, False)


def _subsampled(layer: MSSA | MultiheadAttention, plan: Schedule, sigma: float, options: dict[str, Any]) -> nn.Module:
    old = layer.attention
    return make_attention(
        "subsampled",
        heads=old.heads,
        head_dim=old.head_dim,
        causal=old.causal,
        max_length=old.max_length,
        dropout=old.dropout,
        windows=plan.windows,
        sigma=sigma,
        biased=plan.biased,
        **options,
    ).train(old.training)


def _excluded(path: str, layer: nn.Module, where: Where) -> str:
    if not is_chosen(where, path, layer):
        return "not chosen"
    other = isinstance(layer, MultiheadAttention) and layer.v.in_features != layer.dim
    if other or getattr(layer, "is_cross_attention", False):
        return "it attends to another sequence"
    return ""


def _number_layers(model: nn.Module, paths: list[str]) -> dict[str, int]:
    """The layer index of each path; the mechanisms of a MixedAttention are one layer."""
    mixed = [path for path, m in model.named_modules() if isinstance(m, MixedAttention)]
    number: dict[str, int] = {}
    seen: dict[str, int] = {}
    for path in paths:
        layer = next((m for m in mixed if m == "" or path.startswith(m + ".")), path)
        number[path] = seen.setdefault(layer, len(seen))
    return number
