"""The command `weft`."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)


@app.callback()
def main() -> None:
    """Attention that is cheaper, wider, remembering, or explainable."""


if __name__ == "__main__":
    app()
