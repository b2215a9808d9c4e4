"""Attention along the lines of a grid with one softmax: forward and backward as one PyTorch operator.

    out_i = Σ_parts Σ_{j ∈ part(i)} e^{q_i·k_j/√D} v_j / Z_i          Z_i over all parts

A part has a source of keys and values, one per cell of the grid (tokens or summaries). Each query attends to them along
its own row or column by a rule. The Combiners on a grid consist of such parts, and so does the local softmax of their
summaries. `weft/core/joint.py` is the reference. Triton is imported only when a kernel runs, so this module can be
imported anywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from ...core.blocks import ceil_div
from ...core.dispatch import DTYPES, LARGEST_HEAD
from ...core.precision import autocast
from ...core.tiles import (
    Tiles,
    as_flags,
    block_width,
    empty_rows,
    for_operator,
    next_power_of_two,
    precision,
    rows_contiguous,
    strides,
)

LEAST_LENGTH = 256  # grid Combiners with pooling: the shortest length measured; the kernels are faster from here on
Axis = Literal["row", "column"]
Rule = Literal["up_to", "before", "well_before", "after", "others", "apart", "all"]  # on the cells: `forward.py`
AXES: tuple[Axis, ...] = get_args(Axis)
RULES: tuple[Rule, ...] = get_args(Rule)

# Keys: kernel, maximum head_dim, bytes per element.
TILES: dict[tuple[str, int, int], Tiles] = {
    ("attend", 64, 2): Tiles(64, 32, 4, 3),
    ("attend", 128, 2): Tiles(64, 32, 4, 2),
    ("attend", 64, 4): Tiles(64, 32, 4, 2),
    ("attend", 128, 4): Tiles(32, 32, 4, 1),
    ("query gradients", 64, 2): Tiles(64, 32, 4, 3),
    ("query gradients", 128, 2): Tiles(64, 32, 4, 2),
    ("query gradients", 64, 4): Tiles(32, 32, 4, 2),
    ("query gradients", 128, 4): Tiles(32, 32, 4, 1),
    ("key gradients", 64, 2): Tiles(32, 64, 4, 3, 168),
    ("key gradients", 128, 2): Tiles(64, 64, 8, 2),
    ("key gradients", 64, 4): Tiles(32, 32, 4, 1),
    ("key gradients", 128, 4): Tiles(32, 32, 4, 1),
}


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
) -> Tensor:
    """Attention of q (B, H, Lq, D) over the `parts` of a grid with rows of `width` tokens.

    Source 0 is k, v (B, H, L, D) and mask (B, L); sources 1, 2, .. are `spans`: keys and values (B, H, cells, D) and
    which of them have any token, (B or 1, cells).
    """
    kbars, vbars, some = ([span[x] for span in spans] for x in range(3))
    q, k, v, *bars = autocast(q, k, v, *kbars, *vbars)
    kbars, vbars = bars[: len(spans)], bars[len(spans) :]
    some = [cast(Tensor, for_operator(x)) for x in some]
    return torch.ops.weft.line_attention(q, k, v, for_operator(mask), kbars, vbars, some, encode(parts), width)[0]


@torch.library.custom_op(
    "weft::line_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor[] kbars, Tensor[] vbars, Tensor[] some,"
    " int[] parts, int width) -> (Tensor, Tensor)",
)
def _forward(q, k, v, mask, kbars, vbars, some, parts, width):
    check(q, [k, *kbars], [v, *vbars])
    out, lse = empty_rows(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    q = rows_contiguous(q)
    n = grid_rows(q, k, width)
    sources = _sources(k, v, mask, kbars, vbars, some)
    for number, part in enumerate(decode(parts)):
        lines = Lines.of(part.axis, n, width)
        attend_lines(q, *sources[part.source], out, lse, lines, part.rule, more=number > 0)
    return out, lse


@_forward.register_fake
def _(q, k, v, mask, kbars, vbars, some, parts, width):
    return empty_rows(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op(
    "weft::line_attention_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor[] kbars, Tensor[] vbars, Tensor[] some,"
    " Tensor out, Tensor lse, int[] parts, int width) -> (Tensor, Tensor[], Tensor[])",
)
def _backward(dout, q, k, v, mask, kbars, vbars, some, out, lse, parts, width):
    dq, delta = empty_rows(q), torch.empty_like(lse)
    dks, dvs = ([empty_rows(x) for x in xs] for xs in ([k, *kbars], [v, *vbars]))
    q, dout = rows_contiguous(q), rows_contiguous(dout)
    n = grid_rows(q, k, width)
    sources = _sources(k, v, mask, kbars, vbars, some)
    begun = set()
    for number, part in enumerate(decode(parts)):
        keys, lines = sources[part.source], Lines.of(part.axis, n, width)
        line_query_gradients(q, *keys, out, dout, lse, delta, dq, lines, part.rule, more=number > 0)
        gradients = dks[part.source], dvs[part.source]
        line_key_gradients(q, *keys, dout, lse, delta, *gradients, lines, part.rule, more=part.source in begun)
        begun.add(part.source)
    return dq, dks, dvs


@_backward.register_fake
def _(dout, q, k, v, mask, kbars, vbars, some, out, lse, parts, width):
    dks, dvs = ([empty_rows(x) for x in xs] for xs in ([k, *kbars], [v, *vbars]))
    return empty_rows(q), dks, dvs


def _save(ctx, inputs, output):
    q, k, v, mask, kbars, vbars, some, parts, width = inputs
    ctx.save_for_backward(q, k, v, mask, *kbars, *vbars, *some, *output)
    ctx.spans, ctx.options = len(kbars), (parts, width)
    ctx.set_materialize_grads(False)


def _grad(ctx, dout, *unused):
    S = ctx.spans
    none = [None] * S
    if dout is None:
        return None, None, None, None, none, none, none, None, None
    q, k, v, mask, *rest = ctx.saved_tensors
    kbars, vbars, some, (out, lse) = rest[:S], rest[S : 2 * S], rest[2 * S : 3 * S], rest[3 * S :]
    dq, dks, dvs = torch.ops.weft.line_attention_backward(
        dout, q, k, v, mask, kbars, vbars, some, out, lse, *ctx.options
    )
    return dq, dks[0], dvs[0], None, list(dks[1:]), list(dvs[1:]), none, None, None


_forward.register_autograd(_grad, setup_context=_save)


# Launches. `flags` (B or 1, cells): which keys are allowed; None: all. k, v and flags belong to one source.


def attend_lines(
    q: Tensor, k: Tensor, v: Tensor, flags: Tensor | None, out: Tensor, lse: Tensor, lines: Lines, rule: Rule, *,
    more: bool,
) -> None:  # fmt: skip
    """Write out and lse; with `more`, continue from their values."""
    from .forward import attend

    t = tiles(TILES, "attend", lines.cells, q)
    common, options = _common(q, k, flags, lines, rule)
    attend[_programs(q, lines, t.queries)](
        q, k, v, _pointer(flags, q), out, lse, *strides(q), *strides(k), *strides(v), *strides(out), *common,
        scales(q)[0], BQ=t.queries, BK=t.keys, MORE=more, **options, **t.launch(),
    )  # fmt: skip


def line_query_gradients(
    q: Tensor, k: Tensor, v: Tensor, flags: Tensor | None, out: Tensor, dout: Tensor, lse: Tensor, delta: Tensor,
    dq: Tensor, lines: Lines, rule: Rule, *, more: bool,
) -> None:  # fmt: skip
    """Write dq and delta; with `more`, add to dq and read delta."""
    from .backward import query_gradients

    t = tiles(TILES, "query gradients", lines.cells, q)
    common, options = _common(q, k, flags, lines, rule)
    query_gradients[_programs(q, lines, t.queries)](
        q, k, v, _pointer(flags, q), out, dout, lse, delta, dq,
        *strides(q), *strides(k), *strides(v), *strides(out), *strides(dout), *strides(dq), *common,
        *scales(q), BQ=t.queries, BK=t.keys, MORE=more, **options, **t.launch(),
    )  # fmt: skip


def line_key_gradients(
    q: Tensor, k: Tensor, v: Tensor, flags: Tensor | None, dout: Tensor, lse: Tensor, delta: Tensor, dk: Tensor,
    dv: Tensor, lines: Lines, rule: Rule, *, more: bool, products: Tensor | None = None,
) -> None:  # fmt: skip
    """Write dk and dv; with `more`, add to them. `products` (B, H, cells) gets dk_j · k_j + dv_j · v_j."""
    from .backward import key_gradients

    t = tiles(TILES, "key gradients", lines.cells, q)
    common, options = _common(q, k, flags, lines, rule)
    key_gradients[_programs(q, lines, t.keys)](
        q, k, v, _pointer(flags, q), dout, lse, delta, dk, dv, lse if products is None else products,
        *strides(q), *strides(k), *strides(v), *strides(dout), *strides(dk), *strides(dv), *common,
        *scales(q), BQ=t.queries, BK=t.keys, MORE=more, KEEP=products is not None, **options, **t.launch(),
    )  # fmt: skip


def _common(q: Tensor, k: Tensor, flags: Tensor | None, lines: Lines, rule: Rule):
    B, H, L, D = q.shape
    per_batch = flags.stride(0) if flags is not None and flags.shape[0] > 1 else 0
    sizes = (per_batch, B * H, H, L, k.shape[2], lines.cells, lines.line_step, lines.cell_step)
    options = {"D": D, "BLOCK_D": block_width(D), "PRECISION": precision(q)}
    return sizes, {**options, "RULE": rule, "HAS_FLAGS": flags is not None}


def _programs(q: Tensor, lines: Lines, tile: int) -> tuple[int]:
    return (lines.lines * ceil_div(lines.cells, tile) * q.shape[0] * q.shape[1],)


def _pointer(flags: Tensor | None, q: Tensor) -> Tensor:
    return q if flags is None else flags


def _sources(
    k: Tensor, v: Tensor, mask: Tensor | None, kbars: list[Tensor], vbars: list[Tensor], some: list[Tensor]
) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    return [
        (rows_contiguous(keys), rows_contiguous(values), None if which is None else as_flags(which))
        for keys, values, which in zip([k, *kbars], [v, *vbars], [mask, *some], strict=True)
    ]


def scales(q: Tensor) -> tuple[float, float]:
    """Factors of a product q·k: for a logit to base 2, and for a gradient."""
    return math.log2(math.e) / math.sqrt(q.shape[3]), 1 / math.sqrt(q.shape[3])


def grid_rows(q: Tensor, k: Tensor, width: int) -> int:
    return ceil_div(max(q.shape[2], k.shape[2]), width)


def encode(parts: list[LinePart]) -> list[int]:
    """Encode each part as three numbers: operator schemas support only plain types."""
    return [x for part in parts for x in (part.source, AXES.index(part.axis), RULES.index(part.rule))]


def decode(numbers: list[int]) -> list[LinePart]:
    return [LinePart(s, AXES[a], RULES[r]) for s, a, r in zip(*(numbers[i::3] for i in range(3)), strict=True)]


def check(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> None:
    B, H, _, D = q.shape
    for k, v in zip(keys, values, strict=True):
        if k.shape != v.shape or (*k.shape[:2], k.shape[3]) != (B, H, D):
            raise ValueError(
                f"the kernel needs keys and values of one shape that matches q {tuple(q.shape)}, got {tuple(k.shape)} "
                f"and {tuple(v.shape)}; use backend='torch'"
            )
    if D > LARGEST_HEAD:
        raise ValueError(f"the kernel supports head_dim up to {LARGEST_HEAD}, got {D}; use backend='torch'")
    if q.dtype not in DTYPES or any(x.dtype != q.dtype for x in (*keys, *values)):
        raise ValueError(f"the kernel needs one dtype for all tensors, float32, float16 or bfloat16, got {q.dtype}")


def tiles(table: dict[tuple[str, int, int], Tiles], kernel: str, cells: int, q: Tensor) -> Tiles:
    """Entry of the table, limited to the cells of a line, and at least 16, the minimum of a matrix unit."""
    t = table[kernel, max(64, block_width(q.shape[3])), q.element_size()]
    most = max(16, next_power_of_two(cells))
    return replace(t, queries=min(t.queries, most), keys=min(t.keys, most))
