"""The command `weft advise`: which attention to use, measured on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from .device import Device, chosen


def advise(
    length: Annotated[int, typer.Option(min=1, help="tokens per sequence")],
    causal: Annotated[bool, typer.Option("--causal", help="for language models; also measures decoding")] = False,
    device: Device = "",
    heads: Annotated[int, typer.Option(min=1, help="heads")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, help="width of a head")] = 64,
    batch: Annotated[int, typer.Option("--batch-size", "--batch", min=1, help="sequences per call")] = 1,
    precision: Annotated[str, typer.Option(help="32-true, tf32, bf16-mixed or bf16-true; default by device")] = "",
    only: Annotated[str, typer.Option(help="these mechanisms, separated by commas; default: the usual ones")] = "",
) -> None:
    """Measure the attention mechanisms at your length on this machine, and recommend some."""
    import math

    from ..lab.bench.advise import advise as measure
    from ..lab.say import say, show_table

    names = [name.strip() for name in only.split(",") if name.strip()]
    sizes = {"heads": heads, "head_dim": head_dim, "batch": batch}
    advice = measure(
        length, causal=causal, device=str(chosen(device)), precision=precision, only=names, progress=say, **sizes
    )

    def number(x: float) -> str:
        return "" if math.isnan(x) else f"{x:,.3g}" if x < 100 else f"{x:,.0f}"

    columns = ["attention", "ms", "MiB", *(["step ms", "state MiB"] if causal else []), "abilities"]
    rows = []
    for row in advice.rows:
        figures = [row.ms, row.mib, *([row.step_ms, row.state_mib] if causal else [])]
        rows.append((row.name, *map(number, figures), row.error or row.abilities))
    show_table(columns, rows, wrap=("abilities",))
    say("ms and MiB: one forward and backward of attention alone")
    for text in advice.reasons:
        say(f"- {text}")
