"""What the parts of the demo share: their sizes, their result, and a text that is in every installation."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ..pages import Part


@dataclass(frozen=True)
class Scale:
    """How much the demo computes."""

    digits: int = 300  # training steps of the models of digits
    text: int = 80  # training steps of the models of text
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    prompt: int = 4096  # tokens before the generated ones
    members: int = 8  # of the ensemble
    seed: int = 0


QUICK = Scale(digits=10, text=2, lengths=(64, 128), prompt=96, members=2)


@dataclass
class Story:
    title: str
    proves: str  # one sentence
    found: str  # the figures, in one line for the terminal
    parts: list[Part] = field(default_factory=list)
    source: str = ""  # the paper
    holds: bool = True  # False: the demo has failed


def windows(length: int) -> tuple[Tensor, Tensor]:
    """weft's own source code in windows of bytes (n, length): for training, and the last tenth for validation."""
    files = sorted((Path(__file__).parent.parent).rglob("*.py"))
    content = b"".join(file.read_bytes() for file in files)
    rows = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
    rows = rows[: len(rows) // length * length].view(-1, length)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    return rows[len(rows) // 10 :], rows[: len(rows) // 10]
