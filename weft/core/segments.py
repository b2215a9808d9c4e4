"""The documents of a packed batch, and the slots into which they are gathered.

Each token has one slot, so gathering and its gradient are the same operation with the two index tables exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from . import sharding
from .blocks import check_mask
from .staging import outside_graphs, send

# A group with this many padded tokens costs about as much as one more group: kernel launches against arithmetic.
PADDING = {"cpu": 256, "cuda": 8192}
ROUND = {"cpu": 1, "cuda": 64}  # groups have lengths that are multiples of this: fewer shapes to prepare kernels for
ALIGNMENT = 16  # Triton compiles kernels again for sizes and addresses that are no multiples of this
ALIGNED = 1.25  # how much longer a row may get if every document starts a new block

_known = WeakTensorKeyDictionary()  # segment tensor -> (its version, Segments)


class Segments:
    """The documents of a packed batch (B, L). Pass it in place of the segment tensor, to any number of layers.

    `rows`, `starts` and `lengths` are NumPy arrays with one entry per document, in order of row and position. The last
    `fillers` documents make a batch longer, so that batches have few different shapes: models return nothing for them.
    """

    def __init__(
        self, shape: tuple[int, int], rows: Any, starts: Any, lengths: Any, device: Any = None, fillers: int = 0
    ):
        self.shape, self.fillers = shape, fillers
        self.rows, self.starts, self.lengths = (np.asarray(x, np.int64) for x in (rows, starts, lengths))
        self.device = torch.empty(0, device=device).device
        self.count, tokens = len(self.lengths), int(self.lengths.sum())
        self.longest = int(self.lengths.max(initial=0))  # tokens of the longest document; 0 if there is none
        self.shortest = int(self.lengths.min()) if self.count else 0
        self.padded = tokens < shape[0] * shape[1]
        self.plans: dict[Hashable, Plan] = {}
        self.tables: dict[int, Tensor] = {}

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int] | Sequence[Sequence[int]] | np.ndarray | Tensor,
        length: int | None = None,
        device: Any = None,
        fillers: int = 0,
    ) -> Segments:
        """Documents of these lengths side by side, from the first token on: in one row, or in a list of rows.

        `length` is L, by default that of the longest row; the rest of a row is padding. Nothing is read from a GPU,
        except `lengths` if they are there. The last `fillers` documents are no examples.
        """
        lengths = lengths.tolist() if isinstance(lengths, np.ndarray | Tensor) else lengths
        if not isinstance(lengths, Iterable):
            raise TypeError(f"lengths must be a list of tokens per document, such as [{lengths}], got {lengths}")
        table: Any = lengths if any(isinstance(x, Sequence) for x in lengths) else [lengths]
        if any(not isinstance(n, int | np.integer) or n < 1 for row in table for n in row):
            raise ValueError(f"lengths must be tokens per document, integers of at least 1, got {lengths}")
        sizes = [np.array(row, np.int64) for row in table]
        longest = max(int(row.sum()) for row in sizes)
        length = longest if length is None else length
        if length < 1:
            raise ValueError(f"length, the tokens of a row, must be at least 1, got {length} with lengths={lengths}")
        if longest > length:
            raise ValueError(f"the documents of a row have {longest} tokens in total, more than length={length}")
        rows = np.repeat(range(len(sizes)), [len(row) for row in sizes])
        starts = np.concatenate([row.cumsum() - row for row in sizes])
        return cls((len(sizes), length), rows, starts, np.concatenate(sizes), device, fillers)

    @classmethod
    def from_tensor(cls, segments: Tensor) -> Segments:
        """Documents of an integer tensor (B, L): equal numbers in a row are one document, 0 is padding."""
        if not isinstance(segments, Tensor):
            raise TypeError(
                f"segments must be an integer tensor (B, L) or weft.Segments, got {type(segments).__name__}"
            )
        if segments.is_floating_point() or segments.is_complex() or segments.dtype == torch.bool:
            raise TypeError(
                f"segments must be integers, one number per document and 0 for padding, got {segments.dtype}; "
                "for a boolean padding mask, use mask="
            )
        if segments.dim() != 2 or not segments.shape[1]:
            raise ValueError(f"segments must be (B, L) with L of at least 1, got {tuple(segments.shape)}")
        version, kept = version_of(segments), _known.get(segments)
        if kept is not None and version is not None and kept[0] == version:
            return kept[1]
        documents = distinct(*runs(on_host(segments)))
        found = cls((segments.shape[0], segments.shape[1]), *documents, segments.device)
        if version is not None:
            _known[segments] = version, found
        return found

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        return f"Segments({len(self)} documents in {self.shape[0]} rows of {self.shape[1]} tokens)"

    @cached_property
    def places(self) -> np.ndarray:
        """Each document's tokens in the flattened batch, one document after the other."""
        return ranges(self.rows * self.shape[1] + self.starts, self.lengths)

    @cached_property
    def numbers(self) -> Tensor:
        """(B, L): 1, 2, ... in order of row and position; 0 for padding."""
        return self._spread(np.repeat(np.arange(1, len(self) + 1), self.lengths))

    @cached_property
    def positions(self) -> Tensor:
        """(B, L): positions that start at 0 in each document; 0 for padding."""
        return self._spread(ranges(np.zeros_like(self.lengths), self.lengths))

    @cached_property
    def first(self) -> Tensor:
        """(documents without fillers,): the first token of each document in the flattened batch."""
        return on_device((self.rows * self.shape[1] + self.starts)[: self.read], self.device)

    @property
    def read(self) -> int:
        """Number of documents without fillers."""
        return self.count - self.fillers

    @cached_property
    def edges(self) -> Tensor:
        """int32, for variable-length kernels: where each document begins in the flattened batch, and the end. Padding
        between documents is cut into pieces that are not longer than the longest document."""
        first, total = self.rows * self.shape[1] + self.starts, self.shape[0] * self.shape[1]
        begin, end = np.append(0, first + self.lengths), np.append(first, total)
        gaps = -(-(end - begin) // self.longest)  # pieces
        pieces = np.repeat(begin, gaps) + self.longest * ranges(np.zeros_like(gaps), gaps)
        return on_device(np.sort(np.concatenate([first, pieces, [total]])).astype(np.int32), self.device)

    @cached_property
    def mask(self) -> Tensor | None:
        """(B, L): True for the tokens of documents; None if there is no padding."""
        return self._spread(np.ones(int(self.lengths.sum()), bool)) if self.padded else None

    def real(self, mask: Tensor | None) -> Tensor | None:
        """The tokens of documents that `mask` (B, L) does not hide."""
        if mask is None:
            return self.mask
        check_mask(mask, self.shape)
        return mask if self.mask is None else self.mask & mask

    def table(self, block: int) -> Tensor:
        """(blocks, 8), for kernels: every block of up to `block` tokens; each document starts a new block.

            0 batch row       1 first token      2 number of tokens         3 document, -1 for none
            4 the document's first block         5 its number of blocks     6 its first token     7 its number of tokens

        On a GPU, empty blocks fill it up, so that similar batches have equal shapes: launches are recorded by shape."""
        if block not in self.tables:
            counts = -(-self.lengths // block)
            n = np.repeat(np.arange(len(self)), counts)
            offset = ranges(np.zeros_like(counts), counts) * block
            table = np.zeros((self._room(len(n)), 8), np.int32)
            table[:, 3], table[:, 4] = -1, np.arange(len(table))
            table[: len(n), 0] = self.rows[n]
            table[: len(n), 1] = self.starts[n] + offset
            table[: len(n), 2] = np.minimum(self.lengths[n] - offset, block)
            table[: len(n), 3] = n
            table[: len(n), 4] = (counts.cumsum() - counts)[n]
            table[: len(n), 5] = counts[n]
            table[: len(n), 6] = self.starts[n]
            table[: len(n), 7] = self.lengths[n]
            self.tables[block] = on_device(table, self.device)
        return self.tables[block]

    def _room(self, blocks: int) -> int:
        """At most 1/8 more than `blocks`, with few different values."""
        step = max(16, 1 << blocks.bit_length() >> 4) if self.device.type == "cuda" else 1
        return -(-blocks // step) * step

    @outside_graphs("the tables of segments are computed on the CPU")
    def ready(self) -> Segments:
        """Compute the tables that layers read, so that compiled ones find them as tensors."""
        _ = self.positions, self.first, self.mask
        return self

    @outside_graphs("the tables of segments are computed on the CPU")
    def with_first(self) -> tuple[Segments, Tensor]:
        """All documents in one row, each after a free token such as CLS; and the token of the flattened batch that each
        token of the row comes from. The free token comes from its document's first."""
        lengths, first = self.lengths + 1, self.rows * self.shape[1] + self.starts
        source = np.maximum(ranges(first - 1, lengths), np.repeat(first, lengths))
        found = Segments.from_lengths(lengths.tolist(), device=self.device, fillers=self.fillers)
        return found.ready(), on_device(source, self.device)

    @cached_property
    def one_per_row(self) -> Plan:
        """Every document in its own row, padded to the longest, without fillers."""
        rooms = np.full_like(self.lengths, self.longest)
        return Plan.of(self, [np.arange(self.read)], rooms, [(self.read, self.longest)])

    def as_rows(self, x: Tensor) -> Tensor:
        """x (B, L, ...) -> (documents, longest, ...). What follows a document is zero."""
        return self.one_per_row.unpack(x)[0]

    @outside_graphs("the tables of segments are computed on the CPU")
    def padded_rows(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """`as_rows` of x and of its mask (B, L)."""
        return self.as_rows(x), self.as_rows(self.numbers > 0 if mask is None else mask)

    @outside_graphs("the tables of segments are computed on the CPU")
    def leading(self, x: Tensor, mask: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
        """The first `count` tokens of each document, (documents, count, ...), and which of them are real."""
        at = np.arange(min(count, self.longest))
        first, lengths = (x[: self.read, None] for x in (self.rows * self.shape[1] + self.starts, self.lengths))
        index, real = (on_device(part, self.device) for part in (first + np.minimum(at, lengths - 1), at < lengths))
        real = real if mask is None else real & mask.flatten()[index]
        return torch.unflatten(x.flatten(0, 1).index_select(0, index.flatten()), 0, index.shape), real

    def plan(self, pattern: Callable[[int], Hashable], block: int | None, most: int | None = None) -> Plan:
        """Where each document goes, for a mechanism with this `pattern`, `separate_blocks` and `max_length`."""
        kinds = {size: pattern(size) for size in np.unique(self.lengths).tolist()}
        for size in [*kinds]:  # mechanisms may agree on the lengths, but not on those to which groups are padded
            for rounded in self._rounded(size):
                if rounded not in kinds and (most is None or rounded <= most):
                    kinds[rounded] = pattern(rounded)
        key = block, tuple(kinds.values()), most
        if key not in self.plans:
            self.plans[key] = self._planned(kinds, block, most)
        return self.plans[key]

    def _rounded(self, length: int) -> tuple[int, ...]:
        """Lengths to which a group may be padded, the best first."""
        multiple = ROUND.get(self.device.type, 1)
        return tuple(-(-length // step) * step for step in (multiple, min(multiple, ALIGNMENT)))

    def _planned(self, kinds: dict[int, Hashable], block: int | None, most: int | None) -> Plan:
        if block is not None:
            rooms = -(-self.lengths // block) * block
            if rooms.sum() <= ALIGNED * self.lengths.sum():  # all documents in one row, each on its own blocks
                return Plan.of(self, [np.arange(len(self))], rooms, [(1, int(rooms.sum()))])
        by_kind: dict[Hashable, list[int]] = {}
        for document in np.argsort(-self.lengths, kind="stable").tolist():
            by_kind.setdefault(kinds[int(self.lengths[document])], []).append(document)
        limit = PADDING.get(self.device.type, PADDING["cuda"])
        groups = [group for members in by_kind.values() for group in _split(members, self.lengths, limit)]
        rooms = np.empty_like(self.lengths)
        for group in groups:
            longest = int(self.lengths[group].max())
            fitting = (n for n in self._rounded(longest) if n in kinds and kinds[n] == kinds[longest])
            rooms[group] = next((n for n in fitting if most is None or n <= most), longest)
        groups.sort(key=lambda group: bool(rooms[group[0]] % ALIGNMENT))  # last, so that the others start at multiples
        return Plan.of(self, groups, rooms, [(len(group), int(rooms[group[0]])) for group in groups])

    def _spread(self, values: np.ndarray) -> Tensor:
        if self.padded:
            values, placed = np.zeros(self.shape[0] * self.shape[1], values.dtype), values
            values[self.places] = placed
        return on_device(values.reshape(self.shape), self.device)


def _split(members: list[int], lengths: np.ndarray, limit: int) -> Iterator[np.ndarray]:
    """Split documents, longest first, into groups with at most `limit` padded tokens each."""
    group: list[int] = []
    wasted = 0
    for document in members:
        wasted += int(lengths[group[0]] - lengths[document]) if group else 0
        if wasted > limit:
            yield np.array(group)
            group, wasted = [], 0
        group.append(document)
    yield np.array(group)


@dataclass
class Plan:
    """Slots for the tokens of documents, group by group, row by row. The slots after a document are padding."""

    shapes: list[tuple[int, int]]  # rows and length of each group
    index: Tensor  # (slots,): the token of each slot, in the flattened batch; its document's last token for padding
    filled: Tensor | None  # (slots,): False for padding; None if there is none
    free: Tensor | None  # the slots of padding
    inverse: Tensor  # (B L,): the slot of each token, 0 for padding
    outside: Tensor | None  # the tokens of the batch that are padding; None if there are none

    @classmethod
    def of(cls, segments: Segments, groups: list[np.ndarray], rooms: np.ndarray, shapes: list[tuple[int, int]]) -> Plan:
        """`rooms`: the slots of each document."""
        order = np.concatenate(groups) if groups else np.zeros(0, np.int64)
        room, length = rooms[order], segments.lengths[order]
        first = segments.rows[order] * segments.shape[1] + segments.starts[order]
        within = ranges(np.zeros_like(room), room)
        index = np.repeat(first, room) + np.minimum(within, np.repeat(length - 1, room))
        filled = within < np.repeat(length, room)
        total = segments.shape[0] * segments.shape[1]
        inverse = np.zeros(total, np.int64)
        inverse[index[filled]] = np.flatnonzero(filled)
        outside = np.ones(total, bool)
        outside[index] = False

        def sent(x: np.ndarray) -> Tensor:
            return on_device(x, segments.device)

        return cls(
            shapes,
            sent(index),
            None if filled.all() else sent(filled),
            None if filled.all() else sent(np.flatnonzero(~filled)),
            sent(inverse),
            sent(np.flatnonzero(outside)) if outside.any() else None,
        )

    def split(self, slots: Tensor) -> list[Tensor]:
        """(slots, ...) -> (rows, length, ...) for each group."""
        parts = slots.split([rows * length for rows, length in self.shapes])
        return [torch.unflatten(part, 0, shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def unpack(self, x: Tensor, by_head: bool = False) -> tuple[Tensor, ...]:
        """x (B, L, ...) -> (rows, length, ...) for each group; `by_head`, (B, H, L, D) -> (rows, H, length, D).

        Padding is zero, and gets no gradient."""
        return _Unpack.apply(x, self, by_head)

    def repack(self, outs: Sequence[Tensor], shape: tuple[int, int], by_head: bool = False) -> Tensor:
        """(rows, length, ...) of each group -> (B, L, ...), zeros for padding; or by head."""
        return _Repack.apply(self, shape, by_head, *outs)

    def to_slots(self, x: Tensor, by_head: bool) -> tuple[Tensor, ...]:
        x = x.transpose(1, 2) if by_head else x
        parts = self.split(_take(x.reshape(x.shape[0] * x.shape[1], -1), self.index, self.free))
        groups = (part.view(*part.shape[:2], *x.shape[2:]) for part in parts)
        return tuple(group.transpose(1, 2) if by_head else group for group in groups)

    def to_tokens(self, groups: Sequence[Tensor], shape: tuple[int, int], by_head: bool) -> Tensor:
        groups = [group.transpose(1, 2) for group in groups] if by_head else groups
        flat = [group.reshape(group.shape[0] * group.shape[1], -1) for group in groups]
        whole = _take(flat[0] if len(flat) == 1 else torch.cat(flat), self.inverse, self.outside)
        whole = whole.view(*shape, *groups[0].shape[2:])
        return whole.transpose(1, 2) if by_head else whole


def _take(x: Tensor, index: Tensor, gaps: Tensor | None) -> Tensor:
    """The rows `index` of x, zeros at `gaps`."""
    taken = x.index_select(0, index)
    return taken if gaps is None else taken.index_fill_(0, gaps, 0)


# Every token is in one slot, so the gradient of one direction is the other direction. With plain operators, the
# backward of index_select would add atomically, and every view would be a node of the graph.


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Plan, by_head: bool) -> tuple[Tensor, ...]:
        ctx.plan, ctx.by_head, ctx.shape = plan, by_head, (x.shape[0], x.shape[2 if by_head else 1])
        ctx.set_materialize_grads(False)
        groups = plan.to_slots(x, by_head)
        ctx.like = [(group.shape, group.dtype) for group in groups]
        return groups

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        some = next((grad for grad in grads if grad is not None), None)
        if some is None:
            return None, None, None
        each = [
            some.new_zeros(shape, dtype=dtype) if grad is None else grad
            for grad, (shape, dtype) in zip(grads, ctx.like, strict=True)
        ]
        return ctx.plan.to_tokens(each, ctx.shape, ctx.by_head), None, None


class _Repack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, shape: tuple[int, int], by_head: bool, *groups: Tensor) -> Tensor:
        ctx.plan, ctx.by_head = plan, by_head
        return plan.to_tokens(groups, shape, by_head)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, None, None, *ctx.plan.to_slots(grad, ctx.by_head)


def on_device(x: np.ndarray, device: torch.device) -> Tensor:
    """x as a tensor that training can read even if it was made in inference mode: tables are kept for later calls."""
    with torch.inference_mode(False):
        return send(torch.from_numpy(x), device)


def documents_of(segments: Tensor | Segments, x: Tensor) -> Segments:
    """The documents of the tokens x (B, L, ...)."""
    if (context := sharding.current()) is not None:
        return context.documents(segments, x)
    found = segments if isinstance(segments, Segments) else _read(segments)
    if found.shape != x.shape[:2]:
        raise ValueError(f"segments must be (B, L) = {tuple(x.shape[:2])} like the tokens, got {tuple(found.shape)}")
    if found.device != x.device:
        raise ValueError(f"segments are on {found.device}, but the tokens are on {x.device}; create them there")
    return found


def first_tokens(x: Tensor, documents: Segments | None) -> Tensor:
    """x (B, L, ...) -> the first token of each row, or of each packed document."""
    return x[:, 0] if documents is None else x.flatten(0, 1).index_select(0, documents.first)


@outside_graphs("the lengths of packed documents must be known on the CPU")
def _read(segments: Tensor) -> Segments:
    return Segments.from_tensor(segments).ready()


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """start, start + 1, ... for each start and length, concatenated."""
    ends = lengths.cumsum()
    return np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)


def version_of(segments: Tensor) -> bytes | int | None:
    """What changes with the tensor; None if unknown. NumPy and `.data` change a CPU tensor without a new version, so
    this is its contents; reading them from a GPU would wait."""
    if segments.device.type == "cpu":
        return on_host(segments).tobytes()
    return None if segments.is_inference() else segments._version


def on_host(segments: Tensor) -> np.ndarray:
    try:
        return segments.detach().cpu().numpy()
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise ValueError(
            "the lengths of packed documents must be known, but this segment tensor has no values (torch.export, meta "
            "device): export without segments, one document per row"
        ) from error


Runs = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def runs(numbers: np.ndarray) -> Runs:
    """Row, start, length and number of every document in (B, L)."""
    if numbers.size and numbers.min() < 0:
        raise ValueError(f"segments must be 0 (padding) or positive, got {numbers.min()}")
    B, L = numbers.shape
    begins = np.ones((B, L), bool)
    begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    at = np.flatnonzero(begins)
    value, length = numbers.reshape(-1)[at], np.diff(at, append=B * L)
    real = value != 0
    return at[real] // L, at[real] % L, length[real], value[real]


def distinct(
    rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray, numbers: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row, start and length of documents, after a check that no number occurs twice in a row."""
    order = np.lexsort((numbers, rows))
    again = (np.diff(rows[order]) == 0) & (np.diff(numbers[order].astype(np.int64)) == 0)
    if again.any():
        bad = order[1:][again][0]
        raise ValueError(
            f"the tokens of a document must be side by side: segment {numbers[bad]} occurs twice in row {rows[bad]}, "
            f"again at token {starts[bad]}; give each document of a row its own number"
        )
    return rows, starts, lengths
