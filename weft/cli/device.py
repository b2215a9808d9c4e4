"""The device that a command runs on."""

from __future__ import annotations

from typing import Annotated, Any

import typer

Device = Annotated[str, typer.Option(help="cpu or cuda; default: cuda if available")]


def chosen(device: str) -> Any:
    """The torch.device of --device, by default the GPU if there is one."""
    import torch

    there = torch.cuda.is_available()
    try:
        place = torch.device(device or ("cuda" if there else "cpu"))
    except RuntimeError:
        raise typer.BadParameter(f"device must be cpu or cuda, got {device!r}") from None
    if place.type == "cuda" and not there:
        raise typer.BadParameter(f"device is {device}, but PyTorch finds no NVIDIA GPU here: use cpu")
    return place
