"""The Combiners on a grid as one PyTorch operator: pooling, the values of the spans, and attention.

    out_i = Σ_parts Σ_{j ∈ part(i)} e^{q_i·k_j/√D} v_j / Z_i          over tokens and spans, Z_i over all parts
    kbar_s = pool_j k_j      qbar_s = pool_j q_j      vbar_s = Σ_j softmax_j(qbar_s·k_j/√D) v_j          over the span

One operator instead of several adds the gradients of q, k and v in place, and costs less host time. It also computes
the mean of several Combiners on one grid, whose direct parts are the same (`mixture.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...core.blocks import ceil_div
from ...core.precision import autocast
from ...core.tiles import Block, as_flags, block_width, empty_rows, for_operator, near_rows, strides
from ..grouped import gradients, sum_to_groups
from ..launch import launch
from ..lines.kernel import (
    AXES,
    RULES,
    Axis,
    LinePart,
    Lines,
    Rule,
    attend_lines,
    check,
    decode,
    encode,
    line_key_gradients,
    line_query_gradients,
)
from ..operator import Operator
from .kernel import has_kernel, line_pool_gradients, pool_lines


@dataclass(frozen=True)
class GridPlan:
    """Parts and spans as numbers, made once per mechanism. `members`: how many of the last parts belong to each member
    of a mixture, in order; all share the parts before."""

    parts: tuple[int, ...]
    spans: tuple[int, ...]
    members: tuple[int, ...]

    @classmethod
    def of(cls, parts: Sequence[LinePart], spans: Sequence[tuple[Axis, Rule]], members: Sequence[int] = ()) -> GridPlan:
        numbers = (x for axis, rule in spans for x in (AXES.index(axis), RULES.index(rule)))
        return cls(encode(parts), tuple(numbers), tuple(members))

    def has_kernel(self, pool: str, length: int, width: int) -> bool:
        """Whether the kernels support its spans, of which there is at least one."""
        return bool(self.spans) and all(has_kernel(pool, AXES[axis], length, width) for axis in {*self.spans[::2]})


def grid_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, plan: GridPlan, *, pool: str, width: int,
    key: Tensor | None = None, threshold: int = 0,
) -> Tensor:  # fmt: skip
    """q, k and v (B, H, L, D), mask (B, L) -> (B, H, L, D). Source 0 of the parts is the tokens; source 1, 2, .. the
    spans: each cell has one, which pools along its row or column by a rule. `key` and `threshold` are those of
    `dropout_key`; not for a mean, whose members drop independently."""
    assert key is None or not plan.members
    q, k, v = autocast(q, k, v)
    return _operator(q, k, v, for_operator(mask), key, plan.parts, plan.spans, plan.members, pool, width, threshold)


def _spans(numbers: tuple[int, ...]) -> list[tuple[Axis, Rule]]:
    return [(AXES[axis], RULES[rule]) for axis, rule in zip(numbers[::2], numbers[1::2], strict=True)]


def _kept(q: Tensor, mask: Tensor | None, numbers: tuple[int, ...], members: tuple[int, ...], width: int) -> Block:
    """The log2 normalisers of out; the outputs of the members and their log2 normalisers; of the spans qbar, kbar,
    vbar, log2 normalisers, and which have any token."""
    B, H, L, D = q.shape
    M, cells = len(members), ceil_div(L, width) * width
    row = ((B, cells, H, D), q.dtype)
    span = (row, row, row, ((B, H, cells), torch.float32), ((1 if mask is None else B, cells), torch.bool))
    own = ((B, H, L), torch.float32), ((M, B, L, H, D), q.dtype), ((M, B, H, L), torch.float32)
    return Block((*own, *span * (len(numbers) // 2)))


def _split(q, mask, numbers, members, width, block):
    lse, outs, lses, *rest = _kept(q, mask, numbers, members, width).split(block)
    spans = [rest[i : i + 5] for i in range(0, len(rest), 5)]
    return lse, outs, lses, [(*(x.transpose(1, 2) for x in span[:3]), *span[3:]) for span in spans]


def _outputs(q: Tensor, *about: Any) -> tuple[Tensor, Tensor]:
    return empty_rows(q), _kept(q, *about).empty(q)


def _member_of(parts: int, members: tuple[int, ...]) -> list[int]:
    """For each part, the number of its member; -1 if all share it."""
    return [-1] * (parts - sum(members)) + [number for number, count in enumerate(members) for _ in range(count)]


def _forward(q, k, v, mask, key, parts, numbers, members, pool, width, threshold):
    from .mixture import average

    check(q, [(k, v, None)])
    about = mask, numbers, members, width
    out, block = outputs = _outputs(q, *about)
    lse, outs, lses, kept = _split(q, *about, block)
    q, k, v = (near_rows(x) for x in (q, k, v))
    (B, H, L, D), n, flags = q.shape, ceil_div(q.shape[2], width), None if mask is None else as_flags(mask)
    sources: list[tuple[Tensor, Tensor, Tensor | None]] = [(k, v, flags)]
    for (axis, rule), (qbar, kbar, vbar, local, some) in zip(_spans(numbers), kept, strict=True):
        pool_lines(q, k, mask, qbar, kbar, some, axis, rule, pool, width)
        attend_lines(qbar, k, v, flags, vbar, local, Lines.of(axis, n, width), rule, more=False)
        sources.append((kbar, vbar, as_flags(some)))
    shared = out, lse
    if members:
        shared = q.new_empty(B, L, H, D).transpose(1, 2), torch.empty_like(lse)
    begun = {-1: shared}
    for number, (part, member) in enumerate(zip(decode(parts), _member_of(len(parts) // 3, members), strict=True)):
        s, lines, dropout = part.source, Lines.of(part.axis, n, width), (key, threshold)
        its_out, its_lse = shared if member < 0 else (outs[member].transpose(1, 2), lses[member])
        old = begun.get(member, shared)
        attend_lines(q, *sources[s], its_out, its_lse, lines, part.rule, *dropout, source=s, more=number > 0, old=old)
        begun[member] = its_out, its_lse
    if members:
        launch(
            average, (ceil_div(L, 64) * B * H,), outs, lses, out, lse, *strides(out), B * H, H, L,
            math.log2(len(members)), D=D, BLOCK_D=block_width(D), ROWS=64, MEMBERS=len(members), num_warps=4,
        )  # fmt: skip
    return outputs


def _backward(dout, q, k, v, mask, key, out, block, parts, numbers, members, pool, width, threshold):
    from .mixture import products

    lse, outs, lses, kept = _split(q, mask, numbers, members, width, block)
    dq, delta, (dk, by_head_k), (dv, by_head_v) = empty_rows(q), torch.empty_like(lse), gradients(k, q), gradients(v, q)
    q, k, v, dout = (near_rows(x) for x in (q, k, v, dout))
    (B, H, L, D), n, flags = q.shape, ceil_div(q.shape[2], width), None if mask is None else as_flags(mask)
    sources = [(k, v, flags), *((kbar, vbar, as_flags(some)) for _, kbar, vbar, _, some in kept)]
    of_spans = [(torch.empty_like(kbar), torch.empty_like(vbar)) for _, kbar, vbar, *_ in kept]
    written = [(by_head_k, by_head_v), *of_spans]
    deltas = torch.empty_like(lses)
    if members:
        launch(
            products, (ceil_div(L, 64) * B * H,), outs, lses, dout, lse, deltas, delta, *strides(dout), B * H, H, L,
            D=D, BLOCK_D=block_width(D), ROWS=64, MEMBERS=len(members), num_warps=4,
        )  # fmt: skip
    begun = set()
    for number, (part, member) in enumerate(zip(decode(parts), _member_of(len(parts) // 3, members), strict=True)):
        s, lines, rule, dropout = part.source, Lines.of(part.axis, n, width), part.rule, (key, threshold)
        sums = (lse, delta) if member < 0 else (lses[member], deltas[member])
        keys, more, known = sources[s], number > 0, bool(members) or number > 0
        line_query_gradients(q, *keys, out, dout, *sums, dq, lines, rule, *dropout, source=s, more=more, known=known)
        line_key_gradients(q, *keys, dout, *sums, *written[s], lines, rule, *dropout, source=s, more=s in begun)
        begun.add(s)
    for (axis, rule), (qbar, kbar, vbar, local, some), (dkbar, dvbar) in zip(
        _spans(numbers), kept, of_spans, strict=True
    ):
        lines, local_delta, dqbar = Lines.of(axis, n, width), torch.empty_like(local), torch.empty_like(qbar)
        line_query_gradients(qbar, k, v, flags, vbar, dvbar, local, local_delta, dqbar, lines, rule, more=False)
        line_key_gradients(qbar, k, v, flags, dvbar, local, local_delta, by_head_k, by_head_v, lines, rule, more=True)
        line_pool_gradients(
            dqbar, dkbar, q, k, mask, qbar, kbar, some, dq, by_head_k, axis, rule, pool, width, more=True
        )  # fmt: skip
    sum_to_groups(by_head_k, dk)
    sum_to_groups(by_head_v, dv)
    return dq, dk, dv


_operator = Operator(
    "grid_attention",
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? key, int[] parts, int[] spans, int[] members, str pool,"
    " int width, int threshold",
    _forward,
    lambda q, k, v, mask, key, parts, numbers, members, pool, width, *rest: _outputs(q, mask, numbers, members, width),
    _backward,
    outputs=2,
)
