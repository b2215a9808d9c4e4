"""The command `weft`."""

from __future__ import annotations

from typing import Annotated

import typer

from ..lab import commands as lab
from ..lab.bench.commands import bench_app
from ..lab.errors import Commands
from ..lab.options import TrainCommand, train_command
from .advise import advise
from .attentions import show_attentions
from .convert import convert
from .demo import demo
from .generate import generate
from .inspect import inspect
from .predict import export, predict
from .sample import sample
from .size import size
from .translate import translate

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: it cuts no names
    context_settings={"max_content_width": 110},
    help="Efficient, cached and interpretable attention layers for PyTorch.",
)


def _version(asked: bool) -> None:
    if asked:
        from .. import __version__

        print(f"weft {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Efficient, cached and interpretable attention layers for PyTorch."""


app.command()(advise)
app.command("attentions")(show_attentions)
app.command()(convert)
app.command()(demo)
app.command()(generate)
app.command()(inspect)
app.command()(predict)
app.command()(export)
app.command()(sample)
app.command()(size)
app.command()(translate)
app.command("train", cls=TrainCommand)(train_command())
app.command("resume")(lab.resume_run)
app.command("eval")(lab.eval_run)
app.command("list")(lab.list_all)
app.command("sweep")(lab.sweep_files)
app.command("report")(lab.report_runs)
app.command("watch")(lab.watch_runs)
app.add_typer(bench_app, name="bench")
app.add_typer(lab.data_app, name="data")

if __name__ == "__main__":
    app()
