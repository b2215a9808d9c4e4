"""`python -m weft` is the command `weft`."""

from .cli import app

app()
