"""Self-contained HTML pages: one design for reports, inspection, the demo and live views.

A page loads nothing: style, scripts and data are inside, and its content security policy forbids everything else. The
data is JSON with every `<` escaped, and the scripts insert it only as text, so data can never become markup.

    page("Results", [heading("Digits"), table(["model", "accuracy"], [["full", "97.1"]]), chart("loss", [Curve(…)])])
"""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

Part = dict[str, Any]


@dataclass
class Curve:
    """A line of a chart. Curves with the same name share a colour; `marks` are labelled positions on the x axis."""

    name: str
    points: Sequence[tuple[float, float]]
    marks: Sequence[tuple[float, str]] = field(default_factory=list)


def heading(text: str) -> Part:
    return {"kind": "heading", "text": text}


def text(text: str, *, soft: bool = False) -> Part:
    return {"kind": "text", "text": text, "soft": soft}


def notes(items: Iterable[str]) -> Part:
    return {"kind": "list", "items": list(items)}


def code(text: str) -> Part:
    return {"kind": "code", "text": text}


def table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> Part:
    """A table that the reader can sort."""
    return {"kind": "table", "head": list(head), "rows": [list(row) for row in rows], "caption": caption}


def chart(title: str, curves: Iterable[Curve], *, x: str = "step", y: str = "", log: str = "", note: str = "") -> Part:
    """A line chart. `x` and `y` name the axes with their units; `log` is "x", "y" or "xy"."""
    series = [
        {
            "name": curve.name,
            "points": [list(p) for p in curve.points if math.isfinite(p[0]) and math.isfinite(p[1])],
            "marks": [list(mark) for mark in curve.marks],
        }
        for curve in curves
    ]
    axes = {name: {"label": label, "log": name in log} for name, label in (("x", x), ("y", y))}
    return {"kind": "chart", "title": title, "note": note, **axes, "series": series}


def gallery(title: str, images: Iterable[tuple[bytes, str]], note: str = "") -> Part:
    """Images, as the bytes of PNG files, with their captions."""
    shown = [
        {"source": f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}", "caption": caption}
        for png, caption in images
    ]
    return {"kind": "gallery", "title": title, "note": note, "images": shown}


def page(
    title: str,
    parts: Iterable[Part],
    *,
    lead: str = "",
    facts: Sequence[tuple[str, str]] = (),
    footer: str = "",
) -> str:
    """A page of parts, as HTML text."""
    data = {"title": title, "lead": lead, "facts": list(facts), "parts": list(parts), "footer": footer}
    return render(data, js=_own("parts.js"))


def live(data: Mapping[str, Any]) -> str:
    """A page of parts that asks its own server for `data.json` every two seconds."""
    return render(data, js=_own("parts.js") + _own("live.js"), connect="'self'")


def render(data: Mapping[str, Any], *, js: str, css: str = "", connect: str = "'none'") -> str:
    """The HTML text of `data`, drawn by the shared scripts and `js`. `data["title"]` is the title."""
    # "</script" anywhere in the JSON would end the script element, so escape every "<".
    payload = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    filled = {
        "title": html.escape(data["title"]),
        "css": _own("style.css") + css,
        "js": _own("script.js") + _own("chart.js") + js,
        "data": payload,
        "connect": connect,
    }
    before, *rest = _own("page.html").split("{{")
    pieces = [before]
    for piece in rest:  # fill each placeholder once, so that data that looks like a placeholder stays data
        name, _, after = piece.partition("}}")
        pieces += [filled[name], after]
    return "".join(pieces)


def _own(name: str) -> str:
    return (resources.files(__package__) / name).read_text("utf-8")
