"""Fused kernels for attention within runs of a sequence sorted by group: `routing` and `reformer`.

    out_i = Σ_orders Σ_{j ∈ run(i)} e^{q_i·k_j/√D} v_j / Z_i          Z_i over all orders

Every order (one; for Reformer, one per round of hashing) sorts the tokens by group and cuts each group into runs of
`size`. A token attends to its run and, with `back`, to the run before it in its group; `others`: to itself only if it
has no other key. The kernels read and write the tokens in place, through the sorted order, so no tensor is copied and
no run is padded. The plain versions in `weft/attention/` are the reference. Triton is imported only when a kernel runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...core.blocks import ceil_div
from ...core.precision import autocast
from ...core.tiles import Tiles, block_width, empty_rows, precision, rows_contiguous, strides
from ..band.kernel import check
from ..lines.kernel import scales

LEAST_LENGTH = 256

# Keys: kernel, maximum head_dim, bytes per element.
TILES: dict[tuple[str, int, int], Tiles] = {
    ("attend", 64, 2): Tiles(64, 64, 4, 2),
    ("attend", 128, 2): Tiles(64, 32, 4, 2),
    ("attend", 64, 4): Tiles(64, 32, 4, 2),
    ("attend", 128, 4): Tiles(32, 32, 4, 1),
    ("query gradients", 64, 2): Tiles(64, 32, 4, 2),
    ("query gradients", 128, 2): Tiles(64, 32, 4, 2),
    ("query gradients", 64, 4): Tiles(32, 32, 4, 2),
    ("query gradients", 128, 4): Tiles(32, 32, 4, 1),
    ("key gradients", 64, 2): Tiles(32, 64, 4, 2),
    ("key gradients", 128, 2): Tiles(32, 64, 4, 2),
    ("key gradients", 64, 4): Tiles(32, 32, 4, 1),
    ("key gradients", 128, 4): Tiles(32, 32, 4, 1),
}


@dataclass(frozen=True)
class Orders:
    """Tokens sorted by group. The group `groups` is for masked tokens, which attend to nothing."""

    token: Tensor  # (R, B, H, L): the token in each slot
    group: Tensor  # (R, B, H, L): its group
    start: Tensor  # (R, B, H, groups + 1): the first slot of each group

    @classmethod
    def of(cls, group: Tensor, groups: int) -> Orders:
        """`group` is (R, B, H, L) with values in [0, groups]. The sort is stable: a group is in order of position."""
        narrow = group.to(torch.int16 if groups < 2**15 else torch.int32).contiguous()  # faster to sort
        ordered, token = torch.sort(narrow, dim=-1, stable=True)
        edges = torch.arange(groups + 1, dtype=ordered.dtype, device=group.device)
        start = torch.searchsorted(ordered, edges.expand(*group.shape[:-1], -1).contiguous(), out_int32=True)
        return cls(token.to(torch.int32), ordered.to(torch.int32), start)


def interval_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    orders: Orders,
    *,
    size: int,
    causal: bool,
    back: bool = False,
    others: bool = False,
) -> Tensor:
    """q, k and v (B, H, L, D) -> (B, H, L, D)."""
    q, k, v = autocast(q, k, v)
    tables = orders.token, orders.group, orders.start
    return torch.ops.weft.interval_attention(q, k, v, *tables, size, causal, back, others)[0]


@torch.library.custom_op(
    "weft::interval_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor token, Tensor group, Tensor start, int size, bool causal, bool back,"
    " bool others) -> (Tensor, Tensor)",
)
def _forward(q, k, v, token, group, start, size, causal, back, others):
    from .forward import attend

    check(q, k, v, "none")
    out, lse = _outputs(q)
    q, k, v = (rows_contiguous(x) for x in (q, k, v))
    t, programs, sizes, options = launch("attend", q, start, size, causal, back, others)
    for number, tables in enumerate(zip(token, group, start, strict=True)):
        attend[programs](
            q, k, v, *tables, out, lse, *strides(q), *strides(k), *strides(v), *strides(out), *sizes, scales(q)[0],
            MORE=number > 0, **options, **t.launch(),
        )  # fmt: skip
    return out, lse


@_forward.register_fake
def _(q, k, v, token, group, start, size, causal, back, others):
    return _outputs(q)


def _outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    return empty_rows(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op(
    "weft::interval_attention_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor token, Tensor group, Tensor start, Tensor out,"
    " Tensor lse, int size, bool causal, bool back, bool others) -> (Tensor, Tensor, Tensor)",
)
def _backward(dout, q, k, v, token, group, start, out, lse, size, causal, back, others):
    from .backward import key_gradients, query_gradients

    dq, dk, dv, delta = empty_rows(q), empty_rows(k), empty_rows(v), torch.empty_like(lse)
    dout, q, k, v, out = (rows_contiguous(x) for x in (dout, q, k, v, out))
    given = (*strides(q), *strides(k), *strides(v))
    for number, tables in enumerate(zip(token, group, start, strict=True)):
        t, programs, sizes, options = launch("query gradients", q, start, size, causal, back, others)
        query_gradients[programs](
            q, k, v, *tables, out, dout, lse, delta, dq, *given, *strides(out), *strides(dout), *strides(dq),
            *sizes, *scales(q), MORE=number > 0, **options, **t.launch(),
        )  # fmt: skip
        t, programs, sizes, options = launch("key gradients", q, start, size, causal, back, others)
        key_gradients[programs](
            q, k, v, *tables, dout, lse, delta, dk, dv, *given, *strides(dout), *strides(dk), *strides(dv),
            *sizes, *scales(q), MORE=number > 0, **options, **t.launch(),
        )  # fmt: skip
    return dq, dk, dv


@_backward.register_fake
def _(dout, q, k, v, token, group, start, out, lse, size, causal, back, others):
    return empty_rows(q), empty_rows(k), empty_rows(v)


def launch(
    kernel: str, q: Tensor, start: Tensor, size: int, causal: bool, back: bool, others: bool
) -> tuple[Tiles, tuple[int], tuple[int, ...], dict[str, Any]]:
    """Tiles, number of programs, sizes and options of a kernel."""
    B, H, L, D = q.shape
    t = TILES[kernel, max(64, block_width(D)), q.element_size()]
    rows = t.keys if kernel == "key gradients" else t.queries
    options = {"D": D, "BLOCK_D": block_width(D), "BQ": t.queries, "BK": t.keys, "PRECISION": precision(q)}
    options |= {"BACK": back, "CAUSAL": causal, "OTHERS": others}
    return t, (ceil_div(L, rows) * B * H,), (H, L, start.shape[-1] - 1, min(size, L)), options


def _save(ctx, inputs, output):
    *tensors, ctx.size, ctx.causal, ctx.back, ctx.others = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _grad(ctx, dout, _):
    if dout is None:
        return (None,) * 10
    options = ctx.size, ctx.causal, ctx.back, ctx.others
    return *torch.ops.weft.interval_attention_backward(dout, *ctx.saved_tensors, *options), *(None,) * 7


_forward.register_autograd(_grad, setup_context=_save)
