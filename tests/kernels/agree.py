"""Compare a mechanism's kernel with its plain version: backend="triton" against backend="torch" in float64, outputs and
every gradient, in memory filled with NaN. `calls.py` lists the calls.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import weft

# Rounding errors of ‖out − ref‖ / ‖ref‖; a wrong index or a missing term gives much more.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 1.5e-2}


@dataclass(frozen=True)
class Call:
    """One call of a registered mechanism: its options, the shape, and how the mask and the memory are laid out."""

    name: str
    L: int
    D: int = 16
    B: int = 1
    H: int = 2
    causal: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    bias: str = ""  # "alibi": position biases inside
    mask: str = (
        "none"  # none, random, ends (one sequence's start, another's end), half (one's first half), all (of one)
    )
    layout: str = "BLHD"  # the order of the dimensions in memory
    dtype: torch.dtype = torch.float32
    ties: bool = False  # round queries and keys to integers, so that many are equal, as in half precision
    group: int = 1  # heads of q for each head of k and v
    slack: float = 1.0  # factor of the tolerance, if the plain version in the same dtype is as inexact

    def __str__(self) -> str:
        options = " ".join(f"{key}={value}" for key, value in self.options.items())
        shape = f"{str(self.dtype)[6:]} B{self.B} H{self.H} L{self.L} D{self.D}"
        rest = f"{'causal' if self.causal else 'both'} mask={self.mask} {self.layout} {self.bias}"
        rest += " ties" if self.ties else ""
        rest += f" grouped={self.group}" if self.group > 1 else ""
        return f"{self.name} {options} {shape} {rest}".strip()

    def make(self, backend: str, device: str) -> nn.Module:
        """The mechanism, in training mode: samplers sample."""
        shape: dict[str, Any] = {"heads": self.H, "head_dim": self.D, "causal": self.causal}
        return weft.make_attention(self.name, backend=backend, **shape, **self.options).to(device)

    def fits(self, dtype: torch.dtype) -> bool:
        """Whether the kernel supports these sizes in this dtype."""
        q = torch.empty(self.B, self.H, self.L, self.D, dtype=dtype, device="meta")
        return not weft.attention_info(self.name).kernel.lacks(self.make("auto", "cpu"), q, q, q)

    def tensors(self, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Fresh random q, k, v, the output's gradient, and the mask."""
        order = [self.layout.index(letter) for letter in "BHLD"]
        tensors = []
        for heads in (self.H, self.H // self.group, self.H // self.group, self.H):
            sizes = {"B": self.B, "H": heads, "L": self.L, "D": self.D}
            shape = [sizes[letter] for letter in self.layout]
            tensors.append(torch.randn(shape, device=device).to(self.dtype).permute(order))
        q, k, v, dout = tensors
        if self.ties:
            q, k = q.round(), k.round()
        if self.mask == "none":
            return q, k, v, dout, None
        mask = torch.rand(self.B, self.L, device=device) > 0.3
        if self.mask == "ends":
            mask[0, : self.L // 3] = False
            mask[-1, -self.L // 4 :] = False
        if self.mask == "half":
            mask[0, : self.L // 2] = False
        if self.mask == "all":
            mask[0] = False
        hidden = ~mask[:, None, :, None]  # NaN in masked tokens must have no effect
        return q, k.masked_fill(hidden, float("nan")), v.masked_fill(hidden, float("nan")), dout, mask

    def position_bias(self, device: str) -> Callable[..., Tensor] | None:
        return weft.ALiBi(self.H).to(device) if self.bias == "alibi" else None


def errors(call: Call, device: str) -> dict[str, float]:
    """Relative errors of the kernel's output and all gradients against the plain version in float64."""
    q, k, v, dout, mask = call.tensors(device)
    bias = call.position_bias(device)
    seed = int(torch.randint(2**31, ()))
    torch.manual_seed(seed)
    kernel = call.make("triton", device)
    plain = copy.deepcopy(kernel)
    plain.backend = "torch"
    results = []
    for attn, dtype in ((plain.double(), torch.float64), (kernel, call.dtype)):
        inputs = [x.to(dtype).detach().requires_grad_() for x in (q, k, v)]
        torch.manual_seed(seed)  # the same random sample
        with poisoned_memory():
            out = attn(*inputs, mask, bias)
            inputs += attn.parameters()
            grads = torch.autograd.grad(out, inputs, dout.to(out.dtype), allow_unused=True)
            results.append(
                (out, *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs, strict=True)))
            )
    assert results[1][0].dtype == call.dtype and results[1][0].shape == q.shape
    names = ("out", "dq", "dk", "dv", *(f"d{name}" for name, _ in kernel.named_parameters()))
    return {name: relative_error(mine, theirs) for name, theirs, mine in zip(names, *results, strict=True)}


def relative_error(mine: Tensor, theirs: Tensor) -> float:
    """‖mine − theirs‖ / ‖theirs‖, or ‖mine‖ if theirs is zero up to rounding. NaN stays NaN and fails every test."""
    return ((mine.double() - theirs).norm() / torch.where(theirs.norm() > 1e-12, theirs.norm(), 1.0)).item()


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill new memory with NaN, so that reads of unwritten elements are visible."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # in this mode PyTorch fills what torch.empty gives
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
