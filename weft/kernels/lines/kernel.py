"""Attention along the lines of a grid with one softmax: forward and backward as one PyTorch operator.

    out_i = Σ_parts Σ_{j ∈ part(i)} e^{q_i·k_j/√D} v_j / Z_i          Z_i over all parts

A part has a source of keys and values, one per cell of the grid (tokens or summaries). Each query attends to them along
its own row or column by a rule. The Combiners on a grid consist of such parts, and so does the local softmax of their
summaries. `weft/core/joint.py` is the reference. Triton is imported only when a kernel runs, so this module can be
imported anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ...core.blocks import ceil_div
from ...core.dispatch import DTYPES, LARGEST_HEAD
from ...core.precision import autocast
from ...core.tiles import (
    Tiles,
    TileTable,
    as_flags,
    block_width,
    empty_rows,
    for_operator,
    near_rows,
    precision,
    strides,
    tile_table,
    tiles_for,
)
from ..band.kernel import empty_outputs
from ..grouped import gradients, sum_to_groups
from ..launch import launch
from ..operator import Operator

LEAST_LENGTH = 256  # grid Combiners with pooling: the shortest length measured; the kernels are faster from here on
Axis = Literal["row", "column"]
Rule = Literal["up_to", "before", "well_before", "after", "others", "apart", "all"]  # on the cells: `forward.py`
AXES: tuple[Axis, ...] = get_args(Axis)
RULES: tuple[Rule, ...] = get_args(Rule)

TILES = tile_table(
    {
        "attend": ((64, 32, 4, 3), (64, 32, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1)),
        "query gradients": ((64, 32, 4, 3), (64, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 1)),
        "key gradients": ((32, 64, 4, 3, 168), (64, 64, 8, 2), (32, 32, 4, 1), (32, 32, 4, 1)),
    }
)


@dataclass(frozen=True)
class Lines:
    """The rows or the columns of a grid: cell p of line l is token l·line_step + p·cell_step."""

    lines: int
    cells: int
    line_step: int
    cell_step: int

    @classmethod
    def of(cls, axis: Axis, n: int, m: int) -> Lines:
        """Lines of a grid with n rows of m tokens."""
        return cls(n, m, m, 1) if axis == "row" else cls(m, n, 1, m)


@dataclass(frozen=True)
class LinePart:
    """Keys and values that a query attends to along its own row or column. `LinePart(0, "row", "up_to")` is the tokens
    of its row up to itself."""

    source: int  # 0: the tokens; 1, 2, ..: the spans
    axis: Axis
    rule: Rule


def line_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    parts: list[LinePart],
    *,
    width: int,
    spans: tuple[tuple[Tensor, Tensor, Tensor], ...] = (),
    key: Tensor | None = None,
    threshold: int = 0,
) -> Tensor:
    """Attention of q (B, H, Lq, D) over the `parts` of a grid with rows of `width` tokens.

    Source 0 is k, v (B, H, L, D) and mask (B, L); sources 1, 2, .. are `spans`: keys and values (B, H, cells, D) and
    which of them have any token, (B or 1, cells). `key` and `threshold` are those of `dropout_key`.
    """
    q, k, v = autocast(q, k, v)
    sources = [q, k, v, for_operator(mask)]
    for keys, values, some in spans:
        sources += [*autocast(keys, values), for_operator(some)]
    return _operators[len(spans)](*sources, key, encode(parts), width, threshold)


def _forward(q, k, v, mask, *rest):
    *spans, key, parts, width, threshold = rest
    sources = _sources(k, v, mask, *spans)
    check(q, sources)
    out, lse = empty_outputs(q)
    q = near_rows(q)
    n = grid_rows(q, k, width)
    for number, part in enumerate(decode(parts)):
        s, lines, dropout = part.source, Lines.of(part.axis, n, width), (key, threshold)
        attend_lines(q, *sources[s], out, lse, lines, part.rule, *dropout, source=s, more=number > 0)
    return out, lse


def _backward(dout, q, k, v, mask, *rest):
    *spans, key, out, lse, parts, width, threshold = rest
    dq, delta = empty_rows(q), torch.empty_like(lse)
    (dk, by_head_k), (dv, by_head_v) = gradients(k, q), gradients(v, q)
    of_spans = [(empty_rows(keys), empty_rows(values)) for keys, values, _ in _threes(*spans)]
    written = [(by_head_k, by_head_v), *of_spans]
    q, dout = near_rows(q), near_rows(dout)
    n = grid_rows(q, k, width)
    sources = _sources(k, v, mask, *spans)
    begun = set()
    for number, part in enumerate(decode(parts)):
        s, lines, dropout = part.source, Lines.of(part.axis, n, width), (key, threshold)
        keys, rule = sources[s], part.rule
        line_query_gradients(q, *keys, out, dout, lse, delta, dq, lines, rule, *dropout, source=s, more=number > 0)
        line_key_gradients(q, *keys, dout, lse, delta, *written[s], lines, rule, *dropout, source=s, more=s in begun)
        begun.add(s)
    sum_to_groups(by_head_k, dk)
    sum_to_groups(by_head_v, dv)
    return dq, dk, dv, *(x for pair in of_spans for x in pair)


def _operator(spans: int) -> Operator:
    """The operator for a number of spans; `_operators` has one for each number that a Combiner uses."""
    more = "".join(f"Tensor kbar{i}, Tensor vbar{i}, Tensor some{i}, " for i in range(spans))
    return Operator(
        f"line_attention_{spans}",
        f"Tensor q, Tensor k, Tensor v, Tensor? mask, {more}Tensor? key, int[] parts, int width, int threshold",
        _forward,
        empty_outputs,
        _backward,
        outputs=2,
        gradients=(0, *(x for i in range(spans + 1) for x in (1 + 3 * i, 2 + 3 * i))),
    )


_operators = [_operator(spans) for spans in range(5)]


# Launches. `flags` (B or 1, cells): which keys are allowed; None: all. k, v and flags belong to one source; its number
# only matters for dropout.


def attend_lines(
    q: Tensor, k: Tensor, v: Tensor, flags: Tensor | None, out: Tensor, lse: Tensor, lines: Lines, rule: Rule,
    key: Tensor | None = None, threshold: int = 0, *, source: int = 0, more: bool,
    old: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """Write out and lse; with `more`, continue from their values, or from those in `old`, with the same strides."""
    from .forward import attend

    t = tiles(TILES, "attend", lines.cells, q)
    common, options = _common(q, k, flags, key, lines, rule, threshold, source)
    launch(
        attend, _programs(q, lines, t.queries),
        q, k, v, _pointer(flags, q), _pointer(key, q), out, lse, *(old or (out, lse)),
        *strides(q), *strides(k), *strides(v), *strides(out), *common,
        scales(q)[0], BQ=t.queries, BK=t.keys, MORE=more, **options, **t.launch(),
    )  # fmt: skip


def line_query_gradients(
    q: Tensor, k: Tensor, v: Tensor, flags: Tensor | None, out: Tensor, dout: Tensor, lse: Tensor, delta: Tensor,
    dq: Tensor, lines: Lines, rule: Rule, key: Tensor | None = None, threshold: int = 0, *, source: int = 0,
    more: bool, known: bool | None = None,
) -> None:  # fmt: skip
    """Write dq; with `more`, add to it. `known`: read delta instead of writing it; by default, with `more`."""
    from .backward import query_gradients

    t = tiles(TILES, "query gradients", lines.cells, q)
    common, options = _common(q, k, flags, key, lines, rule, threshold, source)
    launch(
        query_gradients, _programs(q, lines, t.queries),
        q, k, v, _pointer(flags, q), _pointer(key, q), out, dout, lse, delta, dq,
        *strides(q), *strides(k), *strides(v), *strides(out), *strides(dout), *strides(dq), *common,
        *scales(q), BQ=t.queries, BK=t.keys, MORE=more, KNOWN=more if known is None else known, **options, **t.launch(),
    )  # fmt: skip


def line_key_gradients(
    q: Tensor, k: Tensor, v: Tensor, flags: Tensor | None, dout: Tensor, lse: Tensor, delta: Tensor, dk: Tensor,
    dv: Tensor, lines: Lines, rule: Rule, key: Tensor | None = None, threshold: int = 0, *, source: int = 0,
    more: bool, products: Tensor | None = None,
) -> None:  # fmt: skip
    """Write dk and dv; with `more`, add to them. `products` (B, H, cells) gets dk_j · k_j + dv_j · v_j."""
    from .backward import key_gradients

    t = tiles(TILES, "key gradients", lines.cells, q)
    common, options = _common(q, k, flags, key, lines, rule, threshold, source)
    launch(
        key_gradients, _programs(q, lines, t.keys),
        q, k, v, _pointer(flags, q), _pointer(key, q), dout, lse, delta, dk, dv, lse if products is None else products,
        *strides(q), *strides(k), *strides(v), *strides(dout), *strides(dk), *strides(dv), *common,
        *scales(q), BQ=t.queries, BK=t.keys, MORE=more, KEEP=products is not None, **options, **t.launch(),
    )  # fmt: skip


def _common(
    q: Tensor, k: Tensor, flags: Tensor | None, key: Tensor | None, lines: Lines, rule: Rule, threshold: int,
    source: int,
):  # fmt: skip
    B, H, L, D = q.shape
    per_batch = flags.stride(0) if flags is not None and flags.shape[0] > 1 else 0
    sizes = (per_batch, B * H, H, L, k.shape[2], lines.cells, lines.line_step, lines.cell_step, threshold)
    options = {"D": D, "BLOCK_D": block_width(D), "PRECISION": precision(q), "GROUP": H // k.shape[1]}
    dropout = {"DROPOUT": key is not None, "SOURCE": 0 if key is None else source}
    return sizes, {**options, **dropout, "RULE": rule, "HAS_FLAGS": flags is not None}


def _programs(q: Tensor, lines: Lines, tile: int) -> tuple[int]:
    return (lines.lines * ceil_div(lines.cells, tile) * q.shape[0] * q.shape[1],)


def _pointer(x: Tensor | None, stand_in: Tensor) -> Tensor:
    return stand_in if x is None else x


def _sources(*sources: Any) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    return [
        (near_rows(keys), near_rows(values), None if which is None else as_flags(which))
        for keys, values, which in _threes(*sources)
    ]


def _threes(*sources: Any) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Keys, values and flags of each source."""
    return zip(sources[::3], sources[1::3], sources[2::3], strict=True)


def scales(q: Tensor) -> tuple[float, float]:
    """Factors of a product q·k: for a logit to base 2, and for a gradient."""
    return math.log2(math.e) / math.sqrt(q.shape[3]), 1 / math.sqrt(q.shape[3])


def grid_rows(q: Tensor, k: Tensor, width: int) -> int:
    return ceil_div(max(q.shape[2], k.shape[2]), width)


def encode(parts: Sequence[LinePart]) -> tuple[int, ...]:
    """Encode each part as three numbers: operator schemas support only plain types."""
    return tuple(x for part in parts for x in (part.source, AXES.index(part.axis), RULES.index(part.rule)))


def decode(numbers: Sequence[int]) -> list[LinePart]:
    return [LinePart(s, AXES[a], RULES[r]) for s, a, r in zip(*(numbers[i::3] for i in range(3)), strict=True)]


def check(q: Tensor, sources: Sequence[tuple[Tensor, Tensor, Tensor | None]]) -> None:
    B, H, _, D = q.shape
    for k, v, _ in sources:
        if k.shape != v.shape or (k.shape[0], k.shape[3]) != (B, D) or H % k.shape[1]:
            raise ValueError(
                f"the kernel needs keys and values of one shape that matches q {tuple(q.shape)}, got {tuple(k.shape)} "
                f"and {tuple(v.shape)}; use backend='torch'"
            )
    if D > LARGEST_HEAD:
        raise ValueError(f"the kernel supports head_dim up to {LARGEST_HEAD}, got {D}; use backend='torch'")
    if q.dtype not in DTYPES or any(x.dtype != q.dtype for k, v, _ in sources for x in (k, v)):
        raise ValueError(f"the kernel needs one dtype for all tensors, float32, float16 or bfloat16, got {q.dtype}")


def tiles(table: TileTable, kernel: str, cells: int, q: Tensor) -> Tiles:
    return tiles_for(table, kernel, q.shape[3], q.element_size(), cells)
