"""Triton: rows of a (B, H, L, D) tensor in and out of a tile, for every kernel here. D may be any width: a tile is the
next power of two wide, and what is past D reads as zero and is never written."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(X, row, d, row_stride, live, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of X as (rows, BLOCK_D); zeros where a row is not live, and past D. live=None: all rows are."""
    X += row[:, None] * row_stride + d[None, :]
    if live is None and D == BLOCK_D:
        x = tl.load(X)
    elif live is None:
        x = tl.load(X, mask=(d < D)[None, :], other=0.0)
    elif D == BLOCK_D:
        x = tl.load(X, mask=live[:, None], other=0.0)
    else:
        x = tl.load(X, mask=live[:, None] & (d < D)[None, :], other=0.0)
    return x


@triton.jit
def store_rows(X, x, row, d, row_stride, live, D: tl.constexpr, BLOCK_D: tl.constexpr):
    keep = live[:, None]
    if D != BLOCK_D:
        keep = keep & (d < D)[None, :]
    tl.store(X + row[:, None] * row_stride + d[None, :], x.to(X.dtype.element_ty), mask=keep)


@triton.jit
def valid_rows(MASK, position, live, HAS_MASK: tl.constexpr):
    """Which rows hold a real token: those inside the sequence that the mask does not hide."""
    if HAS_MASK:
        return live & (tl.load(MASK + position, mask=live, other=0) != 0)
    return live
