"""Packed documents: several documents side by side in one row, each computed as if it were alone.

    attn(q, k, v, segments=numbers)          numbers (B, L): one number per document, 0 = padding
    attn(q, k, v, segments=Segments.from_lengths([700, 1300]))

Documents are gathered into groups of rows, padded on the right to the longest of the group, and the outputs are put
back in place. A mechanism runs once per group, so position biases, block grids and random samples start at the first
token of each document. No pair of tokens from different documents is computed. Padding must not change a document's
result: documents share a group only if their lengths give the same `Attention.pattern_for`.

The shapes depend on the lengths, so the CPU must know them. Reading a segment tensor waits for the GPU once; the result
is kept while the tensor lives. `Segments.from_lengths` does not wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .dispatch import use_kernel
from .heads import spread
from .precision import autocast, without_autocast
from .segments import Plan, Segments, documents_of
from .softmax import flash_runs, fused_packed, without_cudnn
from .staging import outside_graphs

if TYPE_CHECKING:
    from .contract import Attention, PositionBias

# Mechanisms whose packed kernels were tested on a GPU; "auto" uses no others.
CONFIRMED = frozenset({"combiner-fixed", "linear", "local", "longformer"})


@outside_graphs("segments give shapes that depend on the documents' lengths; compile without fullgraph=True")
def packed(
    attn: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: PositionBias | None,
    segments: Tensor | Segments,
    inputs: dict[str, Any],
) -> Tensor:
    """`attn` on each document of a packed batch."""
    documents = checked(attn, q, k, v, mask, bias, segments)
    if not len(documents):
        (v,) = autocast(spread(q, k, v)[1])
        return torch.where(torch.zeros((), dtype=torch.bool, device=v.device), v, 0)
    out = _in_place(attn, q, k, v, mask, bias, documents)
    if out is not None:
        return out
    block = attn.separate_blocks if bias is None else None  # a bias needs the positions in the document
    plan = documents.plan(attn.pattern_for, block, longest_row(attn, bias, documents))
    masks = _masks(attn, documents, plan, mask)
    attn.check_length(documents.longest)
    mechanism: Any = attn  # may have more inputs
    with one_call(attn, k, documents.real(mask)), without_cudnn(q):
        heads = zip(*(plan.unpack(x, by_head=True) for x in (q, k, v)), strict=True)
        more = {name: plan.unpack(x) for name, x in inputs.items()}
        outs = []
        for number, (group, real) in enumerate(zip(heads, masks, strict=True)):
            own = {name: x[number] for name, x in more.items()}
            if block is None and real is None:
                outs.append(mechanism(*group, None, bias, **own))  # finds a call that a kernel has run before
                continue
            if block is None:  # a row of blocks may be longer than max_length
                mechanism.check(*group, real, bias)
            outs.append(mechanism.compute(*group, real, bias, zeroed=mask is None, **own))
    return plan.repack(outs, documents.shape, by_head=True)


def longest_row(attn: Attention, bias: PositionBias | None, documents: Segments) -> int | None:
    """The most tokens to which groups may be padded. A bias may be a table that ends at the longest document."""
    return attn.max_length if bias is None else documents.longest


def _in_place(
    attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Any, documents: Segments
) -> Tensor | None:
    """The mechanism's kernel on the tokens where they are; None if it has none for packed documents."""
    if bias is not None:
        return None
    kernel: Any = attn.fused
    confirmed = attn.backend != "auto" or attn.name in CONFIRMED
    fused = kernel is not None and kernel.packed is not None and confirmed and use_kernel(attn, q, k, v, bias)
    if not fused and not (attn.packs and mask is None and flash_runs(q, q.shape[3])):
        return None
    attn.check_length(documents.longest)
    grouped = fused and kernel.grouped(attn)
    if k.shape[1] != q.shape[1] and not grouped:
        k, v = spread(q, k, v)
    # A kernel writes neither outputs nor gradients of padding.
    q, k, v = attn.clean(q, k, v, documents.real(mask), self_attention=True)
    with without_autocast(q):
        if fused:
            out = kernel.packed(attn, *(kernel.near(q, k, v) or (q, k, v)), mask, documents)
        else:
            out = attn.attend_packed(q, k, v, documents)
    if out is None or documents.mask is None:
        return out
    return torch.where(documents.mask[:, None, :, None], out, 0)


@outside_graphs("segments give shapes that depend on the documents' lengths; compile without fullgraph=True")
def reads_first(attn: Attention, x: Tensor, documents: Segments) -> bool:
    """Whether `packed_first` runs."""
    able = (attn.packs or attn.first_sees_all) and not attn.causal and not documents.padded
    return able and flash_runs(x, attn.head_dim)


@outside_graphs("segments give shapes that depend on the documents' lengths; compile without fullgraph=True")
def packed_first(attn: Attention, q: Tensor, k: Tensor, v: Tensor, documents: Segments) -> Tensor:
    """`attn` of the first query of each document, (1, H, documents, D), on the document's keys and values."""
    attn.check_length(documents.longest)
    q, k, v = attn.clean(q, *spread(q, k, v), None)
    with without_autocast(q):
        if attn.packs:
            return attn.attend_packed(q, k, v, documents)
        return fused_packed(q, k, v, documents, causal=False, dropout=attn.dropout_now)


def packed_weights(
    attn: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: PositionBias | None,
    segments: Tensor | Segments,
    inputs: dict[str, Any],
) -> Tensor:
    """The effective matrix (B, H, L, L) of a packed batch: zero between documents."""
    documents = checked(attn, q, k, v, mask, bias, segments)
    B, H, L, _ = q.shape
    whole = q.new_zeros(B * L, B * L, H)
    if len(documents):
        plan = documents.plan(attn.pattern_for, None, longest_row(attn, bias, documents))
        heads = zip(*(plan.unpack(x, by_head=True) for x in (q, k, v)), strict=True)
        more = {name: plan.unpack(x) for name, x in inputs.items()}
        at = plan.split(plan.index)
        filled = plan.split(torch.ones_like(plan.index, dtype=torch.bool) if plan.filled is None else plan.filled)
        for number, (group, real) in enumerate(zip(heads, _masks(attn, documents, plan, mask), strict=True)):
            own = {name: x[number] for name, x in more.items()}
            weights: Any = attn.weights  # a mechanism may have more inputs
            found = weights(*group, real, bias, **own).permute(0, 2, 3, 1)
            pairs = filled[number][:, :, None] & filled[number][:, None]
            i, j = torch.broadcast_tensors(at[number][:, :, None], at[number][:, None])
            whole[i[pairs], j[pairs]] = found[pairs].to(whole.dtype)
    rows = torch.arange(B, device=q.device)
    return whole.view(B, L, B, L, H)[rows, :, rows].permute(0, 3, 1, 2)


def checked(attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Any, segments: Any) -> Segments:
    """Check a packed call; the groups are checked again, as calls of the mechanism."""
    attn.check_tensors(q, k, v, mask)
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"segments are for self-attention: q and k must have the same length, got {q.shape[2]} and {k.shape[2]}"
        )
    if bias is not None and q.shape[0] > 1:
        _check_rows(attn, bias, q.shape[0], q.device)
    return documents_of(segments, q[:, 0])


@torch.no_grad()
def _check_rows(attn: Any, bias: Any, batch: int, device: torch.device) -> None:
    """Documents move to other rows, where a bias with values for each row would not find them."""
    attn.check_bias(bias, batch, 1, device)
    first = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
    rows = bias(first, first).shape[0]
    if rows > 1:
        raise ValueError(
            f"segments need a position bias that is the same for all rows, but this one has values for {rows}; pass "
            "one document per row, or one row per call"
        )


@contextmanager
def one_call(attn: torch.nn.Module, k: Tensor, real: Tensor | None) -> Iterator[None]:
    """Within this block, several calls count as one for modules with state or random samples (their `one_call`)."""
    with ExitStack() as stack:
        for module in attn.modules():
            enter: Any = getattr(module, "one_call", None)
            if enter is not None:
                stack.enter_context(enter(k, real))
        yield


def _masks(attn: Attention, documents: Segments, plan: Plan, mask: Tensor | None) -> list[Tensor | None]:
    """The mask of each group. Causal mechanisms ignore what follows, so they need none for padding on the right."""
    filled = None if attn.causal or plan.filled is None else plan.filled
    if mask is not None:
        seen = mask.flatten().index_select(0, plan.index)
        filled = seen if plan.filled is None else seen & plan.filled
    return [None] * len(plan.shapes) if filled is None else list(plan.split(filled))
