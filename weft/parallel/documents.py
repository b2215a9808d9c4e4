"""Packed documents over several ranks. A document inside one rank is computed there; one that crosses ranks is a
sequence of its own, split over those ranks only, which send to each other directly."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..core.segments import Segments, distinct, on_host, ranges, runs

if TYPE_CHECKING:
    from .context import Context

_known = WeakTensorKeyDictionary()  # part of a segment tensor -> (its version, Documents)


class Documents(Segments):
    """The documents in this rank's part of packed rows; `whole` has those of all ranks."""

    def __init__(self, whole: Segments, bounds: list[int], rank: int, device: Any = None):
        begin, end = bounds[rank : rank + 2]
        first, last = np.maximum(whole.starts, begin), np.minimum(whole.starts + whole.lengths, end)
        here = first < last
        super().__init__(
            (whole.shape[0], end - begin), whole.rows[here], first[here] - begin, (last - first)[here], device
        )
        self.bounds, self.rank, self.whole, self.longest = bounds, rank, whole, whole.longest
        self.before = (first - whole.starts)[here]  # tokens on earlier ranks
        self.total = whole.lengths[here]
        self.members: dict[int, Any] = {}  # their contexts, by document

    @cached_property
    def positions(self) -> Tensor:
        return self._spread(ranges(self.before, self.lengths))

    @cached_property
    def inside(self) -> Segments:
        """The documents that this rank holds from the first to the last token."""
        own = self.total == self.lengths
        return Segments(self.shape, self.rows[own], self.starts[own], self.lengths[own], self.device)

    def crossing(self) -> Iterator[tuple[int, int, slice, dict[int, int]]]:
        """Number, row and place in this part of the other documents, and how many tokens each rank holds of them. All
        ranks list them in the same order."""
        parts = list(enumerate(zip(self.bounds[:-1], self.bounds[1:], strict=True)))
        for i in np.flatnonzero(self.total != self.lengths).tolist():
            start, length = int(self.starts[i]), int(self.lengths[i])
            first = self.bounds[self.rank] + start - int(self.before[i])
            sizes = {r: min(b, first + int(self.total[i])) - max(a, first) for r, (a, b) in parts}
            held = {r: size for r, size in sizes.items() if size > 0}
            yield i, int(self.rows[i]), slice(start, start + length), held


def documents_in(context: Context, segments: Tensor | Segments, x: Tensor) -> Documents:
    """The documents of a part of a segment tensor, or those that `weft.parallel.shard` returned."""
    if isinstance(segments, Documents):
        if segments.bounds != context.bounds or segments.shape != x.shape[:2]:
            raise ValueError(
                f"the documents were split for tokens {segments.shape}, but this rank holds {tuple(x.shape[:2])}; "
                "split both with weft.parallel.shard"
            )
        return segments
    if isinstance(segments, Segments):
        raise ValueError(
            "context parallelism needs this rank's part of the segments: use weft.parallel.shard(segments, mesh)"
        )
    if segments.shape != x.shape[:2]:
        raise ValueError(f"segments must be (B, part) = {tuple(x.shape[:2])}, got {tuple(segments.shape)}")
    # NumPy changes a CPU tensor without a new version, and a rank cannot see whether another part has changed.
    fixed = segments.device.type != "cpu" and not segments.is_inference()
    kept = _known.get(segments) if fixed else None
    if kept is not None and kept[0] == segments._version and kept[1].bounds == context.bounds:
        return kept[1]
    own = runs(on_host(segments))
    gathered: list[Any] = [None] * context.ranks
    with context.contact():
        dist.all_gather_object(gathered, own, group=context.group)
    rows, starts, lengths, numbers = (np.concatenate(column) for column in zip(*gathered, strict=True))
    starts = starts + np.repeat(context.bounds[:-1], [len(part[0]) for part in gathered])
    order = np.lexsort((starts, rows))
    rows, starts, lengths, numbers = (column[order] for column in (rows, starts, lengths, numbers))
    # A run that goes on at the next rank is one document.
    ends = starts + lengths
    new = np.ones(len(rows), bool)
    new[1:] = (rows[1:] != rows[:-1]) | (starts[1:] != ends[:-1]) | (numbers[1:] != numbers[:-1])
    at = np.flatnonzero(new)
    lengths = np.add.reduceat(lengths, at) if len(at) else lengths
    whole = Segments((segments.shape[0], context.length), *distinct(rows[at], starts[at], lengths, numbers[at]))
    found = Documents(whole, context.bounds, context.rank, segments.device)
    if fixed:
        _known[segments] = segments._version, found
    return found
