"""`weft train`: an option for every field of the TrainConfig, and help with the defaults of a task."""

from __future__ import annotations

import functools
import inspect
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ..tasks.config import OPTIONAL, TrainConfig, field_help, field_types
from .errors import CANNOT_SAVE, DIVERGED, INTERRUPTED, MISCOMPILED, NO_DATA, NO_MEMORY
from .say import say


class TrainCommand(TyperCommand):
    """Help in sections. `weft train TASK --help` shows only the task's options, with its defaults."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta["weft.words"] = list(args)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        given, *_ = self.make_parser(ctx).parse_args(list(ctx.meta["weft.words"]))
        task, values, presets, hidden = _defaults(given.get("task"), given.get("preset"))
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None or parameter.name in hidden or (task and parameter.name == "task"):
                continue
            value = ", ".join(presets) if parameter.name == "preset" else values.get(parameter.name)
            shown = {True: "yes", False: "no"}.get(value, value) if isinstance(value, bool) else value
            text = record[1] + (f" [{shown}]" if shown not in ("", None) else "")
            sections.setdefault(_sections().get(parameter.name, "run"), []).append((record[0], text))
        for title, records in sections.items():
            with formatter.section(title.capitalize()):
                formatter.write_dl(records)
        if not task:
            formatter.write_paragraph()
            formatter.write_text("The defaults depend on the task: weft train TASK --help shows them.")


def _defaults(name: Any, preset: Any) -> tuple[str, Mapping[str, Any], Iterable[str], set[str]]:
    """The name of the task, the values of its fields, its presets, and the fields that it does not read."""
    if not isinstance(name, str):  # not given: None, or an object of its own in some versions of click
        return "", {}, (), set()
    from ..tasks.registry import get_task, resolve

    try:
        entry = get_task(resolve(name)[0])
    except (ValueError, FileNotFoundError):
        return "", {}, (), set()
    values = {name: getattr(TrainConfig, name) for name in field_types()}
    values |= dict(entry.defaults) | dict(entry.presets.get(preset, {}))
    return entry.name, values, entry.presets, {name for name in OPTIONAL if name not in entry.reads}


@functools.cache
def _sections() -> dict[str, str]:
    """Field -> the comment above its group in TrainConfig."""
    found, title = {}, "run"
    for line in inspect.getsource(TrainConfig).splitlines():
        if heading := re.match(r"    # (.+)", line):
            title = heading[1]
        elif field := re.match(r"    (\w+): ", line):
            found[field[1]] = title
    return found


def train_command() -> Callable[..., None]:
    def train(task: str, resume: bool = False, **given: Any) -> None:
        if os.environ.get("RANK", "0") == "0":
            say(f"training {task}: loading PyTorch …")
        from ..tasks.config import make_config

        config = make_config(task, **{name: value for name, value in given.items() if value is not None})
        from .loop import train as run

        run(config, resume=resume)

    train.__doc__ = (
        "Train a model on a TASK (see `weft list`). The task or the preset sets the defaults of all options.\n\n"
        f"Exit codes: {NO_DATA} data missing, {DIVERGED} diverged, {MISCOMPILED} miscompiled, "
        f"{NO_MEMORY} out of memory, {CANNOT_SAVE} could not write, {INTERRUPTED} stopped by a signal and saved."
    )
    again = typer.Option("--resume", help="continue the run in --out, or start it if it does not exist")
    parameters = [
        inspect.Parameter(
            "task",
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            annotation=Annotated[str, typer.Argument(help=field_help()["task"])],
        ),
        inspect.Parameter("resume", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, again]),
    ]
    for name, kind in field_types().items():
        if name == "task":
            continue
        kind = _plain(kind)
        flag = "--" + name.replace("_", "-")
        flags = [f"{flag}/--no-{flag[2:]}" if kind is bool else flag]
        if name == "accelerator":
            flags.insert(0, "--device")  # as in the other commands
        option = typer.Option(*flags, help=field_help()[name], show_default=False)
        parameters.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[typing.Optional[kind], option],  # noqa: UP045  kind is a value here
            )
        )
    train.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    train.__annotations__ = {p.name: p.annotation for p in parameters}
    return train


def _plain(kind: Any) -> Any:
    """`float | None` -> float."""
    if isinstance(kind, types.UnionType):
        return next(part for part in typing.get_args(kind) if part is not type(None))
    return kind
