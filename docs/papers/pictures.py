"""The pictures of the papers' pages: python docs/papers/pictures.py writes NAME.svg beside this file."""

from __future__ import annotations

import random
from html import escape
from pathlib import Path

INK, SOFT, LINE, WARM, COOL, GREEN = "#1f2328", "#5d636b", "#d8d4cc", "#d55e00", "#2458c6", "#00785a"


class Picture:
    """Shapes on a white card, so that it is readable in light and dark mode."""

    def __init__(self, width: int, height: int, title: str):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'aria-label="{escape(title)}" font-family="system-ui, sans-serif">',
            f'<rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>',
        ]

    def box(self, x: float, y: float, w: float, h: float, fill: str, strength: float = 1, edge: str = "none") -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="2" fill="{fill}" '
            f'fill-opacity="{strength:g}" stroke="{edge}"/>'
        )

    def text(self, x: float, y: float, text: str, size: int = 13, fill: str = INK, anchor: str = "start") -> None:
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        length = max(abs(x2 - x1), abs(y2 - y1))
        dx, dy = 5 * (x2 - x1) / length, 5 * (y2 - y1) / length
        self.parts.append(
            f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}M{x2 - dx - dy:g} {y2 - dy - dx:g}L{x2:g} {y2:g}'
            f'L{x2 - dx + dy:g} {y2 - dy + dx:g}" fill="none" stroke="{SOFT}" stroke-width="1.5"/>'
        )

    def named(self, x: float, y: float, w: float, h: float, text: str, fill: str) -> None:
        self.box(x, y, w, h, fill, 0.14, fill)
        lines = text.split("\n")
        for n, line in enumerate(lines):
            self.text(x + w / 2, y + h / 2 + 5 + 17 * (n - (len(lines) - 1) / 2), line, 13, INK, "middle")

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


def combiner(length: int = 16, block: int = 4, cell: int = 17) -> str:
    """The direct tokens and the spans of every query of combiner-fixed, causal."""
    picture = Picture(640, 330, "Which tokens a query of combiner-fixed reads directly, and which through a summary")
    for i in range(length):
        for j in range(i + 1):
            own = i // block == j // block
            shade = 0.9 if own else (0.3, 0.5)[j // block % 2]
            picture.box(24 + j * cell, 34 + i * cell, cell - 1, cell - 1, WARM if own else COOL, shade)
    picture.text(24, 22, "key →", 12, SOFT)
    x = 330
    picture.text(x, 46, "Each row is a query, each column a key.", 13, SOFT)
    picture.box(x, 66, 14, 14, WARM, 0.9)
    picture.text(x + 22, 78, "direct: its own block, token by token")
    picture.box(x, 94, 14, 14, COOL, 0.5)
    picture.text(x + 22, 106, "spans: one summary per earlier block")
    picture.text(x, 144, "One softmax covers both, so every earlier")
    picture.text(x, 162, "token has a positive weight.")
    picture.text(x, 194, "Blocks of √L tokens: a query compares with", 13, SOFT)
    picture.text(x, 212, "about √L tokens and √L summaries,", 13, SOFT)
    picture.text(x, 230, "not with L tokens.", 13, SOFT)
    return picture.svg()


def subsampled(length: int = 16, windows: int = 4, cell: int = 17, sigma: float = 0.2) -> str:
    """The sources of every target for two draws of locally biased sampling, bidirectional."""
    picture = Picture(
        640, 360, "Sources that each target reads in two training steps, and in the dense model afterwards"
    )
    size, draws = length // windows, random.Random(1)
    for number, name in enumerate(("step 1", "step 2")):
        left = 24 + number * 310
        noise = [s + sigma * length * draws.gauss(0, 1) for s in range(length)]
        order = sorted(range(length), key=noise.__getitem__)
        picture.text(left, 22, f"{name}: source →", 12, SOFT)
        for t in range(length):
            chosen = order[t // size * size : (t // size + 1) * size]
            for s in range(length):
                hit = s in chosen
                picture.box(
                    left + s * cell, 32 + t * cell, cell - 1, cell - 1, WARM if hit else LINE, 0.9 if hit else 0.35
                )
    picture.text(
        24, 330, "Each row is a target. A window of 4 targets reads 4 of 16 sources, near ones more often, and"
    )
    picture.text(24, 348, "each step draws again. After training, the model is dense: every target reads every source.")
    return picture.svg()


def cached() -> str:
    picture = Picture(640, 250, "A cached layer: self-attention and attention over a gated cache, mixed per head")
    picture.named(20, 100, 90, 44, "input x", SOFT)
    picture.named(190, 40, 170, 44, "self-attention", WARM)
    picture.named(190, 160, 170, 60, "cache C\nfixed number of slots", COOL)
    picture.named(420, 160, 130, 60, "attention\nover the cache", COOL)
    picture.named(420, 40, 190, 60, "mix per head\nσ(λ) cache + (1 − σ(λ)) self", GREEN)
    picture.arrow(110, 112, 190, 66)
    picture.arrow(110, 132, 190, 180)
    picture.text(112, 176, "gates g", 12, SOFT)
    picture.arrow(360, 62, 420, 66)
    picture.arrow(360, 190, 420, 190)
    picture.arrow(485, 160, 485, 100)
    picture.arrow(610, 70, 632, 70)
    picture.text(190, 240, "Training rewrites the cache; prediction only reads it.", 12, SOFT)
    return picture.svg()


def wide() -> str:
    picture = Picture(640, 300, "Six layers of 8 heads, and one layer of 48 heads")
    for name, left, layers, heads in (
        ("deep: 6 layers of 8 heads", 20, 6, 8),
        ("wide: 1 layer of 48 heads", 330, 1, 48),
    ):
        picture.text(left, 28, name, 14)
        for layer in range(layers):
            y = 226 - layer * 36
            columns = 24
            for head in range(heads):
                picture.box(left + head % columns * 11, y - 11 * (head // columns), 9, 9, WARM, 0.9)
            picture.box(
                left + (100 if heads == 8 else 0),
                y + (0 if heads == 8 else 16),
                164 if heads == 8 else 264,
                9,
                COOL,
                0.5,
            )
    picture.box(20, 262, 12, 12, WARM, 0.9)
    picture.text(38, 273, "a head")
    picture.box(110, 262, 12, 12, COOL, 0.5)
    picture.text(128, 273, "a feed-forward layer: the deep model has six, the wide one has one", 13)
    return picture.svg()


def crate() -> str:
    picture = Picture(640, 230, "A CRATE layer: compress towards subspaces, then sparsify in a dictionary")
    draws = random.Random(3)
    columns = (
        ("tokens z", 20, lambda i, j: 0.15 + 0.75 * draws.random()),
        ("after MSSA: compressed", 240, lambda i, j: (0.75, 0.15)[(j // 3) % 2 != i // 4 % 2] + 0.1 * draws.random()),
        ("after ISTA: sparse", 460, lambda i, j: 0.9 if (j // 3) % 2 == i // 4 % 2 and draws.random() > 0.55 else 0.0),
    )
    for name, left, value in columns:
        picture.text(left, 26, name)
        for i in range(8):
            for j in range(12):
                strength = round(value(i, j), 2)
                picture.box(left + 13 * j, 40 + 17 * i, 12, 16, WARM if strength else LINE, strength or 0.4)
    for left in (182, 402):
        picture.arrow(left + 4, 108, left + 48, 108)
    picture.text(
        20, 206, "z + MSSA(LN z): one step down the coding rate.  ISTA(LN h): one step to fewer non-zeros.", 13, SOFT
    )
    return picture.svg()


PICTURES = {"combiner": combiner, "subsampled": subsampled, "cached": cached, "wide": wide, "crate": crate}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (Path(__file__).parent / f"{name}.svg").write_text(draw(), encoding="utf-8")
