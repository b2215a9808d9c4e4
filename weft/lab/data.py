"""Batches from rows in memory, in an order that depends only on (seed, step).

The rows of a task are in memory, on the device if they fit, so a batch is one gather. The step is the whole state of
the sampler. Augmentation on the CPU is started one batch ahead.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ..core.segments import Segments
from ..core.staging import send
from ..tasks.base import Columns

DEVICE_BYTES = 16 * 2**30  # rows up to this size are kept on the GPU


def seed_of(*parts: int | str) -> int:
    """A 63-bit seed that depends on all parts."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


def seed_everything(*parts: int | str) -> None:
    """Seed all random generators of the process from these parts: dropout depends only on the step."""
    seed = seed_of(*parts)
    if torch.cuda.is_initialized():  # torch.manual_seed formats a stack trace for every other kind of device
        torch.default_generator.manual_seed(seed)
        torch.cuda.manual_seed_all(seed)
    else:
        torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


class Order:
    """The examples of each step: a new permutation per epoch, or the original order; incomplete batches are dropped."""

    def __init__(self, rows: int, per_step: int, seed: int, device: torch.device, shuffled: bool = True):
        if per_step > rows:
            raise ValueError(
                f"a step takes {per_step} examples, but there are only {rows} for training: lower --batch-size "
                "or --accumulate"
            )
        self.rows, self.per_step, self.seed, self.device = rows, per_step, seed, device
        self.shuffled, self.steps_per_epoch = shuffled, rows // per_step
        self._epoch, self._permutation = -1, torch.empty(0)
        self._on_host: np.ndarray = np.empty(0)

    def __call__(self, step: int) -> Tensor:
        """The examples of step 0, 1, …, on the device."""
        here = self._turn_to(step)
        return self._permutation[here]

    def on_host(self, step: int) -> np.ndarray:
        """The same numbers on the host."""
        here = self._turn_to(step)
        return self._on_host[here]

    def _turn_to(self, step: int) -> slice:
        epoch, within = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.PCG64(seed_of("order", self.seed, epoch)))
            self._on_host = generator.permutation(self.rows) if self.shuffled else np.arange(self.rows)
            self._permutation = torch.from_numpy(self._on_host).to(self.device)
            self._epoch = epoch
        return slice(within * self.per_step, (within + 1) * self.per_step)


@dataclass(frozen=True)
class Packing:
    """How documents are packed: batches get a few different numbers of tokens, because PyTorch and Triton prepare every
    new shape, which takes longer than a step."""

    free: int = 0  # tokens that the model adds to every document: 1 for CLS
    fill: bool = True

    @classmethod
    def of(cls, model: nn.Module) -> Packing:
        """Fillers would take part in the state and the random samples of some mechanisms (`one_call`)."""
        modules = list(model.modules())
        free = any(isinstance(getattr(module, "cls", None), Tensor) for module in modules)
        return cls(int(free), not any(hasattr(module, "one_call") for module in modules))

    def fillers(self, lengths: np.ndarray) -> list[int]:
        """Lengths of further documents, which make the number of tokens a multiple of 1/32 of it (at least 16). None is
        longer than the longest of the batch."""
        if not self.fill:
            return []
        tokens = int(lengths.sum()) + self.free * len(lengths)
        step = max(16, 1 << tokens.bit_length() >> 5)
        count = 1 + step // int(lengths.max())
        gap = -(tokens + count * (1 + self.free)) % step + count
        return [gap // count + (i < gap % count) for i in range(count)]


Batch = TypeVar("Batch")


class Ahead(Generic[Batch]):
    """Batches 0, 1, …, of which the next is already started: `start(number)` returns a function that waits for it."""

    def __init__(self, start: Callable[[int], Callable[[], Batch]]):
        self.start = start
        self._next: tuple[int, Callable[[], Batch]] | None = None

    def __call__(self, number: int) -> Batch:
        wait = self._next[1] if self._next is not None and self._next[0] == number else self.start(number)
        self._next = number + 1, self.start(number + 1)
        return wait()


class Rows:
    """A split, on the device if it fits. With `packing`, batches have their documents side by side, without padding."""

    def __init__(self, columns: Columns, device: torch.device, packing: Packing | None = None):
        # A column may be a view with overlapping windows: count its storage.
        size = sum(c.untyped_storage().nbytes() for c in columns.values())
        self.device, self.resident = device, size <= DEVICE_BYTES
        self.columns = {name: _move(c, device) for name, c in columns.items()} if self.resident else columns
        self.lengths: np.ndarray | None = None
        self.packing = packing
        if packing is not None:  # known here, so that no step waits for them
            self.lengths, self.real = lengths_of(self.columns["ids"])

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def take(self, index: Tensor) -> Columns:
        if self.resident:
            return {name: column[index] for name, column in self.columns.items()}
        index = index.cpu()
        pin = self.device.type == "cuda"
        rows = {name: column[index] for name, column in self.columns.items()}
        return {name: (r.pin_memory() if pin else r).to(self.device, non_blocking=True) for name, r in rows.items()}

    def pack(self, batch: Columns, index: np.ndarray) -> dict[str, Any]:
        """The batch of the examples `index`, with ids (B, L) as one row (1, tokens) and their `segments` if packed."""
        if self.lengths is None or self.packing is None:
            return batch
        lengths = self.lengths[index]
        more = self.packing.fillers(lengths)
        source = np.flatnonzero(np.arange(batch["ids"].shape[1]) < lengths[:, None])
        source = np.concatenate([source, np.zeros(sum(more), np.int64)])
        ids = batch["ids"].flatten()[send(torch.from_numpy(source), self.device)][None]
        segments = Segments.from_lengths([*lengths.tolist(), *more], device=self.device, fillers=len(more))
        return {**batch, "ids": ids, "segments": segments, **({"mask": True} if self.real else {})}


def lengths_of(ids: Tensor) -> tuple[np.ndarray, bool]:
    """Tokens of each row of ids (rows, L) up to its padding, which is 0; at least 1. And whether all others are not 0,
    so that no mask is needed."""
    places = torch.arange(1, ids.shape[1] + 1, device=ids.device)
    found = [torch.stack([((part > 0) * places).amax(1), (part > 0).sum(1)]) for part in ids.split(4096)]
    lengths, real = torch.cat(found, 1).cpu().numpy()
    lengths = lengths.clip(min=1)
    return lengths, bool((lengths == real).all())


def _move(column: Tensor, device: torch.device) -> Tensor:
    """Move a column with its storage, without expanding overlaps."""
    if column.device == device:
        return column
    if column.is_contiguous():
        return column.to(device)
    whole = torch.empty(0, dtype=column.dtype).set_(column.untyped_storage()).to(device)
    return whole.as_strided(column.shape, column.stride(), column.storage_offset())
