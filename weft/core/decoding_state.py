"""The state of decoding: what a mechanism keeps between tokens, and where the next token goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass
class DecodingState:
    """The mechanism's own state, and the properties that the next token must match."""

    made_for: dict[str, Any]  # name, sizes and options of the mechanism
    batch: int
    device: torch.device | None  # None until the first token
    dtype: torch.dtype | None
    inner: Any = None  # None until the first token
    max_length: int | None = None  # None: the buffers grow
    capacity: int = 0  # tokens for which the buffers have room
    count: int = 0  # tokens so far, without those of CUDA graphs and compiled steps
    whole: bool = True  # no token was masked
    place: Tensor | None = None  # with max_length: tokens so far, on the device
    newest: list[int] = field(default_factory=lambda: [0])  # shared: the count of the state that owns the buffers
    crops: bool = False  # the mechanism can drop any number of tokens
    history: int = 0  # how many tokens `crop` can drop otherwise
    log: Log | None = None
    ready: Ready | None = None

    def twin(self) -> DecodingState:
        """Another state with the same buffers. Takes a quarter of the time of `dataclasses.replace`."""
        made = object.__new__(DecodingState)
        made.__dict__.update(self.__dict__)
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "ready": None}  # copies and saved states prepare their own

    @property
    def position(self) -> int:
        """Tokens so far. With `max_length` on a GPU, reading it waits for the GPU."""
        return self.count if self.place is None else int(self.place)

    def advance(self, n: int, in_place: bool) -> None:
        """Count n more tokens. Without `in_place`, the buffers are new, so that earlier states stay valid."""
        if self.place is not None:
            self.place.add_(n)
        self.count += n
        if in_place and self.place is None:
            self.newest[0] = self.count
        else:
            self.newest = [self.count]

    def check_crop(self, n: int) -> None:
        """Raise an error if the last n tokens cannot be dropped."""
        position, log = self.position, self.log
        if not isinstance(n, int) or isinstance(n, bool) or not 0 <= n <= position:
            raise ValueError(f"n, the number of tokens to drop, must be in 0 … {position}, got {n!r}")
        if self.crops or n in (0, position):
            return
        if log is None or position - n < log.marks[0][0] or position != self.count:
            most = 0 if log is None or position != self.count else position - log.marks[0][0]
            advice = f"create it with start(batch, history={n}) to drop up to {n}"
            if self.history >= n:
                advice = f"tokens dropped before count too: create it with more than history={self.history}"
            raise ValueError(
                f"{self.made_for['name']} sums up or overwrites earlier tokens: this state can drop only the last "
                f"{most}, got n={n}; {advice}"
            )


class Ready:
    """What the last step has checked and prepared, so that the next one need not. Not a dataclass, whose tensors would
    count as part of the state."""

    def __init__(self, attn: Any, q: Tensor, inner: Any, kernel: Callable[..., Tensor] | None):
        self.attn, self.inner, self.backend, self.kernel = attn, inner, attn.backend, kernel
        self.shape, self.dtype, self.device = q.shape, q.dtype, q.device
        self.settings = attn._settings()

    def serves(self, attn: Any, q: Tensor, inner: Any) -> bool:
        """Whether its kernel updates these buffers."""
        return (
            inner is self.inner
            and attn is self.attn
            and attn.backend == self.backend
            and q.dtype is self.dtype
            and attn._settings() == self.settings
        )

    def fits(self, attn: Any, q: Tensor, k: Tensor, v: Tensor, state: DecodingState) -> bool:
        """Whether another token can follow without checks."""
        shape, dtype, device = self.shape, self.dtype, self.device
        return (
            isinstance(q, Tensor)
            and isinstance(k, Tensor)
            and isinstance(v, Tensor)
            and self.serves(attn, q, state.inner)
            and state.count < state.capacity
            and (attn.max_length is None or state.count < attn.max_length)
            and (state.place is not None or state.newest[0] == state.count)
            and state.dtype is dtype
            and q.shape == shape
            and k.shape == shape
            and v.shape == shape
            and k.dtype is dtype
            and v.dtype is dtype
            and q.device == device
            and not (torch.is_grad_enabled() or torch.is_autocast_enabled(device.type))
            and not attn.dropout_now
        )


@dataclass
class Log:
    """Two earlier states and all tokens since the first of them, to decode again after `crop`."""

    marks: list[tuple[int, Any]]  # (position, inner), oldest first
    tokens: list[tuple[Any, ...]]  # q, k, v, mask, bias and inputs of every token since marks[0]

    def add(self, token: tuple[Any, ...], history: int, position: int, inner: Any) -> Log:
        marks, tokens = self.marks, [*self.tokens, token]
        if position - marks[-1][0] >= history:
            marks = [*marks, (position, tree_map(torch.clone, inner))]
        if len(marks) > 2:
            tokens, marks = tokens[marks[1][0] - marks[0][0] :], marks[1:]
        return Log(marks, tokens)


@dataclass
class Place:
    """Where the next token goes, and how to write there.

    `i` is its position: a number, or a tensor if the code must run unchanged for every position, as in a CUDA graph.
    """

    i: Any
    capacity: int
    device: torch.device
    in_place: bool  # False if gradients need the earlier buffers
    whole: bool = False  # no token was masked

    @property
    def known(self) -> bool:
        return isinstance(self.i, int)

    @property
    def tensor(self) -> Tensor:
        return torch.full((), self.i, device=self.device) if self.known else self.i

    def first(self, n: int) -> Tensor:
        return torch.arange(n, device=self.device)

    def filled(self, count: Any, slots: int) -> tuple[int, Tensor | None]:
        """How many slots to read if `count` of `slots` are filled, and which of them count (None: all)."""
        return (count, None) if isinstance(count, int) else (slots, self.first(slots) < count)

    def allowed(self, valid: Tensor, some: Tensor | None) -> Tensor | None:
        """Which slots count: the valid ones of those filled. None if all do: fused attention is faster without mask."""
        if some is not None:
            return valid & some
        return None if self.whole else valid

    def put(self, buffer: Tensor, new: Tensor, slot: Any, dim: int = 2) -> Tensor:
        """Write `new` to the buffer, from a slot on; of size 1 in `dim` if the slot is a tensor."""
        new = new.to(buffer.dtype)
        if isinstance(slot, int):
            if self.in_place:
                buffer.narrow(dim, slot, new.shape[dim]).copy_(new)
                return buffer
            return torch.slice_scatter(buffer, new, dim, slot, slot + new.shape[dim])
        return (buffer.index_copy_ if self.in_place else buffer.index_copy)(dim, slot.view(1), new)

    def set(self, buffer: Tensor, new: Tensor) -> Tensor:
        """Replace the whole buffer."""
        return buffer.copy_(new) if self.in_place else new.to(buffer.dtype)

    def add_product(self, buffer: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """buffer (B, H, X, Y) + a @ b, in one operation."""
        a, b, flat = a.flatten(0, 1), b.flatten(0, 1), buffer.flatten(0, 1)
        return (flat.baddbmm_(a, b) if self.in_place else torch.baddbmm(flat, a, b)).view(buffer.shape)

    def choose(self, condition: Any, a: Tensor, b: Tensor) -> Tensor:
        return (a if condition else b) if isinstance(condition, bool) else torch.where(condition, a, b)


def next_positions(state: DecodingState | None, n: int, device: torch.device) -> Tensor:
    """The positions (n,) of the next n tokens."""
    start = 0 if state is None else state.count if state.place is None else state.place
    return start + torch.arange(n, device=device)


def check_crops(states: list[Any], n: int) -> None:
    """`check_crop` of several states, before the first of them changes."""
    for state in states:
        if isinstance(state, list):  # mixed attention
            check_crops(state, n)
        elif isinstance(state, DecodingState):
            state.check_crop(n)


def tree_map(function: Callable[..., Tensor], tree: Any, *others: Any) -> Any:
    """Apply a function to every tensor of nested dataclasses, lists, tuples and dicts; `others` have the same form."""
    if isinstance(tree, Tensor):
        return function(tree, *others)
    if is_dataclass(tree) and not isinstance(tree, type):
        names = [f.name for f in fields(tree)]
        parts = {n: tree_map(function, getattr(tree, n), *(getattr(o, n) for o in others)) for n in names}
        return replace(tree, **parts)
    if isinstance(tree, list | tuple):
        return type(tree)(tree_map(function, *parts) for parts in zip(tree, *others, strict=True))
    if isinstance(tree, dict):
        return {key: tree_map(function, value, *(o[key] for o in others)) for key, value in tree.items()}
    return tree


def tree_bytes(tree: Any) -> int:
    sizes: list[int] = []
    tree_map(lambda x: sizes.append(x.numel() * x.element_size()) or x, tree)  # type: ignore[func-returns-value]
    return sum(sizes)
