"""Context parallelism: a sequence split over ranks.

    mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("context",))
    x = weft.parallel.shard(x, mesh)                        # this rank's part of the sequence
    with weft.parallel.context(mesh):
        y = model(x)                                        # outputs and gradients equal the unsharded call

Inside the region, q, k, v and the mask hold this rank's contiguous part of the sequence. A mechanism exchanges with the
other ranks only what it needs: `linear` one state, `combiner-fixed` block summaries, `local` a neighbouring block.
Parts may differ in length, but every rank needs at least one token. All ranks must make the same calls, either all
with a mask or all without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate
from typing import Any, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..core import sharding
from ..core.contract import Attention, PositionBias
from ..core.precision import without_autocast
from ..core.segments import Segments
from .documents import Documents, documents_in
from .exchange import Exchange, Numbers, all_to_all, exchange_rows

Sharded = Callable[..., Tensor]  # (context, attn, q, k, v, mask, bias) -> out
SHARDED: dict[str, Sharded] = {}


def sharded(name: str) -> Callable[[Sharded], Sharded]:
    """Register the context-parallel form of a mechanism."""

    def add(function: Sharded) -> Sharded:
        SHARDED[name] = function
        return function

    return add


class Context:
    """The ranks of a mesh dimension, and the part of the sequence that each of them holds."""

    tile = 2048  # queries of full attention at a time

    def __init__(self, mesh: Any, length: int | None = None):
        if mesh.ndim != 1:
            names = ", ".join(mesh.mesh_dim_names or ())
            raise ValueError(f"context() needs one dimension of the mesh, got {mesh.ndim} ({names}); pass mesh['NAME']")
        self.group = mesh.get_group()
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.length = 0
        self.bounds: list[int] = [0]  # rank r holds positions bounds[r] to bounds[r + 1]
        self.bytes = 0  # sent to other ranks so far, forward and backward
        self._plans: dict[Any, Exchange] = {}
        self._given, self._met = length, False
        if length is not None:
            self._set(split_sizes(length, self.ranks))

    @property
    def start(self) -> int:
        return self.bounds[self.rank]

    @property
    def stop(self) -> int:
        return self.bounds[self.rank + 1]

    def parts(self) -> list[tuple[int, int]]:
        return list(zip(self.bounds[:-1], self.bounds[1:], strict=True))

    def _set(self, sizes: list[int]) -> None:
        if sizes == [b - a for a, b in self.parts()]:
            return
        if min(sizes) < 1:
            raise ValueError(f"every rank needs at least one token, but the parts have {sizes} tokens")
        self._plans.clear()
        self.bounds = [0, *accumulate(sizes)]
        self.length = self.bounds[-1]

    def agree(self, tokens: int, device: torch.device, call: str = "a layer without segments") -> None:
        """Learn how many tokens each rank holds, and whether all make this call. With `length` given, only the first
        call is exchanged."""
        if self._given is not None:
            if tokens != self.stop - self.start:
                raise ValueError(
                    f"rank {self.rank} should hold {self.stop - self.start} of {self.length} tokens, got {tokens}; "
                    "split the sequence with weft.parallel.shard"
                )
            if self._met:
                return
        self._met = True
        mine = torch.tensor([tokens, crc32(call.encode())], device=device)
        found = [torch.empty_like(mine) for _ in range(self.ranks)]
        with self.contact():
            dist.all_gather(found, mine, group=self.group)
        sizes, calls = zip(*(pair.tolist() for pair in found), strict=True)
        if len(set(calls)) > 1:
            raise ValueError(f"the ranks make different calls, but only L may differ: rank {self.rank} calls {call}")
        self._set(list(sizes))

    def all_to_all(self, parts: list[Tensor], counts: list[int]) -> list[Tensor]:
        self.bytes += sum(p.numel() * p.element_size() for r, p in enumerate(parts) if r != self.rank)
        with self.contact():
            return self._send(parts, counts)

    def contact(self) -> AbstractContextManager[None]:
        """Around calls of torch.distributed, which fail if another rank has died."""
        return _contact(self.rank, self.ranks)

    def _send(self, parts: list[Tensor], counts: list[int]) -> list[Tensor]:
        return all_to_all(parts, counts, self.group)

    def plan(self, key: Any, held: Callable[[int], Numbers], wanted: Callable[[int], Numbers]) -> Exchange:
        """The exchange named `key`, computed once for the current parts."""
        if key not in self._plans:
            ranks = range(self.ranks)
            self._plans[key] = Exchange([held(r) for r in ranks], [wanted(r) for r in ranks], self.rank)
        return self._plans[key]

    def tokens(self, r: int) -> range:
        return range(self.bounds[r], self.bounds[r + 1])

    def move(self, plan: Exchange, *tensors: Tensor) -> list[Tensor]:
        """Exchange tensors (B, H, rows, X) of one dtype along their rows, in one message."""
        plan.on(tensors[0].device)
        joined = torch.cat(tensors, -1) if len(tensors) > 1 else tensors[0]
        moved = exchange_rows(joined.movedim(2, 0).contiguous(), plan, self).movedim(0, 2)
        return list(moved.split([t.shape[-1] for t in tensors], -1))

    def move_flags(self, plan: Exchange, flags: Tensor) -> Tensor:
        """Exchange booleans (B, rows)."""
        (moved,) = self.move(plan, flags[:, None, :, None].to(torch.uint8))
        return moved[:, 0, :, 0].bool()

    def everywhere(self, flags: Tensor) -> Tensor:
        """The whole of a mask (B, part) -> (B, L)."""
        return self.move_flags(self.plan("everywhere", self.tokens, lambda r: range(self.length)), flags)

    def each(self, x: Tensor) -> Tensor:
        """x (B, X) of every rank: (B, ranks, X)."""
        plan = self.plan("each part", lambda r: range(r, r + 1), lambda r: range(self.ranks))
        return self.move(plan, x[:, None, None])[0][:, 0]

    def documents(self, segments: Tensor | Segments, x: Tensor) -> Documents:
        """The packed documents of this rank's tokens x (B, part, ...)."""
        self.agree(x.shape[1], x.device, "a layer with segments")
        return documents_in(self, segments, x)

    def attend(
        self, attn: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: PositionBias | None,
        segments: Tensor | Segments | None = None, **inputs: Any,
    ) -> Tensor:  # fmt: skip
        function = SHARDED.get(attn.name)
        if function is None:
            raise ValueError(
                f"{attn.name} does not support context parallelism; use one of: {', '.join(sorted(SHARDED))}"
            )
        if any(x is not None for x in inputs.values()):
            raise ValueError(f"context parallelism does not support {', '.join(inputs)}= of {attn.name}")
        attn.check_tensors(q, k, v, mask)
        if q.shape[2] != k.shape[2]:
            raise ValueError("context parallelism supports only self-attention (Lq = Lk)")
        shape = f"q ({q.shape[0]}, {q.shape[1]}, L, {q.shape[3]}), {k.shape[1]} key heads, {q.dtype}"
        given = [name for name, x in (("mask", mask), ("bias", bias), ("segments", segments)) if x is not None]
        self.agree(q.shape[2], q.device, f"{attn.name}: {shape}, with {' and '.join(given) or 'no mask'}")
        documents = None if segments is None else documents_in(self, segments, q[:, 0])
        length = self.length if documents is None else documents.longest
        attn.check_length(length)
        attn.check_bias(bias, q.shape[0], length, q.device)
        q, k, v = attn.clean(q, k, v, mask if documents is None else documents.real(mask))
        with sharding.use(None), without_autocast(q):
            if documents is None:
                return function(self, attn, q, k, v, mask, bias)
            out = attn(q, k, v, mask, bias, documents.inside).clone()
            for i, row, at, sizes in documents.crossing():
                if i not in documents.members:
                    documents.members[i] = Members(self, sizes)
                rows, members = slice(row, row + 1), documents.members[i]
                part = [x[rows, :, at] for x in (q, k, v)]
                out[rows, :, at] = function(members, attn, *part, None if mask is None else mask[rows, at], bias)
            return out


class Members(Context):
    """Those ranks that hold a document, and how many of its tokens each of them has."""

    def __init__(self, outer: Context, sizes: dict[int, int]):
        self.outer, self.peers = outer, [dist.get_global_rank(outer.group, r) for r in sizes]
        self.rank, self.ranks = list(sizes).index(outer.rank), len(sizes)
        self.length, self.bounds, self.bytes = 0, [0], 0
        self._plans, self._given = {}, sum(sizes.values())
        self._set(list(sizes.values()))

    def contact(self) -> AbstractContextManager[None]:
        return self.outer.contact()

    def _send(self, parts: list[Tensor], counts: list[int]) -> list[Tensor]:
        """Directly from rank to rank, because the other ranks of the group do not take part."""
        self.outer.bytes += sum(p.numel() * p.element_size() for r, p in enumerate(parts) if r != self.rank)
        received = [parts[0].new_empty(n, *parts[0].shape[1:]) for n in counts]
        received[self.rank].copy_(parts[self.rank])
        messages = []
        for r, peer in enumerate(self.peers):
            if r != self.rank and len(parts[r]):
                messages.append(dist.P2POp(dist.isend, parts[r].contiguous(), peer, self.outer.group))
            if r != self.rank and counts[r]:
                messages.append(dist.P2POp(dist.irecv, received[r], peer, self.outer.group))
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()
        return received


@contextmanager
def _contact(rank: int, ranks: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {rank} lost contact with another rank of its context-parallel group of {ranks}; look for the first "
            "error among the other ranks"
        ) from error


def refuse_dropout(attn: Attention) -> None:
    if attn.dropout_now:
        raise ValueError(
            f"{attn.name} does not support dropout={attn.dropout} with context parallelism; use dropout=0, or "
            "'local', 'longformer' or 'combiner-fixed'"
        )


@contextmanager
def context(mesh: Any, length: int | None = None) -> Iterator[Context]:
    """Within this block, every mechanism treats its inputs as this rank's part of one sequence.

    mesh: a one-dimensional DeviceMesh. length: tokens of the whole sequence, if it was split with `shard`; without it
    the ranks exchange the lengths of their parts at every call, and not only at the first. The backward pass may run
    outside the block.
    """
    made = Context(mesh, length)
    with sharding.use(made):
        yield made


def split_sizes(length: int, ranks: int) -> list[int]:
    """Tokens per rank: the parts differ by at most one token."""
    return [length // ranks + (r < length % ranks) for r in range(ranks)]


Sequence = TypeVar("Sequence", Tensor, Segments)


def shard(x: Sequence, mesh: Any, dim: int = 1) -> Sequence:
    """This rank's part of x, which all ranks hold, along the sequence dimension."""
    ranks: int = mesh.size()
    length: int = x.shape[dim]
    if length < ranks:
        raise ValueError(f"cannot split {length} tokens over {ranks} ranks: every rank needs one")
    if isinstance(x, Segments):
        return Documents(x, [0, *accumulate(split_sizes(length, ranks))], mesh.get_local_rank(), x.device)
    return x.split(split_sizes(length, ranks), dim)[mesh.get_local_rank()]


def unshard(x: Tensor, mesh: Any, dim: int = 1) -> Tensor:
    """The whole sequence from its parts, on every rank. Gradients flow back to the parts; each rank's loss counts."""
    made = Context(mesh)
    made.agree(x.shape[dim], x.device)
    plan = Exchange([made.tokens(r) for r in range(made.ranks)], [range(made.length)] * made.ranks, made.rank)
    return exchange_rows(x.movedim(dim, 0).contiguous(), plan.on(x.device), made).movedim(0, dim)


def shard_sequence(model: nn.Module, mesh: Any) -> nn.Module:
    """From now on, `model(...)` takes whole sequences on every rank, and returns the output of this rank's part.

    It splits the arguments whose second dimension is as long as the first one's: ids, masks, segments, targets. With
    activation checkpointing, also call backward() inside `weft.parallel.context`.
    """
    inner, contexts = model.forward, dict[int, Context]()

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, (Tensor, Segments)) and len(x.shape) > 1]
        if not given:
            raise ValueError("shard_sequence: the model was called without a tensor (B, L, ...)")
        length = given[0].shape[1]
        if length not in contexts:
            contexts.clear()
            contexts[length] = Context(mesh, length)

        def part(x: Any) -> Any:
            return shard(x, mesh) if any(x is y for y in given) and x.shape[1] == length else x

        with sharding.use(contexts[length]):
            return inner(*map(part, args), **{name: part(x) for name, x in kwargs.items()})

    model.forward = forward  # type: ignore[method-assign]
    return model
