"""One self-contained HTML page about a model: no network, no libraries, opens from disk.

The data travels as JSON inside the page, with every `<` escaped, and the script puts text on the page as text only:
nothing that comes from data can become markup. The page's own policy forbids it to load anything.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from . import gather


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
    splits: Mapping[str, Sequence[Tensor]] | None = None,
    checkpoints: Iterable[tuple[str, gather.Loader]] = (),
    facts: Sequence[tuple[str, str]] = (),
    examples: int = 3,
    map_up_to: int = 256,
    heatmap: int = 50,
) -> Path:
    """Write the page about `model` and return its path.

    `inputs` is what the model is called with; its first `examples` rows are shown, with their `tokens` (each a list
    of words, or one list per document), `pictures` and `targets` where given, and `classes` for the names of
    predictions. `splits` are the inputs to measure on ({"train": …, "validation": …}); `checkpoints` are (label,
    state dict, or function that loads one into the model), measured one after the other, and the model has its own
    weights again afterwards.
    """
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    examples = min(examples, len(inputs[0]))
    if pictures is None and inputs[0].dim() == 4:
        pictures = inputs[0]
    curves = gather.curves(model, splits or {"these examples": inputs}, checkpoints)
    measured = examples if curves["charts"] else 0  # blocks that do not return tokens have none to draw
    attention = gather.attention(
        model,
        inputs,
        tokens=tokens,
        pictures=pictures,
        targets=targets,
        classes=classes,
        examples=examples,
        map_up_to=map_up_to,
    )
    data = {
        "title": title or type(model).__name__,
        "facts": gather.facts(model) + [list(pair) for pair in facts],
        "attention": attention,
        "curves": curves,
        "heatmaps": gather.heatmaps(model, inputs, examples=measured, size=heatmap),
        "coherence": gather.coherences(model),
        "cache": gather.cache_dots(model),
        "branches": gather.branches(model, inputs, [example["grid"] for example in attention["examples"]]),
    }
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(render(data), encoding="utf-8")
    return out


def render(data: Mapping[str, Any]) -> str:
    """The page as text."""
    parts = {name: (resources.files(__package__) / f"page.{name}").read_text("utf-8") for name in ("html", "css", "js")}
    # JSON inside a script element ends at "</script", wherever it stands: no "<" may be left in it.
    payload = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    page = parts["html"]
    filled = {"title": html.escape(data["title"]), "css": parts["css"], "js": parts["js"], "data": payload}
    before, *rest = page.split("{{")
    pieces = [before]
    for piece in rest:  # each slot is filled once, so that data which looks like a slot stays data
        name, _, after = piece.partition("}}")
        pieces += [filled[name], after]
    return "".join(pieces)
