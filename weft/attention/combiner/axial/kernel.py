"""Fused kernels of `combiner-axial` with key_summary="wsum": forward and backward as one PyTorch operator.

On a grid with rows of m tokens, i = r·m + c:

    α_i = softmax over row r of q_i·k_j/√D          vbar_i = Σ_j α_ij v_j          kbar_i = Σ_j α_ij k_j
    out_i = (Σ_{j in row r, j ≤ i} e^{q_i·k_j/√D} v_j + Σ_{s other row} e^{q_i·kbar_{s,c}/√D} vbar_{s,c}) / Z_i

The row kernel computes the direct part and the summaries from the same logits. Attention along the columns of
summaries (`weft/kernels/lines`) continues the same softmax. The plain version in `__init__.py` is the reference. Triton
is imported only when a kernel runs, so this module can be imported anywhere.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ....core.blocks import ceil_div
from ....core.precision import autocast
from ....core.tiles import (
    Block,
    as_flags,
    block_width,
    empty_rows,
    flags_or,
    for_operator,
    near_rows,
    precision,
    strides,
    tile_table,
)
from ....kernels.grouped import gradients, sum_to_groups
from ....kernels.launch import launch
from ....kernels.lines.kernel import (
    Lines,
    Rule,
    attend_lines,
    check,
    line_key_gradients,
    line_query_gradients,
    scales,
    tiles,
)
from ....kernels.operator import Operator

LEAST_LENGTH = 256  # the shortest measured; the kernels beat the plain version from here on: docs/kernels.md

SPANS = 1  # the source of the summaries, for dropout; 0: the tokens

# Not yet tuned.
TILES = tile_table(
    {
        "summarise": ((64, 32, 4, 3, 128), (64, 32, 8, 2), (32, 32, 4, 2), (32, 32, 8, 1)),
        "row query gradients": ((64, 32, 4, 3), (64, 32, 8, 2), (32, 32, 4, 1), (32, 16, 8, 1)),
        "row key gradients": ((32, 64, 4, 2, 168), (16, 64, 4, 2), (16, 64, 4, 1), (16, 16, 4, 1)),
    }
)


def combiner_axial(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, block_size: int, causal: bool, key: Tensor | None = None,
    threshold: int = 0,
) -> Tensor:  # fmt: skip
    """Run the mechanism on q, k, v (B, H, L, D), zero at masked tokens, and mask (B, L). k and v may have fewer
    heads. `key` and `threshold` are those of `dropout_key`."""
    q, k, v = autocast(q, k, v)
    return _operator(q, k, v, for_operator(mask), key, block_size, causal, threshold)


def _forward(q, k, v, mask, key, block_size, causal, threshold):
    from .forward import summarise

    check(q, [(k, v, mask)])
    B, H, L, D = q.shape
    m, n = block_size, ceil_div(L, block_size)
    out, block = outputs = _outputs(q, m)
    lse, kbar, vbar, local = _split(q, m, block)
    q, k, v = (near_rows(x) for x in (q, k, v))
    if n == 1:  # nothing to summarise
        flags = None if mask is None else as_flags(mask)
        attend_lines(q, k, v, flags, out, lse, *_row(m, causal), key, threshold, more=False)
        return outputs
    t = tiles(TILES, "summarise", m, q)
    launch(
        summarise, (n * ceil_div(m, t.queries) * B * H,),
        q, k, v, flags_or(mask, q), q if key is None else key, kbar, vbar, local, out, lse,
        *strides(q), *strides(k), *strides(v), *strides(kbar), *strides(out), B * H, H, L, n, m, threshold,
        scales(q)[0], BQ=t.queries, BK=t.keys, **_options(q, k, mask, key, causal), **t.launch(),
    )  # fmt: skip
    spans, (columns, rule) = (kbar, vbar, _rows_with_tokens(mask, n, m)), _columns(n, m, causal)
    attend_lines(q, *spans, out, lse, columns, rule, key, threshold, source=SPANS, more=True)
    return outputs


def _outputs(q: Tensor, m: int) -> tuple[Tensor, Tensor]:
    return empty_rows(q), _kept(q, m).empty(q)


def _kept(q: Tensor, m: int) -> Block:
    """The log2 normalisers of out, and for each cell the summary key, summary value and the row's log2 normaliser.
    There are no cells if there is only one row."""
    B, H, L, D = q.shape
    cells = ceil_div(L, m) * m if L > m else 0
    bars, numbers = ((B, cells, H, D), q.dtype), ((B, H, cells), torch.float32)
    return Block((((B, H, L), torch.float32), bars, bars, numbers))


def _split(q: Tensor, m: int, block: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lse, kbar, vbar, local = _kept(q, m).split(block)
    return lse, kbar.transpose(1, 2), vbar.transpose(1, 2), local


def _backward(dout, q, k, v, mask, key, out, block, block_size, causal, threshold):
    from .backward import row_key_gradients, row_query_gradients

    lse, kbar, vbar, local = _split(q, block_size, block)
    dq, delta = empty_rows(q), torch.empty_like(lse)
    (dk, by_head_k), (dv, by_head_v) = gradients(k, q), gradients(v, q)
    dout, q, k, v = (near_rows(x) for x in (dout, q, k, v))
    B, H, L, D = q.shape
    m, n = block_size, ceil_div(L, block_size)
    flags = None if mask is None else as_flags(mask)
    if n == 1:
        row, rule = _row(m, causal)
        line_query_gradients(q, k, v, flags, out, dout, lse, delta, dq, row, rule, key, threshold, more=False)
        own = by_head_k, by_head_v
        line_key_gradients(q, k, v, flags, dout, lse, delta, *own, row, rule, key, threshold, more=False)
        sum_to_groups(by_head_k, dk)
        sum_to_groups(by_head_v, dv)
        return dq, dk, dv
    dkbar, dvbar, products = torch.empty_like(kbar), torch.empty_like(vbar), torch.empty_like(local)
    spans = kbar, vbar, _rows_with_tokens(mask, n, m)
    columns, rule = _columns(n, m, causal)
    line_query_gradients(q, *spans, out, dout, lse, delta, dq, columns, rule, key, threshold, source=SPANS, more=False)
    line_key_gradients(
        q, *spans, dout, lse, delta, dkbar, dvbar, columns, rule, key, threshold, source=SPANS, more=False,
        products=products,
    )  # fmt: skip
    given = q, k, v, *(q if x is None else x for x in (flags, key)), dout, dkbar, dvbar, local, products, lse, delta
    given_strides = *strides(q), *strides(k), *strides(v), *strides(dout), *strides(dkbar)
    t = tiles(TILES, "row query gradients", m, q)
    launch(
        row_query_gradients, (n * ceil_div(m, t.queries) * B * H,),
        *given, dq, *given_strides, *strides(dq), B * H, H, L, n, m, threshold, *scales(q),
        BQ=t.queries, BK=t.keys, **_options(q, k, mask, key, causal), **t.launch(),
    )  # fmt: skip
    t = tiles(TILES, "row key gradients", m, q)
    launch(
        row_key_gradients, (n * ceil_div(m, t.keys) * B * H,),
        *given, by_head_k, by_head_v, *given_strides, *strides(by_head_k), *strides(by_head_v), B * H, H, L, n, m,
        threshold, *scales(q), BQ=t.queries, BK=t.keys, **_options(q, k, mask, key, causal), **t.launch(),
    )  # fmt: skip
    sum_to_groups(by_head_k, dk)
    sum_to_groups(by_head_v, dv)
    return dq, dk, dv


_operator = Operator(
    "combiner_axial",
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? key, int block_size, bool causal, int threshold",
    _forward,
    lambda q, k, v, mask, key, block_size, causal, threshold: _outputs(q, block_size),
    _backward,
    outputs=2,
)


def _options(q: Tensor, k: Tensor, mask: Tensor | None, key: Tensor | None, causal: bool) -> dict[str, int | str]:
    D = q.shape[3]
    return {
        "D": D,
        "BLOCK_D": block_width(D),
        "PRECISION": precision(q),
        "CAUSAL": causal,
        "HAS_MASK": mask is not None,
        "GROUP": q.shape[1] // k.shape[1],
        "DROPOUT": key is not None,
    }


def _row(m: int, causal: bool) -> tuple[Lines, Rule]:
    """Direct keys of a query if all tokens are in one row."""
    return Lines.of("row", 1, m), "up_to" if causal else "all"


def _columns(n: int, m: int, causal: bool) -> tuple[Lines, Rule]:
    """Summaries that a query attends to."""
    return Lines.of("column", n, m), "before" if causal else "others"


def _rows_with_tokens(mask: Tensor | None, n: int, m: int) -> Tensor | None:
    """Whether the row of each cell has a real token, (B, n·m); other rows are not spans. None: all rows have one."""
    if mask is None:
        return None
    some = torch.unflatten(F.pad(mask, (0, n * m - mask.shape[1])), 1, (n, m)).any(2, keepdim=True)
    return as_flags(some.expand(-1, -1, m).flatten(1))
