"""Wide attention: one wide layer against four."""

from __future__ import annotations

from pathlib import Path

from ..pages import table, text
from .digits import HEAD, charts, row
from .story import Scale, Story


def tell(out: Path, scale: Scale) -> Story:
    deep, wide = row("deep", out / "deep"), row("wide", out / "wide")
    ratio = float(deep[4]) / float(wide[4])
    return Story(
        "Deep or wide: one layer with all the heads",
        "A single layer with as many heads as the deep model is smaller and faster, at a similar accuracy.",
        f"accuracy {deep[2]} % deep, {wide[2]} % wide; the wide model is {ratio:.1f} × faster",
        [
            text(
                f"Both models have eight heads in total, in four layers or in one, and were trained for {scale.digits} "
                "steps."
            ),
            table(HEAD, [deep, wide], "Handwritten digits"),
            *charts({"deep": out / "deep", "wide": out / "wide"}),
        ],
        "Brown et al., Wide Attention Is The Way Forward For Transformers?, 2022",
    )
