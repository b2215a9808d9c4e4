"""The command `weft sample RUN`: draw images from a density model of the lab."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Annotated

import typer

from .device import Device, chosen


def sample(
    run: Annotated[Path, typer.Argument(help="the folder of a run of cifar10-density or imagenet64-density")],
    out: Annotated[Path | None, typer.Option(help="PNG file; default: samples.png in the run's folder")] = None,
    count: Annotated[int, typer.Option(min=1, help="how many images")] = 16,
    temperature: Annotated[float, typer.Option(min=0, help="below 1: closer to the most likely bytes")] = 1.0,
    seed: Annotated[int, typer.Option(help="random seed of the samples")] = 0,
    which: Annotated[str, typer.Option(help="weights: best, last or average; default: the run's test_on")] = "",
    device: Device = "",
) -> None:
    """Sample images byte by byte, with the decoding form of the attention, and write them as one sheet, which
    `weft report RUN` shows too."""
    import numpy as np
    import torch
    from PIL import Image

    from ..lab.run import Run
    from ..lab.trained import load
    from ..models.language import LanguageModel
    from ..tasks.base import Gallery
    from ..tasks.density import Density, draw, sheet

    target = out or run / "samples.png"
    if target.suffix.lower() not in Image.registered_extensions():  # fail before drawing
        raise typer.BadParameter(f"--out must be an image file such as samples.png, got {target}")
    place = chosen(device)
    trained = load(run, which, place)
    model, task = trained.model, trained.task
    if not isinstance(task, Density) or not isinstance(model, LanguageModel):
        raise typer.BadParameter(f"{run} was trained on {task.name!r}: weft sample needs a density of images")
    target.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    generator = torch.Generator(place).manual_seed(seed)
    images = draw(model, task.side, count, temperature, generator)
    image = sheet(images)
    image.save(target)
    if os.access(run, os.W_OK):
        what = f"Drawn byte by byte from the model, at temperature {temperature:g}."
        part = Gallery("Samples", what, [(torch.from_numpy(np.array(image)), f"{count} samples")]).part()
        Run(run).write("gallery.json", json.dumps([part]))
    took = time.perf_counter() - start
    print(f"wrote {target}: {count} images in {took:.1f} s, {images[0].numel() * count / took:,.0f} bytes/s")
