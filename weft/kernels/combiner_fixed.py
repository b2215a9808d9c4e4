"""`combiner-fixed` as fused kernels: forward and backward, as one PyTorch operator.

    out_i = (Σ_{j in own block, j ≤ i} e^{q_i·k_j/√D} v_j + Σ_{s other block} e^{q_i·kbar_s/√D} vbar_s) / Z_i
    kbar_s = pool_j k_j      qbar_s = pool_j q_j      vbar_s = Σ_j softmax_j(qbar_s·k_j/√D) v_j       over the block's
                                                                                                       valid tokens

The plain PyTorch version in `weft/attention/combiner_fixed.py` is the definition; these kernels must equal it.
Triton is imported only when a kernel runs, so this module can be imported anywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

LARGEST_HEAD = 128
POOLS = ("max", "mean", "sum")


@dataclass(frozen=True)
class Tiles:
    """How a kernel cuts its work."""

    queries: int  # per tile
    keys: int  # of the own block, per tile
    spans: int  # summaries, per tile
    warps: int
    stages: int  # loads in flight
    registers: int | None = None  # at most, per thread; None leaves it to the compiler

    def launch(self) -> dict[str, int | None]:
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


# By kernel, widest head and bytes per number. Measured with benchmarks/gpu_attention.py --tune; docs/kernels.md.
TILES: dict[tuple[str, int, int], Tiles] = {
    ("attend", 64, 2): Tiles(128, 64, 64, 4, 3),
    ("attend", 128, 2): Tiles(128, 64, 64, 8, 2),
    ("attend", 64, 4): Tiles(64, 32, 32, 4, 2),
    ("attend", 128, 4): Tiles(32, 32, 32, 4, 1),
    ("spans", 64, 2): Tiles(64, 0, 64, 4, 3),
    ("spans", 128, 2): Tiles(64, 0, 64, 8, 2),
    ("spans", 64, 4): Tiles(32, 0, 32, 4, 2),
    ("spans", 128, 4): Tiles(32, 0, 32, 4, 1),
    ("block", 64, 2): Tiles(128, 64, 64, 8, 1),
    ("block", 128, 2): Tiles(64, 64, 64, 8, 1),
    ("block", 64, 4): Tiles(32, 32, 32, 4, 1),
    ("block", 128, 4): Tiles(32, 32, 32, 4, 1),
    ("wide block", 64, 2): Tiles(64, 64, 64, 4, 2),  # over 128 tokens: several tiles of queries
    ("wide block", 128, 2): Tiles(64, 64, 64, 8, 1),
    ("wide block", 64, 4): Tiles(32, 32, 32, 4, 1),
    ("wide block", 128, 4): Tiles(32, 32, 32, 4, 1),
}


def combiner_fixed(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, block_size: int, pool: str, causal: bool
) -> Tensor:
    """The mechanism on q, k, v (B, H, L, D) and mask (B, L); the kernels' counterpart of the plain version."""
    device = q.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    return torch.ops.weft.combiner_fixed(q, k, v, mask, block_size, pool, causal)[0]


@torch.library.custom_op(
    "weft::combiner_fixed",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? mask, int block_size, str pool, bool causal)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _forward(q, k, v, mask, block_size, pool, causal):
    from .combiner_fixed_forward import attend, summarise

    check(q, k, v, block_size, pool)
    q, k, v = (rows_contiguous(x) for x in (q, k, v))
    B, H, L, D = q.shape
    n = ceil_div(L, block_size)
    out, lse, qbar, kbar, vbar, local = _outputs(q, block_size)
    width = block_width(D)
    scale = math.log2(math.e) / math.sqrt(D)
    has_mask = mask is not None
    flags = mask.contiguous().view(torch.uint8) if has_mask else q
    rows = min(128, next_power_of_two(block_size))
    if n > 1:
        summarise[(n, B * H)](
            q, k, v, flags, qbar, kbar, vbar, local, *strides(q), *strides(k), *strides(v), H, L, n, scale,
            m=block_size, D=D, BLOCK_D=width, ROWS=rows, POOL=pool, HAS_MASK=has_mask,
            num_warps=4 if rows * width <= 8192 else 8,
        )  # fmt: skip
    t = tiles("attend", block_size, n, q)
    attend[(n * ceil_div(block_size, t.queries), B * H)](
        q, k, v, flags, kbar, vbar, local, out, lse, *strides(q), *strides(k), *strides(v), *strides(out),
        H, L, n, scale, m=block_size, D=D, BLOCK_D=width, BQ=t.queries, BK=t.keys, BS=t.spans, SPANS=n > 1,
        CAUSAL=causal, HAS_MASK=has_mask, PRECISION=precision(q), **t.launch(),
    )  # fmt: skip
    return out, lse, qbar, kbar, vbar, local


@_forward.register_fake
def _(q, k, v, mask, block_size, pool, causal):
    return _outputs(q, block_size)


def _outputs(q: Tensor, block_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out, its log2 normalisers, and of each block the pooled query, summary key and value, local log2 normaliser."""
    B, H, L, D = q.shape
    n = ceil_div(L, block_size)
    return (
        torch.empty_like(q),
        q.new_empty(B, H, L, dtype=torch.float32),
        q.new_empty(B, H, n, D, dtype=torch.float32),
        q.new_empty(B, H, n, D),
        q.new_empty(B, H, n, D),
        q.new_empty(B, H, n, dtype=torch.float32),
    )


@torch.library.custom_op(
    "weft::combiner_fixed_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor out, Tensor lse, Tensor qbar, Tensor kbar,"
    " Tensor vbar, Tensor local, int block_size, str pool, bool causal) -> (Tensor, Tensor, Tensor)",
)
def _backward(dout, q, k, v, mask, out, lse, qbar, kbar, vbar, local, block_size, pool, causal):
    from .combiner_fixed_backward import block_gradients, row_products, span_gradients

    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dout, q, k, v = (rows_contiguous(x) for x in (dout, q, k, v))
    B, H, L, D = q.shape
    n = ceil_div(L, block_size)
    width = block_width(D)
    logit_scale = 1 / math.sqrt(D)
    scale = math.log2(math.e) * logit_scale
    has_mask = mask is not None
    flags = mask.contiguous().view(torch.uint8) if has_mask else q
    delta = torch.empty_like(lse)
    row_products[(ceil_div(L, 64), B * H)](
        out, dout, delta, *strides(out), *strides(dout), H, L, D=D, BLOCK_D=width, ROWS=64, num_warps=4
    )
    chunk, chunks = query_chunks(L)
    part_k = part_v = pooled = lse  # not read when there is one block only
    if n > 1:
        part_k = q.new_empty(B, H, chunks, n, D, dtype=torch.float32)
        part_v = torch.empty_like(part_k)
        pooled = q.new_empty(B, H, n, 3, D, dtype=torch.float32)
        t = tiles("spans", block_size, n, q)
        span_gradients[(ceil_div(n, t.spans), chunks, B * H)](
            q, dout, kbar, vbar, local, lse, delta, part_k, part_v, *strides(q), *strides(dout),
            H, L, n, chunk, scale, logit_scale, m=block_size, D=D, BLOCK_D=width, BQ=t.queries, BS=t.spans,
            CAUSAL=causal, HAS_MASK=has_mask, PRECISION=precision(q), **t.launch(),
        )  # fmt: skip
    t = tiles("block" if block_size <= 128 else "wide block", block_size, n, q)
    block_gradients[(n, B * H)](
        q, k, v, flags, dout, qbar, kbar, vbar, local, lse, delta, part_k, part_v, pooled, dq, dk, dv,
        *strides(q), *strides(k), *strides(v), *strides(dout), *strides(dq), *strides(dk), *strides(dv),
        H, L, n, chunk, chunks, scale, logit_scale, m=block_size, D=D, BLOCK_D=width, BQ=t.queries, BK=t.keys,
        BS=t.spans, CHUNKS=next_power_of_two(chunks), SPANS=n > 1, POOL=pool, CAUSAL=causal, HAS_MASK=has_mask,
        PRECISION=precision(q), **t.launch(),
    )  # fmt: skip
    return dq, dk, dv


@_backward.register_fake
def _(dout, q, k, v, mask, out, lse, qbar, kbar, vbar, local, block_size, pool, causal):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx, inputs, output):
    q, k, v, mask, *options = inputs
    ctx.save_for_backward(q, k, v, mask, *output)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _grad(ctx, dout, *unused):
    if dout is None:
        return (None,) * 7
    dq, dk, dv = torch.ops.weft.combiner_fixed_backward(dout, *ctx.saved_tensors, *ctx.options)
    return dq, dk, dv, None, None, None, None


_forward.register_autograd(_grad, setup_context=_save)


def check(q: Tensor, k: Tensor, v: Tensor, block_size: int, pool: str) -> None:
    if q.dim() != 4 or k.shape != q.shape or v.shape != q.shape:
        raise ValueError(
            f"the kernel takes q, k and v of one shape (B, H, L, D), got {tuple(q.shape)}, {tuple(k.shape)} "
            f"and {tuple(v.shape)}; use backend='torch'"
        )
    if q.shape[3] > LARGEST_HEAD:
        raise ValueError(f"the kernel takes heads up to {LARGEST_HEAD} wide, got {q.shape[3]}; use backend='torch'")
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"the kernel takes float32, float16 or bfloat16, got {q.dtype}; use backend='torch'")
    if pool not in POOLS:
        raise ValueError(f"the kernel pools by {', '.join(POOLS)}, not {pool!r}; use backend='torch'")
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")


def tiles(kernel: str, block_size: int, n: int, q: Tensor) -> Tiles:
    """The table's entry, cut down to what a block holds; a tile is never under 16, the least a matrix unit takes."""
    t = TILES[kernel, max(64, block_width(q.shape[3])), q.element_size()]
    block = max(16, next_power_of_two(block_size))
    if kernel != "spans":  # there, tiles of queries run across blocks
        t = replace(t, queries=min(t.queries, block), keys=min(t.keys, block))
    return replace(t, spans=max(16, min(t.spans, next_power_of_two(n))))


def query_chunks(L: int) -> tuple[int, int]:
    """Length and number of the chunks of queries whose gradients are summed apart; by L alone, so that a sequence's
    gradient does not depend on its batch mates."""
    chunk = max(1024, ceil_div(ceil_div(L, 32), 128) * 128)
    return chunk, ceil_div(L, chunk)


def strides(x: Tensor) -> tuple[int, int, int]:
    return x.stride(0), x.stride(1), x.stride(2)


def rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def precision(x: Tensor) -> str:
    """Float32 products as three tf32 ones, near float32's own accuracy; half precision has one way only."""
    return "tf32x3" if x.dtype == torch.float32 else "tf32"


def block_width(D: int) -> int:
    return max(16, next_power_of_two(D))


def next_power_of_two(x: int) -> int:
    return 1 << max(0, x - 1).bit_length()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
