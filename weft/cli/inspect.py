"""`weft inspect RUN`: the page about a run of the lab."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..tasks import TaskData

PIXEL_TASKS = ("digits", "cifar10-pixels", "pathfinder")  # ids are the pixels of a square image, row by row


def inspect(
    run: Annotated[Path, typer.Argument(help="the folder of a run")],
    out: Annotated[Path | None, typer.Option(help="the page to write; RUN/inspect.html if not given")] = None,
    examples: Annotated[int, typer.Option(min=1, help="how many validation examples to show")] = 3,
    count: Annotated[int, typer.Option(min=1, help="how many examples of each split to measure on")] = 200,
    which: Annotated[str, typer.Option(help="the weights to show: best, last or average")] = "best",
    data_at: Annotated[str, typer.Option("--data", help="where the data is, if not where the run found it")] = "",
) -> None:
    """Look into a trained model: one page, to be opened from disk, with every head, layer and subspace."""
    import torch

    from ..inspect.page import report
    from ..lab import load_run
    from ..tasks.registry import task_of

    if which not in ("best", "last", "average"):
        raise typer.BadParameter(f"which is best, last or average, got {which!r}")
    model, config, data = load_run(run, which, data=data_at)
    if out is None:  # a run that may only be read is looked at from here
        out = run / "inspect.html" if os.access(run, os.W_OK) else Path(f"{run.resolve().name}-inspect.html")
    task = task_of(config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    splits, labels = {}, None
    for split, title in (("train", "train"), ("val", "validation")):
        rows = {name: column[:count].to(device) for name, column in getattr(data, split).items()}
        generator = torch.Generator(device).manual_seed(config.seed)
        batch = task.batch(rows, config, generator, training=False)
        splits[title], labels = task.inputs(batch), batch.get("label")
    shown = [t[:examples].cpu() for t in splits["validation"]]
    page = report(
        model.to(device),
        splits["validation"],
        out=out,
        title=run.resolve().name,
        tokens=words(config.task, shown, data),
        pictures=pictures(config.task, shown[0]),
        targets=None if labels is None else [f"class {i}" for i in labels[:examples].tolist()],
        splits=splits,
        checkpoints=_checkpoints(run),
        facts=[("task", config.task), ("seed", str(config.seed))],
        examples=examples,
    )
    typer.echo(f"{page}: open it in a browser")


def words(task: str, inputs: list[Tensor], data: TaskData) -> list[Any] | None:
    """For each example its documents as people read them: words, or characters where the ids are bytes."""
    if inputs[0].dim() != 2 or task.startswith(PIXEL_TASKS):
        return None
    vocabulary = data.vocabulary
    if task == "listops":
        from ..tasks.listops import VOCABULARY

        vocabulary = list(VOCABULARY)
    first = 0 if task in ("text", "enwik8", "masked") else 1  # the id of byte 0: elsewhere 0 is padding

    def word(i: int) -> str:
        if vocabulary is not None:
            return vocabulary[i] if i < len(vocabulary) else str(i)
        return chr(i - first) if first <= i < first + 256 else "▒"

    documents = [[[word(int(i)) for i in row] for row in t.tolist()] for t in inputs if t.dim() == 2]
    return list(zip(*documents, strict=True)) if len(documents) > 1 else documents[0]


def pictures(task: str, ids: Tensor) -> Tensor | None:
    """Images that are read pixel by pixel, as images again."""
    if not task.startswith(PIXEL_TASKS):
        return None
    side = round(ids.shape[1] ** 0.5)
    return ids.unflatten(1, (side, side)).float()


def _checkpoints(run: Path) -> list[tuple[str, Any]]:
    """The sound checkpoints that a run still has, oldest first."""
    from ..lab.checkpoint import Checkpoints, DamagedCheckpoint, read
    from ..lab.run import Run
    from ..lab.say import say
    from ..lab.state import restore_model

    kept = Checkpoints(Run(run).checkpoints)

    def loader(path: Path) -> Any:
        def load(model: nn.Module) -> None:
            tensors, numbers = read(path)
            restore_model(model, tensors, numbers.get("extra", {}))

        return load

    paths: dict[int, Path] = {}
    for path in [*map(kept.path, kept.steps()), *([kept.best] if kept.best.exists() else [])]:
        try:
            paths.setdefault(int(read(path)[1]["step"]), path)
        except DamagedCheckpoint as error:
            say(f"{error}; left out", error=True)
    return [(f"step {step}", loader(paths[step])) for step in sorted(paths)]
