"""Combiner: a language model with full attention and with combiner-fixed, and their cost over the length."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..lab.bench.scaling import exponent
from ..lab.bench.timing import How, take_turns
from ..models.language import LanguageModel
from ..pages import Curve, chart, table, text
from .story import Scale, Story, windows

NAMES = ("full", "combiner-fixed")
LENGTH = 512  # of training


def make(name: str, max_length: int) -> LanguageModel:
    torch.manual_seed(0)
    sizes = dict(dim=64, heads=4, head_dim=16, layers=2, mlp_dim=128)
    return LanguageModel(
        256, max_length=max_length, attention=name, positions="rope", dropout=0.0, **sizes  # type: ignore[arg-type]
    )  # fmt: skip


def bits(model: nn.Module, rows: Tensor) -> Tensor:
    """Bits per byte."""
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()) / math.log(2)


def fit(model: nn.Module, rows: Tensor, steps: int, rate: float = 4e-3) -> list[tuple[float, float]]:
    """Train with AdamW on batches of 8 windows; returns (step, bits per byte)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98))
    generator, losses = torch.Generator().manual_seed(0), []
    model.train()
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, step / 10) * (1.0 - 0.9 * step / steps)
        loss = bits(model, rows[torch.randint(len(rows), (8,), generator=generator)])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append((float(step), float(loss.detach())))
    model.eval()
    return losses


def backward(model: nn.Module, rows: Tensor) -> None:
    bits(model, rows).backward()


def costs(scale: Scale) -> dict[str, dict[int, tuple[float, float]]]:
    """Seconds and MiB of a forward and backward pass of the whole model: mechanism -> length -> both."""
    found: dict[str, dict[int, tuple[float, float]]] = {name: {} for name in NAMES}
    for length in scale.lengths:
        ids = torch.randint(256, (1, length), generator=torch.Generator().manual_seed(0))
        models = {name: make(name, length) for name in NAMES}
        calls = {name: partial(backward, model, ids) for name, model in models.items()}
        for name, timing in take_turns(calls, How(repeats=3, budget=2.0)).items():
            found[name][length] = timing.median, (timing.memory or 0) / 2**20
    return found


def tell(out: Path, scale: Scale) -> Story:
    train, held_out = windows(LENGTH + 1)
    curves, scores = [], {}
    for name in NAMES:
        model = make(name, LENGTH)
        curves.append(Curve(name, fit(model, train, scale.text)))
        with torch.no_grad():
            scores[name] = float(bits(model, held_out[:16]))
    cost = costs(scale)
    last = scale.lengths[-1]
    ratio = cost["full"][last][0] / cost["combiner-fixed"][last][0]
    slopes = {name: exponent(scale.lengths, [cost[name][n][0] for n in scale.lengths]) or 0.0 for name in NAMES}
    rows = [
        [
            f"{length:,}",
            *(f"{1e3 * cost[n][length][0]:.1f}" for n in NAMES),
            *(f"{cost[n][length][1]:.1f}" for n in NAMES),
        ]
        for length in scale.lengths
    ]
    time = [Curve(name, [(n, 1e3 * cost[name][n][0]) for n in scale.lengths]) for name in NAMES]
    memory = [Curve(name, [(n, cost[name][n][1]) for n in scale.lengths]) for name in NAMES]
    return Story(
        "Long texts: every token still counts",
        "With combiner-fixed a model keeps a non-zero weight for every pair of tokens, while its cost grows far more "
        "slowly than that of full attention.",
        f"{last:,} tokens: {ratio:.1f} × faster than full attention; {scores['combiner-fixed']:.2f} and "
        f"{scores['full']:.2f} bits per byte",
        [
            text(
                f"A byte-level language model was trained twice on weft's source code, {scale.text} steps each, with "
                f"windows of {LENGTH} bytes. On held-out code it needs {scores['full']:.3f} bits per byte with full "
                f"attention and {scores['combiner-fixed']:.3f} with combiner-fixed. The time of a forward and backward "
                f"pass over one sequence grows like L^{slopes['full']:.2f} with full attention and "
                f"L^{slopes['combiner-fixed']:.2f} with combiner-fixed. PyTorch's fused full attention does not store "
                "the attention matrix either, so the memory of both is linear here."
            ),
            chart("Time of a training pass", time, x="tokens", y="ms", log="xy"),
            chart("Memory of a training pass", memory, x="tokens", y="MiB", log="xy"),
            chart("Training loss", curves, y="bits per byte"),
            table(["tokens", "full, ms", "combiner-fixed, ms", "full, MiB", "combiner-fixed, MiB"], rows, "Cost"),
        ],
        "Ren et al., Combiner: Full Attention Transformer with Sparse Computation Cost, 2021",
    )
