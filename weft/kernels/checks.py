"""Holding `combiner_fixed` to its definition: written out densely, in float64, and compared with every gradient.

Used by the tests (small shapes, Triton's interpreter, CPU) and by benchmarks/gpu_correctness.py (real shapes, GPU).
The dense forms are quadratic and share no code with the block-wise ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

# ‖out − ref‖ / ‖ref‖ that rounding explains; a wrong index or a missed term is far above it.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 1.5e-2}


@dataclass(frozen=True)
class Case:
    """One call of `combiner_fixed`: shape, options, and how the mask and the memory are laid out."""

    L: int
    block_size: int
    D: int = 16
    B: int = 1
    H: int = 2
    pool: str = "max"
    causal: bool = True
    mask: str = "none"  # none, random, blocks (whole blocks hidden, and one sequence's start), all
    layout: str = "BLHD"  # the order of the dimensions in memory
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        kind = f"{str(self.dtype)[6:]} B{self.B} H{self.H} L{self.L} D{self.D} m{self.block_size} {self.pool}"
        return f"{kind} {'causal' if self.causal else 'both'} mask={self.mask} {self.layout}"

    def tensors(self, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Fresh random q, k, v, the output's gradient, and the mask."""
        make = torch.randn
        shape = (self.B, self.L, self.H, self.D) if self.layout == "BLHD" else (self.B, self.H, self.L, self.D)
        tensors = [make(shape, device=device).to(self.dtype) for _ in range(4)]
        if self.layout == "BLHD":
            tensors = [x.transpose(1, 2) for x in tensors]
        q, k, v, dout = tensors
        mask = None
        if self.mask != "none":
            mask = torch.rand(self.B, self.L, device=device) > 0.3
            if self.mask == "blocks":
                mask[0, : self.block_size + 1] = False
                mask[-1, -self.block_size // 2 :] = False
            if self.mask == "all":
                mask[0] = False
            # Nothing in hidden memory may be read: not even NaN may come through.
            hidden = ~mask[:, None, :, None]
            k, v = k.masked_fill(hidden, float("nan")), v.masked_fill(hidden, float("nan"))
        return q, k, v, dout, mask


def combiner_fixed_dense(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, block_size: int, pool: str, causal: bool
) -> Tensor:
    """The definition with one row of probabilities over all tokens and all blocks."""
    B, H, L, D = q.shape
    if mask is None:
        mask = torch.ones(B, L, dtype=torch.bool, device=q.device)
    k, v = (x.masked_fill(~mask[:, None, :, None], 0) for x in (k, v))
    i = torch.arange(L, device=q.device)
    block = i // block_size
    kbars, vbars, alive = [], [], []
    for first in range(0, L, block_size):
        part = slice(first, first + block_size)
        real = mask[:, None, part, None]
        any_real = real.any(2, keepdim=True)
        qbar, kbar = (_pool(x[:, :, part], real, pool) for x in (q, k))
        logits = (k[:, :, part] @ qbar.transpose(-1, -2) / D**0.5).masked_fill(~real & any_real, float("-inf"))
        vbars.append((logits.softmax(2) * v[:, :, part]).sum(2, keepdim=True))
        kbars.append(kbar)
        alive.append(any_real[:, :, :, 0])
    keys, values = torch.cat([k, *kbars], 2), torch.cat([v, *vbars], 2)
    s = torch.arange(len(kbars), device=q.device)
    own = block[:, None] == block[None, :]
    other = s[None, :] < block[:, None] if causal else s[None, :] != block[:, None]
    if causal:
        own = own & (i[None, :] <= i[:, None])
    allowed = torch.cat([own & mask[:, None, None, :], other & torch.cat(alive, 2)[:, :, None]], -1)
    some = allowed.any(-1, keepdim=True)
    logits = (q @ keys.transpose(-1, -2) / D**0.5).masked_fill(~allowed & some, float("-inf"))
    return (logits.softmax(-1) * some) @ values


def _pool(x: Tensor, real: Tensor, pool: str) -> Tensor:
    if pool == "max":
        x = x.masked_fill(~real, float("-inf")).amax(2, keepdim=True)
        return x.masked_fill(x == float("-inf"), 0)
    x = x.masked_fill(~real, 0).sum(2, keepdim=True)
    return x / real.sum(2, keepdim=True).clamp(min=1) if pool == "mean" else x


def compare(kernel: Callable[..., Tensor], case: Case, device: str) -> dict[str, float]:
    """Relative errors of the output and of each gradient against the dense form in float64."""
    q, k, v, dout, mask = case.tensors(device)
    options: dict[str, Any] = {"block_size": case.block_size, "pool": case.pool, "causal": case.causal}
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = combiner_fixed_dense(exact[0], exact[1], exact[2], mask, **options)
    expected_grads = torch.autograd.grad(expected, exact, dout.double())
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    with poisoned_memory():
        out = kernel(*inputs, mask, **options)
        grads = torch.autograd.grad(out, inputs, dout)
    assert out.dtype == case.dtype and out.shape == q.shape
    pairs = zip(("out", "dq", "dk", "dv"), (out, *grads), (expected, *expected_grads), strict=True)
    return {name: relative_error(mine, theirs) for name, mine, theirs in pairs}


def relative_error(mine: Tensor, theirs: Tensor) -> float:
    """‖mine − theirs‖ / ‖theirs‖; plain ‖mine‖ where the truth is zero, but for float64's rounding; NaN stays NaN and
    passes no test."""
    return ((mine.double() - theirs).norm() / torch.where(theirs.norm() > 1e-12, theirs.norm(), 1.0)).item()


def failures(errors: dict[str, float], dtype: torch.dtype) -> dict[str, float]:
    return {name: error for name, error in errors.items() if not error < TOLERANCE[dtype]}


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh memory holds NaN, so that an element that nobody wrote, or that was read too early, shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # in this mode PyTorch fills what torch.empty gives
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


SMALL = (
    Case(50, 16, B=2),
    Case(37, 16, D=20, causal=False, mask="random"),
    Case(65, 32, pool="mean", causal=False, mask="blocks", dtype=torch.float16),
    Case(53, 24, pool="sum", mask="random", B=2, H=1, layout="BHLD"),
    Case(40, 24, pool="mean", mask="all", B=2, H=1),
    Case(33, 16, D=32, mask="blocks", B=2, H=1, dtype=torch.float16),
    Case(33, 64, H=1, causal=False, dtype=torch.float16),
    Case(1, 16, H=1),
    Case(150, 128, H=1, pool="sum"),  # the mechanism never runs a sum in half precision
    Case(272, 256, H=1, D=8),
    Case(150, 64, H=1, causal=False, mask="random"),
    Case(100, 48, H=1, B=2, pool="mean", mask="blocks"),
)

_REAL = (
    Case(1024, 128, D=64, B=2, H=4),
    Case(1000, 128, D=64, B=2, H=4, causal=False, mask="random"),
    Case(2047, 64, D=64, B=1, H=3, pool="mean", mask="blocks"),
    Case(1500, 256, D=64, B=1, H=2, pool="sum", causal=False),
    Case(1500, 256, D=64, B=2, H=2, mask="random", layout="BHLD"),
    Case(777, 32, D=32, B=2, H=2, causal=False, mask="all"),
    Case(300, 16, D=16, B=2, H=2),
    Case(301, 16, D=16, B=2, H=2, causal=False),
    Case(613, 100, D=40, B=2, H=2, mask="blocks"),
    Case(1025, 128, D=128, B=1, H=2),
    Case(900, 128, D=96, B=1, H=2, pool="mean", causal=False, mask="random"),
    Case(100, 128, D=64, B=2, H=2),
    Case(2000, 512, D=64, B=1, H=2),
)
# A sum over a block leaves half precision's accuracy; the mechanism never runs one there.
REAL = tuple(
    replace(c, dtype=d)
    for c in _REAL
    for d in (torch.bfloat16, torch.float16, torch.float32)
    if c.pool != "sum" or d == torch.float32
)
