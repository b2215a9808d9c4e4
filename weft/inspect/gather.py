"""Collect the data of the HTML report as plain, JSON-compatible values."""

from __future__ import annotations

import base64
import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from .branches import branch_views, has_cache
from .measure import Measures, cache_shares, measure, subspace_coherence, tokens_per_layer
from .views import CROSS, AttentionView, attention_views, created, outermost
from .watch import blocks_of, image_grid, plain, prefix_tokens, proportional
from .windows import Windows

Loader = Callable[[nn.Module], Any] | Mapping[str, Tensor]

CHARTS = {  # measurement -> title, explanation, unit
    "projected_rate": (
        "Coding rate in the subspaces, before attention",
        "Rᶜ of LN(z)U, with unit-length tokens in each head, ε² = 0.01. Lower means a better fit to the subspaces.",
        "nats",
    ),
    "subspace_rate": (
        "Coding rate in the subspaces, after compression",
        "Rᶜ(z + MSSA; U) of the unnormalised tokens, ε² = 0.01.",
        "nats",
    ),
    "nonzero": (
        "Fraction of non-zeros",
        "Entries of ISTA's output that are not exactly zero. Lower means sparser.",
        "fraction",
    ),
    "rate": (
        "Coding rate of the whole layer",
        "R of each block's output, with unit-length tokens, ε² = 0.01: the volume that the tokens span together.",
        "nats",
    ),
}


def pack(values: Tensor) -> dict[str, Any]:
    """(n, …) as bytes: each of the n parts is scaled by its maximum m; a byte q means m · sign(q) · (q/127)²."""
    flat = values.float().nan_to_num().flatten(1)
    largest = flat.abs().amax(1) if flat.shape[1] else flat.new_zeros(len(flat))
    share = flat / largest.clamp(min=1e-30)[:, None]
    q = (share.sign() * share.abs().sqrt() * 127).round().to(torch.int8)
    return {
        "shape": list(values.shape),
        "max": _rounded(largest),
        "bytes": base64.b64encode(q.numpy().tobytes()).decode("ascii"),
    }


def curves(
    model: nn.Module, splits: Mapping[str, Sequence[Tensor]], checkpoints: Iterable[tuple[str, Loader]] = ()
) -> dict[str, Any]:
    """Every measurement per layer: one line for each checkpoint and split."""
    if not blocks_of(model):  # a single layer
        return {"charts": [], "counts": {}, "layers": []}
    kept = copy.deepcopy(model.state_dict())
    lines: list[tuple[str, str, Measures]] = []
    try:
        for label, load in checkpoints:
            if isinstance(load, Mapping):
                model.load_state_dict(load)
            else:
                load(model)
            lines += [(label, split, _measured(model, inputs)) for split, inputs in splits.items()]
    finally:
        model.load_state_dict(kept)
    if not lines:
        lines = [("", split, _measured(model, inputs)) for split, inputs in splits.items()]
    charts = []
    for key, (title, note, unit) in CHARTS.items():
        series = [
            {
                "checkpoint": label,
                "split": split,
                "mean": _rounded(found[key].mean(1)),
                "std": _rounded(found[key].std(1)) if found[key].shape[1] > 1 else [],
            }
            for label, split, found in lines
            if key in found
        ]
        if series:
            charts.append({"key": key, "title": title, "note": note, "unit": unit, "series": series})
    counts = {split: len(inputs[0]) for split, inputs in splits.items()}
    return {"charts": charts, "counts": counts, "layers": _block_names(model)}


def _measured(model: nn.Module, inputs: Sequence[Tensor]) -> Measures:
    length = inputs[0].shape[1] if inputs[0].dim() == 2 else 1
    return measure(model, inputs, batch_size=max(1, min(64, 2**15 // length)))


def heatmaps(model: nn.Module, inputs: Sequence[Tensor], *, examples: int, size: int) -> dict[str, Any]:
    """Token sub-matrices of each example, per layer."""
    found = []
    for i in range(examples):
        z, tokens, channels = tokens_per_layer(model, [t[i : i + 1] for t in inputs], size=size)
        share = (z != 0).double().mean((1, 2))
        nonzero = [] if (z < 0).any() else _rounded(share)  # only ReLU outputs have exact zeros
        found.append({"layers": pack(z), "tokens": tokens.tolist(), "channels": channels.tolist(), "nonzero": nonzero})
    return {"examples": found, "names": _block_names(model)}


def coherences(model: nn.Module) -> list[dict[str, Any]]:
    found = []
    for i, (path, G, count) in enumerate(subspace_coherence(model)):
        heads = len(G) // count
        between = ~torch.block_diag(*[torch.ones(count, count)] * heads).bool()
        off = G[between]
        layer: Any = plain(model).get_submodule(path)
        found.append(
            {
                "name": layer_name(path, i),
                "heads": heads,
                "directions": count,
                "matrix": pack(G[None]),
                "mean": off.mean().item() if len(off) else 0.0,
                "max": off.max().item() if len(off) else 0.0,
                "chance": (2 / (torch.pi * layer.dim)) ** 0.5,
            }
        )
    return found


def attention(
    model: nn.Module,
    inputs: Sequence[Tensor],
    *,
    tokens: Sequence[Any] | None,
    pictures: Tensor | None,
    targets: Sequence[str] | None,
    classes: Sequence[str] | None,
    examples: int,
    map_up_to: int,
    scale: Sequence[float] = (0.0, 1.0),
) -> dict[str, Any]:
    """Every head of every layer on each example, without padding."""
    causal = any(mechanism.causal for _, mechanism in created(plain(model), [t[:1] for t in inputs]))
    row = -1 if causal else 0
    shown: list[dict[str, Any]] = []
    layers: list[dict[str, Any]] = []
    for i in range(examples):
        one = [t[i : i + 1] for t in inputs]
        views, output = attention_views(model, one, row=row, map_up_to=map_up_to)
        first = views[0]
        keys = first.row.shape[-1] if len(first.row) == 1 else 0  # those of a window say nothing about the image
        grid = list(first.windows.grid) if first.windows else image_grid(plain(model), one[0], pictures, keys)
        own = [v for v in views if not v.memory and not CROSS.search(v.path)]
        mask = None
        if own:
            mask = torch.ones(1, own[0].row.shape[-1]) if own[0].mask is None else own[0].mask
        words = tokens[i] if tokens else None
        texts = _texts(_documents(plain(model), one), words, grid, prefix_tokens(plain(model)), mask)
        decoded = next((v.row.shape[-1] for v in own if "decoder" in v.path), 0)
        if len(texts) == 1 and decoded and any("encoder" in v.path for v in own):  # made by the model itself
            texts.append([f"token {n + 1}" for n in range(decoded)])
        packed, mask = [], None
        for v in views:
            mask = mask if v.memory or CROSS.search(v.path) else v.mask  # read by the tokens of the view before
            if v.windows:
                packed.append(_packed_windows(v, v.windows, map_up_to))
            else:
                packed.append(_packed_view(v, texts if len(v.row) == 1 else [], row, grid, mask))
        common: list[str] = next((view["tokens"] for view in packed if view["tokens"]), [])
        if not common and texts and views[0].map is not None:  # all layers read slots: label the queries
            common = _labels(texts[0], views[0].map.shape[2]) or []
        for view in packed:  # usually all layers see the same tokens: store them once
            if view["tokens"] == common:
                view["tokens"] = "shared"
        shown.append(
            {
                "tokens": common,
                "grid": grid,
                "picture": _picture(pictures[i]) if pictures is not None else None,
                "prediction": _prediction(output, classes, scale, one[0]),
                "target": targets[i] if targets else "",
            }
        )
        if not layers:
            layers = [
                {"name": layer_name(v.path, n), "path": v.path, "mechanisms": v.mechanisms, "examples": []}
                for n, v in enumerate(views)
            ]
        for layer, view in zip(layers, packed, strict=True):
            layer["examples"].append(view)
    return {"examples": shown, "layers": layers}


def facts(model: nn.Module, layers: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """`layers` are those of `attention`; a layer with a memory or cross-attention is one."""
    inner = plain(model)
    found = {"model": type(inner).__name__, "parameters": f"{sum(p.numel() for p in inner.parameters()):,}"}
    if names := {re.sub(" · (memory|cross|call).*", "", layer["name"]) for layer in layers}:
        found["attention layers"] = str(len(names))
    kinds = sorted({mechanism.name for _, mechanism in outermost(inner)})
    return found | ({"attention": ", ".join(kinds)} if kinds else {})


def layer_name(path: str, index: int) -> str:
    """'encoder.blocks.3.attention' is layer 4, 'stages.0.blocks.1' layer 1.2; paths without a number use `index`."""
    numbers = re.findall(r"(?:^|\.)([^.\d]*)(\d+)(?=\.|$)", path.split(" (call")[0])
    counted = [str(int(number) + (word[-1:] in ("", "_"))) for word, number in numbers]  # 'block1' counts from one
    name = f"layer {'.'.join(counted) or index + 1}"
    for word in ("decoder", "memory", "cross"):
        if CROSS.search(path) if word == "cross" else word in path:
            name += f" · {word}"
    call = re.search(r"\(call (\d+)\)", path)
    return name + (f" · call {call[1]}" if call else "")


def cache_dots(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"name": layer_name(path, i), "path": path, "values": _rounded(share)}
        for i, (path, share) in enumerate(cache_shares(model))
    ]


def branches(model: nn.Module, inputs: Sequence[Tensor], grids: Sequence[list[int] | None]) -> dict[str, Any]:
    """The two branches of every cached layer for each example, and an explanation if some are missing."""
    if not has_cache(model):
        return {"examples": [], "missing": ""}
    found, missing = [], ""
    for i, grid in enumerate(grids):
        try:
            views, windows = branch_views(model, [t[i : i + 1] for t in inputs], grid=grid)
        except ValueError as error:  # eval_update: inspection would change the streams
            return {"examples": [], "missing": f"No maps: {error}."}
        if windows:
            missing = f"{len(windows)} layers use window attention and have no map of the whole image."
        found.append(
            [
                {
                    "name": layer_name(v.path, n),
                    "grid": list(v.own.shape) if v.own.dim() == 2 else None,
                    "share": float(f"{v.share.mean().item():.3g}"),
                    "maps": pack(torch.stack([v.own, v.memory])),
                }
                for n, v in enumerate(views)
            ]
        )
    return {"examples": found if any(found) else [], "missing": missing}


def _block_names(model: nn.Module) -> list[str]:
    return [layer_name(path, i) for i, (path, _) in enumerate(blocks_of(model))]


def _packed_view(
    view: AttentionView, texts: list[list[str]], row: int, grid: list[int] | None, mask: Tensor | None
) -> dict[str, Any]:
    """A view of one example without padding; `tokens` is None if the keys are slots of a memory. `mask` is that of the
    queries."""
    one, full = view.row[0], None if view.map is None else view.map[0]
    cross, document = bool(CROSS.search(view.path)), min(view.call, len(texts)) - 1
    if "decoder" in view.path and not cross and len(texts) > 1:
        document = 1
    labels = _labels(texts[document], one.shape[-1]) if texts and not view.memory else None
    queries = None  # if they are neither the keys nor the tokens of the first document
    if full is not None:
        if len(texts) > 1 and (cross or (view.memory and document)):
            queries = _labels(texts[1], full.shape[1])
        if mask is not None and full.shape[1] == mask.shape[1]:
            full, queries = full[:, mask[0]], _real(queries, mask[0])
        if full.shape[1]:
            one = full[:, row]
    if view.mask is not None:
        real = view.mask[0]
        one = one[:, real]
        labels = _real(labels, real)
        full = None if full is None else full[:, :, real]
    packed: dict[str, Any] = {"tokens": labels, "row": pack(one), "query": row}
    keys = one.shape[-1]
    if labels is None and grid and texts and not view.memory and (size := proportional(grid, (keys, keys - 1))):
        packed |= {"grid": size, "tokens": _labels(_cells(size), keys)}  # the keys of a pyramid
    if view.memory:
        packed["slots"] = True
        if grid and 0 <= one.shape[-1] - grid[0] * grid[1] <= 1:  # each slot corresponds to a token of the image
            packed["grid"] = grid
    if full is not None:
        packed["map"] = pack(full)
        if queries is not None:
            packed["queries"] = queries
    if len(view.row) > 1:
        packed["parts"] = len(view.row)
    return packed


def _packed_windows(view: AttentionView, windows: Windows, map_up_to: int) -> dict[str, Any]:
    """All windows of an image together: a query attends to the tokens of its window."""
    grid, tokens = windows
    window, place = (tokens == 0).nonzero()[0].tolist()
    one, query = (view.row[0], tokens[0, 0]) if view.map is None else (view.map[window, :, place], 0)
    keys = tokens[0 if view.map is None else window]
    row = one.new_zeros(len(one), grid[0] * grid[1])
    row[:, keys[keys >= 0]] = one[:, keys >= 0]
    packed: dict[str, Any] = {"tokens": _cells(grid), "grid": list(grid), "row": pack(row), "query": int(query)}
    if view.map is not None and tokens.numel() * tokens.shape[1] <= 4 * map_up_to**2:
        packed["windows"] = {"tokens": tokens.tolist(), "map": pack(view.map.transpose(0, 1))}
    return packed


def _cells(grid: Sequence[int]) -> list[str]:
    return [f"row {r + 1}, column {c + 1}" for r in range(grid[0]) for c in range(grid[1])]


def _real(labels: list[str] | None, mask: Tensor) -> list[str] | None:
    return [t for t, kept in zip(labels, mask.tolist(), strict=True) if kept] if labels else None


def _labels(tokens: list[str], keys: int) -> list[str] | None:
    """The tokens a layer saw, with CLS first if it saw one more; None if the number does not match."""
    if keys == len(tokens):
        return tokens
    return ["[CLS]", *tokens] if keys == len(tokens) + 1 else None


def _documents(model: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The arguments that hold tokens, without masks, positions and the like."""
    names = [*signature(model.forward).parameters, *[""] * len(inputs)]
    others = ("mask", "segment", "position", "type")
    named = zip(names[1:], inputs[1:], strict=False)
    return [inputs[0], *(t for name, t in named if not any(word in name for word in others))]


def _texts(
    inputs: Sequence[Tensor], tokens: Any, grid: list[int] | None, first: list[str], mask: Tensor | None
) -> list[list[str]]:
    """The tokens of each input document: words if known, else ids or image cells. `mask` is that of the first document,
    maybe after a class token."""
    if grid:
        return [(first if first != ["[CLS]"] else []) + _cells(grid)]  # `_labels` adds it to the layers that have it
    documents = [
        t[0] for t in inputs if t.dim() == 3 or (t.dim() == 2 and not t.is_floating_point() and t.dtype != torch.bool)
    ]
    if tokens is None:
        return [[str(i) for i in ids.tolist()] for ids in documents if ids.dim() == 1]
    given = [tokens] if not tokens or isinstance(tokens[0], str) else tokens
    masks = [mask, *[None] * len(documents)]
    return [_placed(w, len(ids), real) for w, ids, real in zip(given, documents, masks, strict=False)]


def _placed(words: Sequence[Any], length: int, mask: Tensor | None) -> list[str]:
    """A word for each token; fewer words are those of the real tokens."""
    words = [str(word) for word in words[:length]]
    real = list(range(len(words))) if mask is None else mask[0, -length:].nonzero().flatten().tolist()
    if len(words) == length:
        return words
    if len(words) != len(real):
        raise ValueError(
            f"tokens has {len(words)} words for {len(real)} tokens ({length} with padding): give one for each, "
            "special tokens included"
        )
    found = dict(zip(real, words, strict=True))
    return [found.get(at, "") for at in range(length)]


def _picture(image: Tensor) -> dict[str, Any]:
    """(C, height, width) or (height, width) as RGB bytes, scaled to the full range."""
    image = image.float().cpu()
    image = image[None] if image.dim() == 2 else image
    image = image.expand(3, -1, -1) if image.shape[0] == 1 else image[:3]
    low, high = image.min(), image.max()
    pixels = ((image - low) / (high - low).clamp(min=1e-12) * 255).round().to(torch.uint8)
    raw = pixels.permute(1, 2, 0).contiguous().numpy().tobytes()
    return {"height": pixels.shape[1], "width": pixels.shape[2], "bytes": base64.b64encode(raw).decode("ascii")}


def _prediction(output: Any, classes: Sequence[str] | None, scale: Sequence[float], given: Tensor) -> str:
    if not isinstance(output, Tensor) or output.dim() != 2:
        return ""
    if classes is None and output.shape == given.shape:  # one value per token, such as its loss
        return ""
    if output.shape[1] == 1:  # a number
        return f"{scale[0] + scale[1] * output.item():.4g}"
    share, best = output.float().softmax(-1)[0].max(-1)
    name = classes[int(best)] if classes else f"class {int(best)}"
    return f"{name} ({share.item():.0%})"


def _rounded(values: Tensor) -> list[float]:
    return [float(f"{v:.6g}") for v in values.tolist()]
