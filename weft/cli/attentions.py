"""The table of mechanisms: the command `weft attentions`, docs/mechanisms.md, and a short form for the README."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..attention import AttentionInfo

SHORT = ("name", "cost", "causal", "kernel")
COLUMNS = ("name", "cost", "causal", "cross", "position bias", "learned", "steps", "kernel", "faster from", "paper")


def row(info: AttentionInfo) -> tuple[str, ...]:
    directions = "no" if not info.causal else "both ways" if info.bidirectional else "only"
    mark = {True: "yes", False: "–"}
    learned = "yes, per position" if info.needs_max_length else mark[info.learned]
    able = (directions, mark[info.cross], mark[info.bias], learned, mark[info.steps], mark["triton" in info.backends])
    faster = (
        f"over {info.slower_up_to:,}" if info.slower_up_to else f"{info.faster_from:,}" if info.faster_from else "–"
    )
    return (info.name, info.cost, *able, faster, info.paper)


def markdown(columns: tuple[str, ...] = COLUMNS) -> str:
    """The table in Markdown."""
    from ..attention import attention_info, attentions

    lines = [" | ".join(columns), " | ".join("---" for _ in columns)]
    for name in attentions():
        cells = dict(zip(COLUMNS, row(attention_info(name)), strict=True)) | {"name": f"`{name}`"}
        lines.append(" | ".join(cells[column] for column in columns))
    return "\n".join(f"| {line} |" for line in lines)


def show_attentions(
    as_markdown: Annotated[bool, typer.Option("--markdown", help="print the table as Markdown")] = False,
) -> None:
    """List the mechanisms with their cost, features and papers."""
    if as_markdown:
        print(markdown())
        return
    from ..attention import attention_info, attentions
    from ..lab.say import show_table

    rows = [row(attention_info(name)) for name in attentions()]
    show_table(COLUMNS, rows, "Attention mechanisms in weft", wrap=("paper",))
