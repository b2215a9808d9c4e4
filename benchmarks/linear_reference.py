"""Causal linear attention in the chunked form of flash-linear-attention, reimplemented as a reference for timing.

https://github.com/fla-org/flash-linear-attention; Yang et al., Gated Linear Attention, https://arxiv.org/abs/2312.06635

Features, scan and normaliser are separate steps; features and normaliser are plain PyTorch. Chunks of 64. One kernel
loops over the chunks of a head and stores the state before each (in the inputs' dtype; recomputed in float32 in the
backward). A second kernel computes the outputs of all chunks from that state and the chunk. The backward loops from the
end in the same way, then computes dq and dk together and dv separately.

    python3 -m benchmarks.linear_reference [--lengths 16384 65536]

times ours, the reference, and only its scan (without features and normaliser), with the best of four tile sizes. Needs
whole chunks and head sizes that are powers of two.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from weft.core.tiles import strides  # noqa: E402

CHUNK = 64
WALK: dict[str, int] = {"tile": 32, "num_warps": 4, "num_stages": 3}
WALKS = ((32, 4, 3), (32, 2, 4), (64, 4, 3), (64, 8, 2))


@triton.jit
def tile_of(X, c, x_l, first, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of chunk c, columns from `first` on."""
    row = c * CHUNK + tl.arange(0, CHUNK)
    return tl.load(X + row.to(tl.int64)[:, None] * x_l + (first + tl.arange(0, WIDTH))[None, :])


@triton.jit
def walk(
    X, Y, STATE, x_b, x_h, x_l, y_b, y_h, y_l, H, n,
    D: tl.constexpr, CHUNK: tl.constexpr, T: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """STATE (B·H, n, D, D): before each chunk, the sum of xᵀ y over the chunks walked so far; one T x T tile of it."""
    bh, r, s = tl.program_id(2), tl.program_id(0) * T, tl.program_id(1) * T
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    X += b * x_b + h * x_h
    Y += b * y_b + h * y_h
    STATE += bh.to(tl.int64) * n * D * D + (r + tl.arange(0, T))[:, None] * D + (s + tl.arange(0, T))[None, :]
    state = tl.zeros([T, T], tl.float32)
    for t in range(0, n):
        c = n - 1 - t if REVERSE else t
        tl.store(STATE + c * D * D, state.to(STATE.dtype.element_ty))
        x = tile_of(X, c, x_l, r, CHUNK, T)
        y = tile_of(Y, c, y_l, s, CHUNK, T)
        state = tl.dot(tl.trans(x), y, state, input_precision=PRECISION)


@triton.jit
def chunk_outputs(
    Q, K, V, STATE, OUT, q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, o_b, o_h, o_l, H, n,
    D: tl.constexpr, CHUNK: tl.constexpr, UPPER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """tri(q kᵀ) v + q state. With UPPER the triangle of later tokens and the state transposed in time: dv from k, q,
    dout."""
    c, bh = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    q = tile_of(Q + b * q_b + h * q_h, c, q_l, 0, CHUNK, D)
    k = tile_of(K + b * k_b + h * k_h, c, k_l, 0, CHUNK, D)
    v = tile_of(V + b * v_b + h * v_h, c, v_l, 0, CHUNK, D)
    d, i = tl.arange(0, D), tl.arange(0, CHUNK)
    state = tl.load(STATE + (bh.to(tl.int64) * n + c) * D * D + d[:, None] * D + d[None, :])
    p = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    p = tl.where((i[:, None] <= i[None, :]) if UPPER else (i[:, None] >= i[None, :]), p, 0.0)
    out = tl.dot(q, state.to(q.dtype), input_precision=PRECISION)
    out = tl.dot(p.to(v.dtype), v, out, input_precision=PRECISION)
    row = c * CHUNK + i
    OUT += b * o_b + h * o_h + row.to(tl.int64)[:, None] * o_l + d[None, :]
    tl.store(OUT, out.to(OUT.dtype.element_ty))


@triton.jit
def chunk_query_key(
    Q, K, V, DOUT, STATE, DSTATE, DQ, DK,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, g_b, g_h, g_l, dq_b, dq_h, dq_l, dk_b, dk_h, dk_l, H, n,
    D: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    c, bh = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    q = tile_of(Q + b * q_b + h * q_h, c, q_l, 0, CHUNK, D)
    k = tile_of(K + b * k_b + h * k_h, c, k_l, 0, CHUNK, D)
    v = tile_of(V + b * v_b + h * v_h, c, v_l, 0, CHUNK, D)
    dout = tile_of(DOUT + b * g_b + h * g_h, c, g_l, 0, CHUNK, D)
    d, i = tl.arange(0, D), tl.arange(0, CHUNK)
    at = (bh.to(tl.int64) * n + c) * D * D + d[:, None] * D + d[None, :]
    dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
    dp = tl.where(i[:, None] >= i[None, :], dp, 0.0).to(q.dtype)
    dq = tl.dot(dout, tl.trans(tl.load(STATE + at).to(q.dtype)), input_precision=PRECISION)
    dq = tl.dot(dp, k, dq, input_precision=PRECISION)
    dk = tl.dot(v, tl.trans(tl.load(DSTATE + at).to(q.dtype)), input_precision=PRECISION)
    dk = tl.dot(tl.trans(dp), q, dk, input_precision=PRECISION)
    row = c * CHUNK + i
    DQ += b * dq_b + h * dq_h + row.to(tl.int64)[:, None] * dq_l + d[None, :]
    DK += b * dk_b + h * dk_h + row.to(tl.int64)[:, None] * dk_l + d[None, :]
    tl.store(DQ, dq.to(DQ.dtype.element_ty))
    tl.store(DK, dk.to(DK.dtype.element_ty))


def states(x: Tensor, y: Tensor, dtype: torch.dtype, *, reverse: bool = False) -> Tensor:
    B, H, L, D = x.shape
    n, tile = L // CHUNK, min(WALK["tile"], D)
    state = x.new_empty(B, H, n, D, D, dtype=dtype)
    walk[(D // tile, D // tile, B * H)](
        x, y, state, *strides(x), *strides(y), H, n, D=D, CHUNK=CHUNK, T=tile, REVERSE=reverse, PRECISION=allowed(x),
        num_warps=WALK["num_warps"], num_stages=WALK["num_stages"],
    )  # fmt: skip
    return state


def outputs(q: Tensor, k: Tensor, v: Tensor, state: Tensor, *, upper: bool = False) -> Tensor:
    B, H, L, D = q.shape
    out = torch.empty_like(v)
    chunk_outputs[(L // CHUNK, B * H)](
        q, k, v, state, out, *strides(q), *strides(k), *strides(v), *strides(out), H, L // CHUNK,
        D=D, CHUNK=CHUNK, UPPER=upper, PRECISION=allowed(q), num_warps=4,
    )  # fmt: skip
    return out


def allowed(x: Tensor) -> str:
    return "tf32x3" if x.dtype == torch.float32 else "tf32"


class ChunkedScan(torch.autograd.Function):
    """Σ_{j ≤ i} (q_i · k_j) v_j, nothing else."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return outputs(q, k, v, states(k, v, q.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = ctx.saved_tensors
        dout = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()
        B, H, L, D = q.shape
        state, dstate = states(k, v, torch.float32), states(q, dout, torch.float32, reverse=True)
        dq, dk = torch.empty_like(q), torch.empty_like(k)
        chunk_query_key[(L // CHUNK, B * H)](
            q, k, v, dout, state, dstate, dq, dk,
            *strides(q), *strides(k), *strides(v), *strides(dout), *strides(dq), *strides(dk), H, L // CHUNK,
            D=D, CHUNK=CHUNK, PRECISION=allowed(q), num_warps=4,
        )  # fmt: skip
        return dq, dk, outputs(k, q, dout, dstate, upper=True)


def chunked_scan(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The scan alone, on features."""
    D = q.shape[3]
    if q.shape[2] % CHUNK or D & (D - 1) or D < 16:
        raise ValueError(f"the reference needs whole chunks of {CHUNK} and heads of a power of two, got {q.shape}")
    return ChunkedScan.apply(q, k, v)


def chunked_linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The whole attention on q, k, v (B, H, L, D)."""
    a, b = F.elu(q) + 1, F.elu(k) + 1
    out = chunked_scan(a, b, v)
    return out / ((a * b.cumsum(2)).sum(-1, keepdim=True) + 1e-6)


def tune_walk(L: int) -> None:
    """Take the fastest of WALKS for this length."""
    from benchmarks.gpu_timing import median_ms, tensors

    (_, k, v), _ = tensors(L)
    k, v = k.detach(), v.detach()
    times = {}
    for tile, warps, stages in WALKS:
        WALK.update(tile=tile, num_warps=warps, num_stages=stages)
        times[tile, warps, stages] = median_ms(lambda: states(k, v, k.dtype), 30.0)
    tile, warps, stages = min(times, key=lambda trial: times[trial])
    WALK.update(tile=tile, num_warps=warps, num_stages=stages)
    print(f"{L:>6} walk {tile, warps, stages}: {times[tile, warps, stages]:.4f} ms")


def main() -> None:
    import weft
    from benchmarks.gpu_timing import D, H, median_ms, tensors

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="*", default=[2048, 16384, 65536])
    lengths = parser.parse_args().lengths
    ours = weft.make_attention("linear", heads=H, head_dim=D, causal=True, backend="triton")
    for L in lengths:
        tune_walk(L)
        for name, fn in (("ours", ours), ("published form", chunked_linear), ("its scan alone", chunked_scan)):
            inputs, dout = tensors(L)

            def forward(fn=fn, inputs=inputs) -> Any:
                with torch.no_grad():
                    return fn(*inputs)

            def both(fn=fn, inputs=inputs, dout=dout) -> Any:
                return torch.autograd.grad(fn(*inputs), inputs, dout)

            print(f"{L:>6} {name:<16} forward {median_ms(forward):.4f} both {median_ms(both):.4f} ms", flush=True)


if __name__ == "__main__":
    main()
