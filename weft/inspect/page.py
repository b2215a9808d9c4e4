"""A self-contained HTML report about a model, in the design of `weft.pages`: no network, no libraries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from .. import pages
from . import gather
from .views import created
from .watch import arguments, plain


def report(
    model: nn.Module,
    inputs: Tensor | Sequence[Tensor],
    *,
    out: str | Path = "inspect.html",
    title: str = "",
    tokens: Sequence[Any] | None = None,
    pictures: Tensor | None = None,
    targets: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
    scale: Sequence[float] = (0.0, 1.0),
    splits: Mapping[str, Sequence[Tensor]] | None = None,
    checkpoints: Iterable[tuple[str, gather.Loader]] = (),
    facts: Sequence[tuple[str, str]] = (),
    examples: int = 3,
    map_up_to: int = 256,
    heatmap: int = 50,
    galleries: Sequence[Any] = (),
) -> Path:
    """Write the report about `model` and return its path.

    `inputs` are the model's arguments. The page shows the first `examples` rows, with `pictures` and `targets` if
    given, and with `tokens`: a list of words for each example, or one list per document, with a word for every token,
    or for every token that is not padding. `classes` are the class names; a model of numbers predicts scale[0] +
    scale[1] × its output. `splits` are the inputs to measure on, {"train": …, "validation": …}. `checkpoints` are pairs
    of a label and a state dict, or a function that loads one into the model. They are measured in turn; afterwards the
    model has its original weights. `galleries` (of `weft.pages.gallery`) are shown first. Without `inputs`, the page
    has only them and the weights of caches.
    """
    inputs, out = arguments(inputs), Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    data: dict[str, Any] = {
        "title": title or type(model).__name__,
        "galleries": list(galleries),
        "attention": {"examples": [], "layers": []},
        "curves": {"charts": []},
        "heatmaps": {"examples": []},
        "coherence": gather.coherences(model),
        "cache": gather.cache_dots(model),
        "branches": {"examples": [], "missing": ""},
    }
    if inputs:
        created(plain(model), [t[:1] for t in inputs])
        examples = min(examples, len(inputs[0]))
        for name, given in (("tokens", tokens), ("pictures", pictures), ("targets", targets)):
            if given is not None and len(given) < examples:
                raise ValueError(f"{name} has {len(given)} entries for {examples} examples: give one for each")
        if pictures is None and inputs[0].dim() == 4:
            pictures = inputs[0]
        curves = gather.curves(model, splits or {"these examples": inputs}, checkpoints)
        measured = examples if curves["charts"] else 0  # only blocks that return tokens have heatmaps
        attention = gather.attention(
            model,
            inputs,
            tokens=tokens,
            pictures=pictures,
            targets=targets,
            classes=classes,
            scale=scale,
            examples=examples,
            map_up_to=map_up_to,
        )
        data |= {
            "attention": attention,
            "curves": curves,
            "heatmaps": gather.heatmaps(model, inputs, examples=measured, size=heatmap),
            "branches": gather.branches(model, inputs, [example["grid"] for example in attention["examples"]]),
        }
    known = gather.facts(model, data["attention"]["layers"]) | dict(facts)
    data["facts"] = [list(pair) for pair in known.items()]
    out.write_text(render(data), encoding="utf-8")
    return out


def render(data: Mapping[str, Any]) -> str:
    """The report as HTML text."""
    own = resources.files(__package__)
    return pages.render(data, js=(own / "page.js").read_text("utf-8"), css=(own / "page.css").read_text("utf-8"))
