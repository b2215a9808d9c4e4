"""The command `weft inspect RUN`: an HTML report about a run of the lab."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .device import Device, chosen

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..lab.trained import Trained
    from ..tasks import Known, Task, TaskData

PIXEL_TASKS = ("digits", "cifar10-pixels", "pathfinder")  # ids are the row-major pixels of a square image


def inspect(
    run: Annotated[Path, typer.Argument(help="the folder of a run or of an exported model")],
    out: Annotated[Path | None, typer.Option(help="output file; default: RUN/inspect.html")] = None,
    examples: Annotated[int, typer.Option(min=1, help="number of validation examples to show")] = 3,
    count: Annotated[int, typer.Option(min=1, help="number of examples per split to measure")] = 200,
    which: Annotated[str, typer.Option(help="weights: best, last or average; default: the run's test_on")] = "",
    text: Annotated[
        list[str] | None, typer.Option(help="show this text instead of validation examples; repeatable")
    ] = None,
    image: Annotated[list[Path] | None, typer.Option(help="show this image file instead; repeatable")] = None,
    data_at: Annotated[str, typer.Option("--data", help="where the data is, if not where the run found it")] = "",
    place: Device = "",
) -> None:
    """Inspect a trained model: write a self-contained HTML page with every head, layer and subspace, detected objects,
    or sampled images."""
    import torch

    from ..adapt.surgery import swap
    from ..inspect.page import report
    from ..inspect.views import outermost
    from ..lab import load_run
    from ..tasks.registry import task_of

    if out is None:  # for a read-only run, write to the current folder
        out = run / "inspect.html" if os.access(run, os.W_OK) else Path(f"{run.resolve().name}-inspect.html")
    device = chosen(place)
    splits: dict[str, Any] = {}
    labels = data = None
    known: Known | TaskData
    if text or image:
        from ..lab.trained import load

        trained = load(run, which, device)
        if image and not text and (found := trained.task.own_gallery(trained.model, image, trained.known)):
            page = report(trained.model, [], out=out, title=run.resolve().name, galleries=[found.part()])
            typer.echo(f"wrote {page}: open it in a browser")
            return
        model, config, known = trained.model, trained.config, trained.known
        inputs = [t.to(device) for t in _own_examples(run, trained, text, image)]
        task, examples = trained.task, len(inputs[0])
    else:
        model, config, data = load_run(run, which, data=data_at)
        task, known = task_of(config), data
        for split, title in (("train", "train"), ("val", "validation")):
            rows = {name: column[:count].to(device) for name, column in getattr(data, split).items()}
            generator = torch.Generator(device).manual_seed(config.seed)
            batch = task.batch(rows, config, generator, training=False)
            splits[title], labels = task.inputs(batch), batch.get("label")
        inputs = splits["validation"]
    model = model.to(device)
    galleries = [] if data is None else [shown.part() for shown in task.galleries(model, data, config)]
    facts = [("task", config.task), ("seed", str(config.seed))]
    if config.model != "transformer":
        facts.append(("model", config.model))
    about: dict[str, Any] = dict(out=out, title=run.resolve().name, facts=facts)
    if not all(isinstance(t, torch.Tensor) for t in inputs):  # images of many sizes: only what the model finds in them
        page = report(model, [], galleries=galleries, **about)
    else:
        foreign = config.model.startswith(("hf:", "timm:", "pvt"))
        if foreign and config.attention == "full":  # the model's own attention
            swap(model, "full")
        elif not foreign and not outermost(model):
            raise typer.BadParameter(f"models of {config.task} have no attention of the registry, which could be shown")
        real = has_tokens(task, inputs)
        if not real.any():
            raise typer.BadParameter("the texts are empty: there is nothing to show")
        inputs, labels = [t[real] for t in inputs], None if labels is None else labels[real]
        shown = [t[:examples].cpu() for t in inputs]
        names, scale = known.classes or list(task.class_names), known.facts.get("scale", (0.0, 1.0))
        page = report(
            model,
            inputs,
            tokens=words(config.task, shown, known),
            pictures=pictures(config.task, shown[0]),
            targets=None if labels is None else [_target(i, names, scale) for i in labels[:examples].tolist()],
            classes=names or None,
            scale=scale,
            splits=splits or None,
            checkpoints=_checkpoints(run),
            examples=examples,
            galleries=galleries,
            **about,
        )
    typer.echo(f"wrote {page}: open it in a browser")


def _own_examples(run: Path, trained: Trained, text: list[str] | None, image: list[Path] | None) -> list[Tensor]:
    """The model's inputs for your own texts or images."""
    from ..lab.say import say
    from ..tasks.base import cut_note
    from ..tasks.images import ImageClassification

    task, reads_images = trained.task, isinstance(trained.task, ImageClassification)
    if (text and image) or bool(image) != reads_images:
        wanted = "--image FILE" if reads_images else "--text TEXT"
        raise typer.BadParameter(f"{run} was trained on {trained.config.task!r}: use {wanted}, and nothing else")
    missing = [str(path) for path in image or [] if not path.is_file()]
    if missing:
        raise typer.BadParameter(f"{missing[0]} does not exist")
    rows = task.encode(list(text or image or []), trained.known)
    if "tokens" in rows and (note := cut_note(rows["tokens"].tolist(), trained.known.length)):
        say(note, error=True)
    return list(task.inputs(rows))


def has_tokens(task: Task, inputs: Sequence[Tensor]) -> Tensor:
    """The examples with a token in every text. In the ids of classifiers, 0 is padding."""
    import torch

    from ..tasks.text import Bytes

    real = inputs[0].new_ones(len(inputs[0]), dtype=torch.bool)
    for t in inputs:
        if t.dim() == 2 and not isinstance(task, Bytes):
            real &= (t != 0).any(1)
    return real


def _target(label: float, names: list[str], scale: Sequence[float]) -> str:
    if names:
        return names[int(label)]
    return f"class {label}" if isinstance(label, int) else f"{scale[0] + scale[1] * label:.4g}"


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


def words(task: str, inputs: list[Tensor], data: TaskData | Known) -> list[Any] | None:
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
        from ..tasks.own import TextTable
        from ..tasks.tokens import Pieces

        bpe, shift = Pieces(data.tokenizer).bpe, int(isinstance(get_task(task), TextTable))
        pieces = [bpe.decode([i], skip_special_tokens=False) for i in range(bpe.get_vocab_size())]
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
    from ..lab.state import restore_model, with_average

    kept = Checkpoints(Run(run).checkpoints)

    def loader(path: Path) -> Any:
        def load(model: nn.Module) -> None:
            tensors, numbers = read(path)
            restore_model(model, with_average(tensors), numbers.get("extra", {}))

        return load

    paths: dict[int, Path] = {}
    for path in [*map(kept.path, kept.steps()), *([kept.best] if kept.best.exists() else [])]:
        try:
            paths.setdefault(int(read(path)[1]["step"]), path)
        except DamagedCheckpoint as error:
            say(f"{error}; left out", error=True)
    return [(f"step {step}", loader(paths[step])) for step in sorted(paths)]
