"""The command `weft demo`: deep against wide classifiers with three attentions, trained on handwritten digits.

The digits are scikit-learn's: 1,797 real images of 8 × 8 pixels, each read row by row as 64 tokens in
five shades of grey.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

if TYPE_CHECKING:
    from rich.console import Console

ATTENTIONS: dict[str, dict[str, Any]] = {"full": {}, "linear": {}, "bigbird": {"block_size": 8, "random_blocks": 2}}
SHAPES = {"deep": (4, 2), "wide": (1, 8)}  # layers, heads: eight heads in all, either way
BATCH, PEAK_RATE = 32, 1e-2


@dataclass
class Digits:
    train_ids: Tensor
    train_labels: Tensor
    test_ids: Tensor
    test_labels: Tensor
    vocab: int = 6  # padding, and five shades
    classes: int = 10


@dataclass
class Result:
    attention: str
    shape: str
    accuracy: float  # % of the test set
    parameters: int
    latency: float  # ms for one image


def demo(
    epochs: Annotated[int, typer.Option(min=1, help="passes over the training images")] = 10,
    seed: Annotated[int, typer.Option(help="of the weights and the order of the images")] = 0,
) -> None:
    """Train deep and wide classifiers with three attentions on handwritten digits, and compare them."""
    from rich.console import Console

    console, data, started = Console(), load_digits(), time.perf_counter()
    console.print(
        f"[bold]weft demo[/]: {len(data.train_ids)} images to learn from, {len(data.test_ids)} to test on, "
        f"{data.train_ids.shape[1]} tokens each, {epochs} epochs"
    )
    # Models this small are quicker alone on a core: threads that share one would mostly wait for each other.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        results = compare(data, epochs, seed, console)
    finally:
        torch.set_num_threads(threads)
    show(results, console)
    console.print(f"{time.perf_counter() - started:.0f} s in all.")


def compare(data: Digits, epochs: int, seed: int, console: Console) -> list[Result]:
    """Train and measure every attention in every shape, with a progress bar each."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from .models import TextClassifier

    results = []
    columns = TextColumn("{task.description:18}"), BarColumn(), TextColumn("{task.fields[loss]}"), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        for (attention, options), (shape, (layers, heads)) in product(ATTENTIONS.items(), SHAPES.items()):
            torch.manual_seed(seed)
            model = TextClassifier(
                data.vocab,
                data.classes,
                max_length=data.train_ids.shape[1],
                dim=32,
                heads=heads,
                head_dim=8,
                layers=layers,
                mlp_dim=64,
                attention=attention,
                attention_options=options,
                pooling="mean",
                dropout=0.0,
            )
            bar = progress.add_task(f"{attention} {layers}x{heads}", total=epochs, loss="")
            for loss in train(model, data, epochs):
                progress.update(bar, advance=1, loss=f"loss {loss:.3f}")
            count = sum(p.numel() for p in model.parameters())
            name = f"{shape} {layers}x{heads}"
            results.append(Result(attention, name, accuracy(model, data), count, latency(model, data)))
    return results


def load_digits() -> Digits:
    """The images as token ids, split by a fixed shuffle into four fifths to train and one fifth to test."""
    try:
        from sklearn.datasets import load_digits as load
    except ImportError:
        raise typer.BadParameter("the demo's images come with scikit-learn: pip install 'weft[lab]'") from None
    images, labels = load(return_X_y=True)
    shades = torch.from_numpy(images).div(4).round().long()  # grey values 0 to 16 in five steps
    ids, targets = shades + 1, torch.from_numpy(labels).long()
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    held_out, rest = order[: len(ids) // 5], order[len(ids) // 5 :]
    return Digits(ids[rest], targets[rest], ids[held_out], targets[held_out])


def train(model: nn.Module, data: Digits, epochs: int) -> Iterator[float]:
    """Train in place; yields each epoch's mean loss."""
    steps = epochs * -(-len(data.train_ids) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, total_steps=steps)
    model.train()
    for _ in range(epochs):
        losses = []
        for batch in torch.randperm(len(data.train_ids)).split(BATCH):
            loss = F.cross_entropy(model(data.train_ids[batch]), data.train_labels[batch])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        yield sum(losses) / len(losses)
    model.eval()


@torch.inference_mode()
def accuracy(model: nn.Module, data: Digits) -> float:
    right = model(data.test_ids).argmax(-1) == data.test_labels
    return 100 * right.double().mean().item()


@torch.inference_mode()
def latency(model: nn.Module, data: Digits, repeats: int = 50) -> float:
    """Median milliseconds for one image, after a warm-up."""
    times = []
    for turn in range(repeats + 10):
        started = time.perf_counter()
        model(data.test_ids[:1])
        if turn >= 10:
            times.append(time.perf_counter() - started)
    return 1000 * sorted(times)[len(times) // 2]


def show(results: list[Result], console: Console) -> None:
    from rich.table import Table

    table = Table(title="Handwritten digits, one wide layer against a deep model", title_justify="left")
    table.add_column("attention")
    table.add_column("layers x heads")
    for heading in ("test accuracy, %", "parameters", "latency, ms"):
        table.add_column(heading, justify="right")
    for result in results:
        row = f"{result.accuracy:.1f}", f"{result.parameters:,}", f"{result.latency:.2f}"
        table.add_row(result.attention, result.shape, *row, end_section=result.shape.startswith("wide"))
    console.print(table)
    deep, wide = ([r for r in results if r.shape.startswith(shape)] for shape in SHAPES)
    change = sum(w.accuracy - d.accuracy for d, w in zip(deep, wide, strict=True)) / len(deep)
    smaller = sum(w.parameters for w in wide) / sum(d.parameters for d in deep)
    faster = sum(d.latency for d in deep) / sum(w.latency for w in wide)
    console.print(
        f"Wide against deep, over {len(deep)} attentions: accuracy {change:+.1f} points, "
        f"{100 * smaller:.0f} % of the parameters, {faster:.1f} times as fast."
    )
