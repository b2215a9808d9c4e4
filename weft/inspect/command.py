"""`weft inspect RUN`: the page about a run of the lab."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..tasks import TaskData


def inspect(
    run: Annotated[Path, typer.Argument(help="the folder of a run")],
    out: Annotated[Path | None, typer.Option(help="the page to write; RUN/inspect.html if not given")] = None,
    examples: Annotated[int, typer.Option(help="how many validation examples to show")] = 3,
    count: Annotated[int, typer.Option(help="how many examples of each split to measure on")] = 200,
    which: Annotated[str, typer.Option(help="the weights to show: best or last")] = "best",
) -> None:
    """Look into a trained model: one page, to be opened from disk, with every head, layer and subspace."""
    from ..lab import load_run
    from ..tasks import get_task
    from .page import report

    try:
        model, config, data = load_run(run, which)
    except (FileNotFoundError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    task = get_task(config.task)
    splits = {}
    batches = {}
    for split, title in (("train", "train"), ("val", "validation")):
        rows = {name: column[:count] for name, column in getattr(data, split).items()}
        batches[title] = task.batch(rows, config, _generator(config.seed), training=False)
        splits[title] = task.inputs(batches[title])
    labels = batches["validation"].get("label")
    classes = data.facts.get("names")
    page = report(
        model,
        splits["validation"],
        out=out or run / "inspect.html",
        title=run.resolve().name,
        tokens=[words(row, data) for row in splits["validation"][0][:examples]] if _is_text(splits) else None,
        targets=None
        if labels is None
        else [classes[i] if classes else f"class {i}" for i in labels[:examples].tolist()],
        classes=classes,
        splits=splits,
        checkpoints=_checkpoints(run),
        facts=[("task", config.task), ("seed", str(config.seed))],
        examples=examples,
    )
    typer.echo(f"{page}: open it in a browser")


def words(ids: Tensor, data: TaskData) -> list[str]:
    """The ids as words where the data has a vocabulary, as characters where they are bytes, else as numbers."""
    numbers = [int(i) for i in ids.tolist()]
    if data.vocabulary is not None:
        known = dict(enumerate(data.vocabulary))
        return [known.get(i, str(i)) for i in numbers]
    shift = int(data.facts.get("vocab", 0)) - 256  # bytes, with one id or none before them for padding
    if shift in (0, 1):
        return [chr(i - shift) if i >= shift else "" for i in numbers]
    return [str(i) for i in numbers]


def _class(i: int, names: list[str] | None) -> str:
    return names[i] if names else f"class {i}"


def _pictures(ids: Tensor, data: TaskData) -> Tensor | None:
    """Images that are read pixel by pixel, as images again."""
    size = data.facts.get("size")
    shape = (size, size) if isinstance(size, int) else tuple(size or ())
    if ids.dim() == 2 and len(shape) == 2 and shape[0] * shape[1] == ids.shape[1]:
        return ids.unflatten(1, shape).float()
    return None


def _is_text(splits: dict[str, tuple[Tensor, ...]]) -> bool:
    first = splits["validation"][0]
    return first.dim() == 2 and not first.is_floating_point()


def _checkpoints(run: Path) -> list[tuple[str, Any]]:
    """The sound checkpoints that a run still has, oldest first."""
    from ..lab.checkpoint import Checkpoints, DamagedCheckpoint, read
    from ..lab.run import Run
    from ..lab.state import restore_model

    kept = Checkpoints(Run(run).checkpoints)

    def loader(path: Path) -> Any:
        def load(model: nn.Module) -> None:
            tensors, numbers = read(path)
            restore_model(model, tensors, numbers.get("extra", {}))

        return load

    paths = {step: kept.path(step) for step in kept.steps()}
    if kept.best.exists():
        try:
            paths.setdefault(int(read(kept.best)[1]["step"]), kept.best)
        except DamagedCheckpoint as error:
            typer.echo(f"{error}; left out", err=True)
    return [(f"step {step}", loader(paths[step])) for step in sorted(paths)]


def _generator(seed: int) -> Any:
    import torch

    return torch.Generator().manual_seed(seed)
