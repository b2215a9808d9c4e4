"""The command `weft inspect RUN`: an HTML report about a run of the lab."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..tasks import TaskData

PIXEL_TASKS = ("digits", "cifar10-pixels", "pathfinder")  # ids are the row-major pixels of a square image


def inspect(
    run: Annotated[Path, typer.Argument(help="the folder of a run")],
    out: Annotated[Path | None, typer.Option(help="output file; default: RUN/inspect.html")] = None,
    examples: Annotated[int, typer.Option(min=1, help="number of validation examples to show")] = 3,
    count: Annotated[int, typer.Option(min=1, help="number of examples per split to measure")] = 200,
    which: Annotated[str, typer.Option(help="weights to use: best, last or average")] = "best",
    data_at: Annotated[str, typer.Option("--data", help="data folder, if it has moved since the run")] = "",
) -> None:
    """Inspect a trained model: write a self-contained HTML page with every head, layer and subspace."""
    import torch

    from ..inspect.page import report
    from ..lab import load_run
    from ..tasks.registry import task_of

    if which not in ("best", "last", "average"):
        raise typer.BadParameter(f"--which must be best, last or average, got {which!r}")
    model, config, data = load_run(run, which, data=data_at)
    if out is None:  # for a read-only run, write to the current folder
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
    names = data.classes or list(task.class_names)
    page = report(
        model.to(device),
        splits["validation"],
        out=out,
        title=run.resolve().name,
        tokens=words(config.task, shown, data),
        pictures=pictures(config.task, shown[0]),
        targets=None if labels is None else [_target(i, names) for i in labels[:examples].tolist()],
        classes=names or None,
        splits=splits,
        checkpoints=_checkpoints(run),
        facts=[("task", config.task), ("seed", str(config.seed))],
        examples=examples,
    )
    typer.echo(f"wrote {page}: open it in a browser")


def _target(label: float, names: list[str]) -> str:
    if names:
        return names[int(label)]
    return f"class {label}" if isinstance(label, int) else f"{label:.4g}"


def characters(values: list[int]) -> list[str]:
    """Bytes as text, one string per byte: a character of several bytes stands at its first one, and ‿ at the others.

    Values that are not bytes, such as padding, are ▒; bytes that are not UTF-8 are �.
    """
    out: list[str] = []
    while len(out) < len(values):
        rest = values[len(out) : len(out) + 4]
        if not 0 <= rest[0] < 256:
            out.append("▒")
            continue
        size = 1 + sum(rest[0] >= lead for lead in (0xC0, 0xE0, 0xF0))
        try:
            out += [bytes(rest[:size]).decode("utf-8"), *"‿" * (size - 1)]
        except ValueError:  # includes parts that are not bytes
            out.append("�")
    return out


def words(task: str, inputs: list[Tensor], data: TaskData) -> list[Any] | None:
    """The documents of each example in readable form: words, or characters if the ids are bytes."""
    if inputs[0].dim() != 2 or task.startswith(PIXEL_TASKS):
        return None
    from ..tasks.registry import get_task
    from ..tasks.text import Bytes

    vocabulary = data.vocabulary
    if task == "listops":
        from ..tasks.listops import VOCABULARY

        vocabulary = list(VOCABULARY)
    if data.tokenizer is not None:
        from ..tasks.tokens import Pieces

        bpe, shift = Pieces(data.tokenizer).bpe, 0 if isinstance(get_task(task), Bytes) else 1
        pieces = [bpe.decode([i]) for i in range(bpe.get_vocab_size())]
        vocabulary = ["<pad>"] * shift + pieces
    first = 0 if isinstance(get_task(task), Bytes) else 1  # the id of byte 0; in other tasks, 0 is padding

    def texts(ids: list[int]) -> list[str]:
        if vocabulary is not None:
            return [vocabulary[i] if i < len(vocabulary) else str(i) for i in ids]
        return characters([i - first for i in ids])

    documents = [[texts([int(i) for i in row]) for row in t.tolist()] for t in inputs if t.dim() == 2]
    return list(zip(*documents, strict=True)) if len(documents) > 1 else documents[0]


def pictures(task: str, ids: Tensor) -> Tensor | None:
    """The images of tasks that read them as sequences of pixels."""
    if not task.startswith(PIXEL_TASKS):
        return None
    side = round(ids.shape[1] ** 0.5)
    return ids.unflatten(1, (side, side)).float()


def _checkpoints(run: Path) -> list[tuple[str, Any]]:
    """The valid checkpoints of a run, oldest first."""
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
