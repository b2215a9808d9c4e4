"""`MSSA`'s softmax attention of one tensor to itself as fused kernels, as one PyTorch operator.

    out_i = Σ_j softmax_j(z_i · z_j / √D) z_j          over the valid j (j ≤ i when causal)

`weft.attention.full` with z as query, key and value is the definition; these kernels must equal it. z is read once
where three tensors would be, and its gradient, query, key and value in one, is one pass (`mssa_triton.py`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..core.dispatch import DTYPES, LARGEST_HEAD, NEVER
from ..core.launch import (
    Tiles,
    as_flags,
    autocast,
    block_width,
    ceil_div,
    empty_rows,
    for_operator,
    precision,
    rows_contiguous,
    strides,
)

LEAST_LENGTH = NEVER  # a third of the memory, but 4 to 13 % slower than cuDNN: docs/kernels.md

# By kernel, widest head and bytes per number; a tile of keys divides a tile of queries.
TILES: dict[tuple[str, int, int], Tiles] = {
    ("attend", 64, 2): Tiles(64, 64, 4, 3),
    ("attend", 128, 2): Tiles(128, 64, 8, 3),
    ("attend", 64, 4): Tiles(64, 32, 4, 2),
    ("attend", 128, 4): Tiles(32, 32, 4, 1),
    ("gradients", 64, 2): Tiles(64, 32, 4, 2),
    ("gradients", 128, 2): Tiles(64, 32, 4, 2),
    ("gradients", 64, 4): Tiles(32, 32, 4, 1),
    ("gradients", 128, 4): Tiles(32, 32, 4, 1),
}


def mssa(z: Tensor, mask: Tensor | None, *, causal: bool = False) -> Tensor:
    """z (B, H, L, D) attends to itself; mask (B, L)."""
    (z,) = autocast(z)
    return torch.ops.weft.mssa(z, for_operator(mask), causal)[0]


@torch.library.custom_op(
    "weft::mssa", mutates_args=(), schema="(Tensor z, Tensor? mask, bool causal) -> (Tensor, Tensor)"
)
def _forward(z, mask, causal):
    from .mssa_triton import attend

    check(z)
    out, lse = _outputs(z)
    z = rows_contiguous(z)
    B, H, L, D = z.shape
    t = tiles("attend", z)
    count = ceil_div(L, t.queries)
    attend[(count * B * H,)](
        z, _flags(z, mask), out, lse, *strides(z), *strides(out), B * H, H, L, count, math.log2(math.e) / math.sqrt(D),
        BQ=t.queries, BK=t.keys, **_options(z, mask, causal), **t.launch(),
    )  # fmt: skip
    return out, lse


@_forward.register_fake
def _(z, mask, causal):
    return _outputs(z)


def _outputs(z: Tensor) -> tuple[Tensor, Tensor]:
    """out and its log2 normalisers."""
    return empty_rows(z), z.new_empty(z.shape[:3], dtype=torch.float32)


@torch.library.custom_op(
    "weft::mssa_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor z, Tensor? mask, Tensor out, Tensor lse, bool causal) -> Tensor",
)
def _backward(dout, z, mask, out, lse, causal):
    from .mssa_triton import gradients
    from .rows import row_products

    dz = empty_rows(z)
    dout, z, out = (rows_contiguous(x) for x in (dout, z, out))
    B, H, L, D = z.shape
    BH, width = B * H, block_width(D)
    delta = torch.empty_like(lse)
    row_products[(ceil_div(L, 64) * BH,)](
        out, dout, delta, *strides(out), *strides(dout), BH, H, L, D=D, BLOCK_D=width, ROWS=64, num_warps=4
    )
    t = tiles("gradients", z)
    logit_scale = 1 / math.sqrt(D)
    gradients[(ceil_div(L, t.queries) * BH,)](
        z, _flags(z, mask), dout, lse, delta, dz, *strides(z), *strides(dout), *strides(dz),
        BH, H, L, math.log2(math.e) * logit_scale, logit_scale,
        BQ=t.queries, BK=t.keys, **_options(z, mask, causal), **t.launch(),
    )  # fmt: skip
    return dz


@_backward.register_fake
def _(dout, z, mask, out, lse, causal):
    return empty_rows(z)


def _save(ctx, inputs, output):
    z, mask, ctx.causal = inputs
    ctx.save_for_backward(z, mask, *output)
    ctx.set_materialize_grads(False)


def _grad(ctx, dout, _):
    if dout is None:
        return None, None, None
    return torch.ops.weft.mssa_backward(dout, *ctx.saved_tensors, ctx.causal), None, None


_forward.register_autograd(_grad, setup_context=_save)


def _flags(z: Tensor, mask: Tensor | None) -> Tensor:
    return z if mask is None else as_flags(mask)


def _options(z: Tensor, mask: Tensor | None, causal: bool) -> dict[str, int | str]:
    D = z.shape[3]
    return {
        "D": D,
        "BLOCK_D": block_width(D),
        "CAUSAL": causal,
        "HAS_MASK": mask is not None,
        "PRECISION": precision(z),
    }


def check(z: Tensor) -> None:
    if z.dim() != 4 or z.shape[3] > LARGEST_HEAD or z.dtype not in DTYPES:
        raise ValueError(
            f"the kernel takes z (B, H, L, D) in float32, float16 or bfloat16 with D up to {LARGEST_HEAD}, "
            f"got {tuple(z.shape)} in {z.dtype}; use backend='torch'"
        )


def tiles(kernel: str, z: Tensor) -> Tiles:
    return TILES[kernel, max(64, block_width(z.shape[3])), z.element_size()]
