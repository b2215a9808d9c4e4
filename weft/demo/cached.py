"""Cached attention: a memory of earlier batches beside every attention layer."""

from __future__ import annotations

from pathlib import Path

from ..inspect import cache_shares
from ..lab import load_run
from ..pages import code, table, text
from .digits import HEAD, charts, row
from .story import Scale, Story


def tell(out: Path, scale: Scale) -> Story:
    plain, cached = row("plain", out / "deep"), row("cached", out / "cached")
    shares = cache_shares(load_run(out / "cached")[0])
    rows = [[path, f"{100 * float(share.mean()):.1f}"] for path, share in shares]
    mean = sum(float(share.mean()) for _, share in shares) / len(shares)
    return Story(
        "A cache: attention that remembers earlier batches",
        "One call gives every attention layer a gated memory that is trained with the model, and each layer learns how "
        "much of its output comes from it.",
        f"accuracy {plain[2]} % plain, {cached[2]} % cached; {100 * mean:.0f} % of the output comes from the cache",
        [
            code("weft.cache(model, ratio=0.5)"),
            table(HEAD, [plain, cached], "Handwritten digits"),
            text("The weight σ(λ) of the cache in each layer's output, mean of its heads:"),
            table(["layer", "from the cache, %"], rows, "Learned weights"),
            *charts({"plain": out / "deep", "cached": out / "cached"}),
        ],
        "Zhang et al., Cached Transformers: Improving Transformers with Differentiable Memory Cache, 2023",
    )
