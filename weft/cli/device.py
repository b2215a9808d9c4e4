"""The device that a command runs on."""

from __future__ import annotations

from typing import Annotated, Any

import typer

Device = Annotated[
    str, typer.Option("--device", "--accelerator", help="cpu, cuda, mps or auto; default: cuda if available")
]


def chosen(device: str) -> Any:
    """The torch.device of --device, by default the GPU if there is one."""
    import torch

    there = torch.cuda.is_available()
    if device in ("", "auto"):
        device = "cuda" if there else "cpu"
    if device == "gpu":  # as in weft train
        device = "mps" if torch.backends.mps.is_available() else "cuda"
    try:
        place = torch.device(device)
    except RuntimeError:
        raise typer.BadParameter(f"device must be cpu, cuda, mps or auto, got {device!r}") from None
    if place.type == "mps" and not torch.backends.mps.is_available():
        raise typer.BadParameter("device is mps, but PyTorch finds no Apple GPU here: use cpu")
    if place.type == "cuda" and not there:
        raise typer.BadParameter(f"device is {device}, but PyTorch finds no NVIDIA GPU here: use cpu")
    return place
