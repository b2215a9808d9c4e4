"""The command `weft demo`: the five papers, measured on this machine in about two minutes, on one page."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..demo.story import Story

PAGE = "demo.html"


def demo(
    out: Annotated[Path, typer.Option(help="output folder; an earlier demo in it is removed")] = Path("runs/demo"),
    quick: Annotated[bool, typer.Option("--quick", help="only a few steps, to check that it runs")] = False,
    seed: Annotated[int, typer.Option(help="seed of weights and data order")] = 0,
) -> None:
    """Train and measure small models of all five papers on built-in data, and write one page about them."""
    print("weft demo: seven parts, about two minutes on two cores", flush=True)
    import dataclasses
    from functools import partial

    from rich.status import Status

    from ..demo import cached, crate, long, pathways, resumed, swapped, wide
    from ..demo.runs import RUNS, Failed, train_all
    from ..demo.story import QUICK, Scale
    from ..lab.say import console, say

    began = time.perf_counter()
    _empty(out)
    scale = dataclasses.replace(QUICK if quick else Scale(), seed=seed)
    screen = console()
    stories: list[Story] = []

    def show(tell: partial[Story]) -> None:
        title = tell.func.__module__.rpartition(".")[2]
        with Status(f"{len(stories) + 1}/7 {title} …", console=screen):
            story = tell()
        stories.append(story)
        say(f"{len(stories)}/7 {story.title} ({time.perf_counter() - began:.0f} s)\n    {story.found}")

    show(partial(long.tell, out, scale))  # first, while nothing else runs
    show(partial(swapped.tell, out, scale))
    say(f"    training {len(RUNS)} models of handwritten digits, two at a time; one of them is killed and resumed")
    try:
        with Status("starting …", console=screen) as status:
            killed_at = train_all(out, scale, status.update)
    except Failed as error:
        say(str(error), error=True)
        raise typer.Exit(1) from None
    for part in (pathways, wide, cached, crate):
        show(partial(part.tell, out, scale))
    show(partial(resumed.tell, out, scale, killed_at))
    (out / PAGE).write_text(page_of(stories, time.perf_counter() - began), encoding="utf-8")
    say(f"\nOpen {(out / PAGE).resolve()}   ({time.perf_counter() - began:.0f} s in total)")
    if not all(story.holds for story in stories):
        raise typer.Exit(1)


def page_of(stories: list[Story], seconds: float) -> str:
    from ..lab.report import origin
    from ..lab.run import environment
    from ..pages import heading, page, text

    here = environment()
    parts = []
    for number, story in enumerate(stories, 1):
        parts += [heading(f"{number}. {story.title}"), text(story.proves), text(story.found, soft=True), *story.parts]
        parts += [text(story.source, soft=True)] if story.source else []
    return page(
        "weft demo",
        parts,
        lead="Five papers about attention, each with a small model that was trained and measured on this machine.",
        facts=[("parts", str(len(stories))), ("took", f"{seconds:.0f} s"), ("cores", str(here["cpus"])),
               ("torch", here["torch"])],
        footer=origin(here),
    )  # fmt: skip


def _empty(out: Path) -> None:
    """Remove an earlier demo; any other content raises an error."""
    from ..demo.runs import RUNS

    found = {path.name for path in out.iterdir()} if out.exists() else set()
    if found and (PAGE not in found or found - {PAGE, *RUNS, *(f"{name}.log" for name in RUNS)}):
        raise typer.BadParameter(f"{out} contains files that are not from an earlier demo: choose another --out")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / PAGE).touch()  # marks the folder, should the demo be stopped
