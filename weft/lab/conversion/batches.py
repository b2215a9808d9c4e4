"""Training and validation batches for `weft.convert`: step -> batch, the same after a restart."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import RandomSampler

Batch = dict[str, Any]
HELD_OUT = 0.05  # of the data, if there is no validation data


class Tokens:
    """One long sequence of tokens (N,): every row of a batch is a window at a random place."""

    def __init__(self, ids: Tensor, rows: int, length: int, seed: int):
        if len(ids) < length:
            raise ValueError(f"the data has {len(ids):,} tokens, fewer than one sequence of {length:,}: lower length")
        self.ids, self.rows, self.length, self.seed = ids, rows, length, seed

    def split(self) -> tuple[Tokens, Tokens]:
        held = max(self.length, int(len(self.ids) * HELD_OUT))
        if len(self.ids) < self.length + held:
            raise ValueError(
                f"the data has {len(self.ids):,} tokens, and training and validation need {self.length:,} each: lower "
                "length, or pass validation="
            )
        training, rest = self.ids[:-held], self.ids[-held:]
        return Tokens(training, self.rows, self.length, self.seed), Tokens(rest, self.rows, self.length, self.seed)

    def batch(self, step: int, length: int | None = None) -> Batch:
        """Shorter sequences make batches of more rows."""
        length = min(length or self.length, self.length)
        rows = self.rows * (self.length // length)
        at = torch.randint(len(self.ids) - length + 1, (rows,), generator=_generator(self.seed, step))
        return self._windows(at, length)

    def some(self, count: int) -> list[Batch]:
        """Windows at even distances."""
        at = torch.linspace(0, len(self.ids) - self.length, count * self.rows).long()
        return [self._windows(part, self.length) for part in at.split(self.rows)]

    def _windows(self, at: Tensor, length: int) -> Batch:
        places = at[:, None] + torch.arange(length)
        return {"input_ids": self.ids[places.to(self.ids.device)].long()}


class Rows:
    """Sequences (N, L), in a new order in every epoch."""

    def __init__(self, ids: Tensor, rows: int, seed: int):
        self.ids, self.rows, self.seed = ids, min(rows, len(ids)), seed
        self.length = ids.shape[1]
        self._order: tuple[int, Tensor] = (-1, torch.empty(0))

    def split(self) -> tuple[Rows, Rows]:
        held = max(1, int(len(self.ids) * HELD_OUT))
        if len(self.ids) <= held:
            raise ValueError(f"the data has {len(self.ids)} row: pass at least 2 rows, or validation=")
        return Rows(self.ids[:-held], self.rows, self.seed), Rows(self.ids[-held:], self.rows, self.seed)

    def batch(self, step: int, length: int | None = None) -> Batch:
        per_epoch = len(self.ids) // self.rows
        epoch, number = divmod(step - 1, per_epoch)
        if self._order[0] != epoch:
            self._order = epoch, torch.randperm(len(self.ids), generator=_generator(self.seed, epoch))
        rows = self._order[1][number * self.rows : (number + 1) * self.rows]
        return {"input_ids": self.ids[rows.to(self.ids.device), :length].long()}

    def some(self, count: int) -> list[Batch]:
        return [{"input_ids": part.long()} for part in self.ids[: count * self.rows].split(self.rows)]


class Batches:
    """Batches from an iterable, again from its beginning when it ends. `skip` batches are for validation."""

    def __init__(self, source: Any, model: Any):
        self.source, self.model, self.skip = source, model, 0
        self.length = None
        self._at, self._iterator, self._last = 0, iter(()), None  # type: int, Any, Any

    def batch(self, step: int, length: int | None = None) -> Batch:
        while self._at < step:  # also skips the batches before a restart
            found = next(self._iterator, None)
            if found is None:
                self._iterator = itertools.islice(self.source, self.skip, None)
                found = next(self._iterator, None)
                if found is None:
                    raise ValueError(
                        f"data has no batches left after {self._at} steps and {self.skip} validation batches: pass an "
                        "iterable that can be repeated, such as a DataLoader, or more data"
                    )
            self._at, self._last = self._at + 1, found
        return cropped(as_batch(self._last, self.model), length)

    def some(self, count: int) -> list[Batch]:
        return [as_batch(found, self.model) for found in itertools.islice(self.source, count)]


Source = Tokens | Rows | Batches


def sources(
    data: Any, validation: Any, *, model: Any, rows: int, length: int | None, seed: int, count: int
) -> tuple[Source, list[Batch]]:
    """The training batches, and `count` validation batches: from `validation`, or held out from the end of `data`
    (iterables: from its beginning)."""
    source = _source(data, model, rows, length, seed)
    if validation is not None:
        held = _source(validation, model, rows, length, seed).some(count)
    elif isinstance(source, Batches):
        if isinstance(getattr(data, "sampler", None), RandomSampler):
            raise ValueError(
                "data is shuffled again in each pass, so its first batches, held out for validation, would also be "
                "trained on: pass validation=, or a DataLoader with shuffle=False"
            )
        held = source.some(count)
        source.skip = len(held)
    else:
        source, rest = source.split()
        held = rest.some(count)
    if not held:
        raise ValueError("data has no batches")
    return source, held


def _source(data: Any, model: Any, rows: int, length: int | None, seed: int) -> Source:
    if not isinstance(data, Tensor) and hasattr(data, "__array__"):
        data = torch.as_tensor(data.__array__())
    if isinstance(data, Tensor):
        if data.is_floating_point() or data.is_complex() or data.dtype == torch.bool or data.dim() not in (1, 2):
            raise TypeError(
                f"data must have integer tokens of shape (N,) or (N, L), got {data.dtype} {tuple(data.shape)}; for "
                "other inputs, pass an iterable of batches"
            )
        _check(data, model)
        if data.dim() == 2:
            return Rows(data if length is None else data[:, :length], rows, seed)
        if length is None:
            raise ValueError("length is missing: set it to the number of tokens per sequence")
        return Tokens(data, rows, length, seed)
    if isinstance(data, (str, bytes)) or not hasattr(data, "__iter__"):
        raise TypeError(f"data must be a tensor of tokens or an iterable of batches, got {type(data).__name__}")
    return Batches(data, model)


def as_batch(found: Any, model: Any) -> Batch:
    if not isinstance(found, (Tensor, Mapping)):
        raise TypeError(f"a batch must be a tensor of tokens or a dict of tensors, got {type(found).__name__}")
    batch = {"input_ids": found} if isinstance(found, Tensor) else dict(found)
    if isinstance(batch.get("input_ids"), Tensor):
        _check(batch["input_ids"], model)
    return batch


def _check(ids: Tensor, model: Any) -> None:
    """Reject ids outside of the vocabulary of a transformers model, which raise an IndexError or stop the GPU."""
    if not ids.numel() or not hasattr(model, "get_input_embeddings"):
        return
    size = getattr(model.get_input_embeddings(), "num_embeddings", None)
    parts = ids.flatten().split(2**24)  # of which `long` makes copies: uint16 has no aminmax
    ends = torch.stack([torch.stack(part.long().aminmax()) for part in parts])
    least, most = int(ends.min()), int(ends.max())
    if size is not None and (least < 0 or most >= size):
        raise ValueError(
            f"the data has the token {least if least < 0 else most}, but {type(model).__name__} has the tokens 0 to "
            f"{size - 1:,}: use the tokenizer of this model"
        )


def cropped(batch: Batch, length: int | None) -> Batch:
    """The first `length` tokens of every sequence."""
    tokens = batch.get("input_ids")
    if length is None or tokens is None:
        return batch
    return {
        key: value[:, :length] if isinstance(value, Tensor) and value.shape[:2] == tokens.shape else value
        for key, value in batch.items()
    }


def count_tokens(batch: Batch) -> int:
    """Tokens of a batch; for other inputs, its rows."""
    tokens = batch.get("input_ids")
    return count_rows(batch) if tokens is None else tokens.numel()


def count_rows(batch: Batch) -> int:
    tokens = batch.get("input_ids")
    return len(tokens if tokens is not None else next(v for v in batch.values() if isinstance(v, Tensor)))


def moved(batch: Batch, device: torch.device) -> Batch:
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}


def _generator(seed: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
