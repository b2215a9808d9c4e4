"""What the mechanisms can do, as a table: the command `weft attentions`, and the README's."""

from __future__ import annotations

from typing import Annotated

import typer

from ..core.registry import AttentionInfo, attention_info, attentions

COLUMNS = ("name", "cost", "causal", "cross", "position bias", "learned", "steps", "kernel", "paper")


def row(info: AttentionInfo) -> tuple[str, ...]:
    directions = "no" if not info.causal else "both ways" if info.bidirectional else "only"
    mark = {True: "yes", False: "–"}
    learned = "yes, per position" if info.needs_max_length else mark[info.learned]
    able = (directions, mark[info.cross], mark[info.bias], learned, mark[info.steps], mark["triton" in info.backends])
    return (info.name, info.cost, *able, info.paper)


def markdown() -> str:
    """The table in Markdown, as it stands in the README."""
    lines = [" | ".join(COLUMNS), " | ".join("---" for _ in COLUMNS)]
    lines += [" | ".join((f"`{cells[0]}`", *cells[1:])) for cells in (row(attention_info(n)) for n in attentions())]
    return "\n".join(f"| {line} |" for line in lines)


def show_attentions(
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the table in Markdown.")] = False,
) -> None:
    """List the mechanisms: cost, abilities and papers."""
    if as_markdown:
        print(markdown())
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*COLUMNS, title="Attention mechanisms in weft")
    for name in attentions():
        table.add_row(*row(attention_info(name)))
    Console().print(table)
