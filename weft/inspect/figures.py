"""The plots of the HTML report as matplotlib figures, for papers and notebooks. Each function returns a Figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .branches import BranchView

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELS = {
    "rate": "R, unit tokens",
    "subspace_rate": "Rᶜ after compression",
    "projected_rate": "Rᶜ before attention, unit tokens",
    "nonzero": "share of non-zeros",
}


def layer_curves(measures: Mapping[str, Mapping[str, Tensor]], keys: Sequence[str] | None = None) -> Figure:
    """Mean and standard deviation of each measurement per layer; `measures` is {label: result of `measure`}."""
    keys = keys or [key for key in LABELS if any(key in found for found in measures.values())]
    figure, axes = _subplots(1, len(keys), 4.2, 3.0)
    for axis, key in zip(axes.flat, keys, strict=True):
        for line, found in measures.items():
            if key in found:
                values = found[key]
                x = range(1, len(values) + 1)
                spread = values.std(1) if values.shape[1] > 1 else values.new_zeros(len(values))
                low, mean, high = (
                    t.numpy() for t in (values.mean(1) - spread, values.mean(1), values.mean(1) + spread)
                )
                axis.plot(x, mean, marker="o", markersize=3, label=line)
                axis.fill_between(x, low, high, alpha=0.15)
        axis.set(xlabel="layer", ylabel=LABELS[key])
        axis.grid(alpha=0.3)
    axes.flat[0].legend(frameon=False)
    return figure


def token_heatmaps(tokens: Tensor, *, top: float | None = None, columns: int = 6) -> Figure:
    """Sub-matrices (layers, tokens, channels) of `tokens_per_layer`; range 0 to 2 if none is negative, as published."""
    signed = bool((tokens < 0).any())
    top = top if top is not None else (tokens.abs().quantile(0.99).item() if signed else 2.0)
    figure, axes = _grid(len(tokens), columns, 1.8)
    for i, (axis, values) in enumerate(zip(axes, tokens, strict=True)):
        shown = axis.imshow(
            values.numpy(), vmin=-top if signed else 0, vmax=top, cmap="RdBu_r" if signed else "viridis"
        )
        axis.set_title(f"layer {i + 1}", fontsize=9)
    figure.colorbar(shown, ax=axes, shrink=0.8)
    return figure


def subspaces(coherences: Sequence[tuple[str, Tensor, int]], columns: int = 6) -> Figure:
    """|cos| between the directions of all heads, per layer; takes the result of `subspace_coherence`."""
    figure, axes = _grid(len(coherences), columns, 1.8)
    for i, (axis, (_, matrix, count)) in enumerate(zip(axes, coherences, strict=True)):
        shown = axis.imshow(matrix.numpy(), vmin=0, vmax=1, cmap="magma")
        for edge in range(count, len(matrix), count):
            axis.axhline(edge - 0.5, color="white", linewidth=0.3)
            axis.axvline(edge - 0.5, color="white", linewidth=0.3)
        axis.set_title(f"layer {i + 1}", fontsize=9)
    figure.colorbar(shown, ax=axes, shrink=0.8)
    return figure


def attention_over_text(
    row: Tensor, tokens: Sequence[str], *, heads: Sequence[int] | None = None, width: int = 60
) -> Figure:
    """The words of a text once per head, with the weights as background colours; `row` is (H, L)."""
    heads = range(len(row)) if heads is None else heads
    lines = _wrapped(tokens, width)
    figure, axes = _subplots(len(heads), 1, 0.065 * width, 0.3 + 0.22 * len(lines))
    for axis, head in zip(axes.flat, heads, strict=True):
        weights = row[head] / row[head].abs().max().clamp(min=1e-30)
        axis.set(xlim=(0, width), ylim=(len(lines), 0))
        axis.axis("off")
        axis.set_title(f"head {head + 1}", fontsize=8, loc="left")
        for y, line in enumerate(lines):
            for index, x, word in line:
                w = weights[index].item()
                colour = (0.85, 0.35, 0.05, abs(w)) if w >= 0 else (0.15, 0.35, 0.8, abs(w))
                box = {"facecolor": colour, "edgecolor": "none", "pad": 1.0}
                text = word.replace("$", r"\$")  # a dollar sign would start a formula
                axis.text(x, y + 0.5, text, fontsize=7, va="center", family="monospace", bbox=box)
    return figure


def attention_maps(maps: Tensor, columns: int = 8, names: Sequence[str] | None = None) -> Figure:
    """The effective attention (H, Lq, Lk) of every head."""
    figure, axes = _grid(len(maps), columns, 1.4)
    for i, (axis, values) in enumerate(zip(axes, maps, strict=True)):
        top = values.abs().max().clamp(min=1e-30).item()
        signed = bool((values < 0).any())
        axis.imshow(values.numpy(), vmin=-top * signed, vmax=top, cmap="RdBu_r" if signed else "viridis")
        axis.set_title(names[i] if names else f"head {i + 1}", fontsize=8)
    return figure


def cache_share(shares: Sequence[tuple[str, Tensor]]) -> Figure:
    """σ(λ) per head and layer; takes the result of `cache_shares`."""
    figure, axes = _subplots(1, 1, 5.0, 3.0)
    axis = axes.flat[0]
    for i, (_, values) in enumerate(shares):
        axis.scatter([i + 1] * len(values), values.numpy(), s=18, alpha=0.7, color="tab:orange")
    axis.axhline(0.5, color="grey", linestyle="--", linewidth=1)
    axis.set(xlabel="layer", ylabel="σ(λ), share of the cache", ylim=(0, 1), xticks=range(1, len(shares) + 1))
    return figure


def branches(views: Sequence[BranchView]) -> Figure:
    """Maps of the input branch and the cache branch of each layer; takes the views of `branch_views`."""
    if not views:
        raise ValueError("there are no views to draw: pass the first result of `branch_views`")
    images = any(view.own.dim() == 2 for view in views)
    figure, axes = _subplots(len(views), 2, 1.9 if images else 3.6, 2.0 if images else 0.7)
    for pair, view in zip(axes, views, strict=True):
        for axis, name, values in zip(pair, ("self", "cache"), (view.own, view.memory), strict=True):
            shown = axis.imshow(
                values.numpy().reshape(-1, values.shape[-1]), vmin=0, vmax=1, cmap="viridis",
                aspect="equal" if values.dim() == 2 else "auto",
            )  # fmt: skip
            axis.set(xticks=[], yticks=[])
            axis.set_title(f"{view.path}: {name}", fontsize=7)
    figure.colorbar(shown, ax=axes, shrink=0.8)
    return figure


def _subplots(rows: int, columns: int, width: float, height: float) -> tuple[Figure, Any]:
    # Create the Figure without pyplot: no open figures, no display needed.
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the figures need matplotlib: pip install 'weft[lab]'") from error
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _grid(count: int, columns: int, size: float) -> tuple[Figure, Any]:
    columns = min(columns, count)
    rows = -(-count // columns)
    figure, axes = _subplots(rows, columns, size, size)
    for axis in axes.flat:
        axis.axis("off")
    return figure, axes.flat[:count]


def _wrapped(tokens: Sequence[str], width: int) -> list[list[tuple[int, int, str]]]:
    """(index, column, word) per line."""
    lines: list[list[tuple[int, int, str]]] = [[]]
    x = 0
    for i, token in enumerate(tokens):
        if x and x + len(token) > width:
            lines.append([])
            x = 0
        lines[-1].append((i, x, token))
        x += len(token) + 1
    return lines
