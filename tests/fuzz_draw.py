"""Random calls of registered mechanisms. A draw depends only on one `random.Random` and is the same on every device."""

from __future__ import annotations

import contextlib
import copy
import os
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import weft

DEVICE = os.environ.get("WEFT_TEST_DEVICE", "cpu")

# Values to draw for an option of this name, in every mechanism that has it. Options that are not here keep their
# defaults, so a new mechanism needs no entry.
POOL: dict[str, tuple[Any, ...]] = {
    "biased": (True, False),
    "block_size": (1, 2, 3, 4, 7, 8, 50),
    "buckets": (2, 4, 8),
    "capacity": (1, 3, 4, 9),
    "chunk": (1, 2, 3, 5),
    "cls": (False, True),
    "clusters": (1, 3, 5),
    "columns": (0, 1, 2, 4),
    "decay": (0.0, 0.5, 0.9, 1.0),
    "dot": (True, False),
    "epsilon": (1e-6, 1e-2),
    "factorisations": (
        ("combiner-axial-vertical", "combiner-fixed"),
        ("combiner-logsparse", "combiner-axial"),
        (("combiner-routing", {"clusters": 3, "capacity": 4, "decay": 0.5}), "combiner-axial-horizontal"),
    ),
    "features": (1, 5, 40),
    "global_tokens": (0, 1, 3),
    "hashes": (1, 2, 3),
    "iterations": (0, 3),
    "keep": (1.0, 0.5),
    "kernel": ("softmax", "relu"),
    "key_summary": ("none", "wsum"),
    "kind": ("factorized", "random", "dense"),
    "layout": ("1d", "graph", (3, 4), (2, 7)),
    "leading_column": (False, True),
    "levels": (2, 3, 4),
    "mixture": ("average", "joint"),
    "noise": ("gaussian", "uniform"),
    "offsets": ("spans", "powers"),
    "one_way": (False, True),
    "own_span": (False, True),
    "pattern": ("fixed", "strided"),
    "random_blocks": (0, 1, 3),
    "rank": (1, 3),
    "round_sigma": (False, True),
    "sigma": (0.0, 0.2, 1.0),
    "split": (False, True),
    "summary": ("max", "mean", "sum", "relu-max", "deepsets-max", "deepsets-mean"),
    "window": (1, 2, 3, 6, 9),
    "windows": (1, 2, 3, (2, 2)),
}
LAYOUTS = ("BHLD", "BLHD", "BHDL", "LBHD", "DLHB", "packed", "cut", "one batch", "one head")
LEARNED_PLACES = ("combiner-routing", "reformer", "routing")  # half precision may choose another bucket or cluster


@dataclass
class Mechanism:
    """A mechanism with random options, and the sizes of its calls."""

    name: str
    causal: bool
    options: dict[str, Any]
    heads: int
    head_dim: int
    max_length: int | None
    dropout: float
    seed: int

    @classmethod
    def draw(
        cls,
        r: Random,
        name: str,
        *,
        causal: bool | None = None,
        dropout: float = 0.0,
        bounded: bool = False,
        wide: bool = False,
        fixed: bool = False,
    ) -> Mechanism:
        """`bounded`: with a max_length; `wide`: realistic head sizes; `fixed`: no default depends on the length."""
        info = weft.attention_info(name)
        directions = [c for c in (False, True) if (info.causal if c else info.bidirectional) and causal in (None, c)]
        heads, head_dim = r.choice((1, 2, 2, 3, 4)), r.choice((16, 32, 64) if wide else (1, 2, 4, 5, 6, 8, 8, 16))
        direction = r.choice(directions)
        need = bounded or fixed or info.needs_max_length or r.random() < 0.3
        made = cls(name, direction, {}, heads, head_dim, 160 if need else None, dropout, r.randrange(1 << 30))
        for _ in range(20):
            made.options = {key: r.choice(POOL[key]) for key in info.options if key in POOL and r.random() < 0.6}
            try:
                made.make()
            except ValueError:  # values that do not go together
                continue
            return made
        made.options = {}
        return made

    @property
    def info(self) -> weft.AttentionInfo:
        return weft.attention_info(self.name)

    @property
    def sorts(self) -> bool:
        """Whether rounding of q or k can move a token to another bucket or cluster."""
        members = [entry if isinstance(entry, str) else entry[0] for entry in self.options.get("factorisations", ())]
        return any(name in LEARNED_PLACES for name in (self.name, *members))

    def make(self, **changes: Any) -> weft.Attention:
        torch.manual_seed(self.seed)
        settings: dict[str, Any] = {
            "heads": self.heads,
            "head_dim": self.head_dim,
            "causal": self.causal,
            "max_length": self.max_length,
            "dropout": self.dropout,
        }
        attn = weft.make_attention(self.name, **{**settings, **self.options, **changes})
        return attn.to(DEVICE, torch.float64).eval()

    def length(self, r: Random, longest: int = 45) -> int:
        layout = self.options.get("layout")
        if isinstance(layout, tuple):
            return layout[0] * layout[1] * self.options.get("channels", 1)
        drawn = r.choice((1, 2, 3, r.randint(1, 20), r.randint(1, 20), r.randint(1, longest)))
        return min(drawn, self.max_length or drawn)

    def __str__(self) -> str:
        shown = {**self.options, "heads": self.heads, "head_dim": self.head_dim, "max_length": self.max_length}
        shown["dropout"] = self.dropout
        return f"{self.name} {'causal' if self.causal else 'bidirectional'} {shown}"


def noise(r: Random, *shape: int, scale: float = 1.0) -> Tensor:
    """Normal float64, the same on every device."""
    g = torch.Generator("cpu").manual_seed(r.randrange(1 << 40))
    x = scale * torch.randn(shape, generator=g, dtype=torch.float64, device="cpu")
    return x.to(DEVICE)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """x (B, H, L, D) in another memory layout; the values of "one batch" and "one head" are those of the first."""
    B, H, L, D = x.shape
    if layout == "one batch":
        return x[:1].expand(B, -1, -1, -1) if B else x
    if layout == "one head":
        return x[:, :1].expand(-1, H, -1, -1)
    if layout == "packed":  # as projections of q, k and v in one matrix make it
        return torch.stack([x.transpose(1, 2)] * 3, 2)[:, :, 1].transpose(1, 2)
    if layout == "cut":  # a view into memory full of NaN
        around = x.new_full((B, H, 2 * L + 1, D + 3), float("nan"))
        around[:, :, 1::2, 2:-1] = x
        return around[:, :, 1::2, 2:-1]
    order = ["BHLD".index(letter) for letter in layout]
    back = [layout.index(letter) for letter in "BHLD"]
    return x.permute(order).contiguous().permute(back)


def draw_mask(r: Random, B: int, L: int, must: bool = False) -> Tensor | None:
    """None, right, left, scattered or total padding, also in unusual memory layouts."""
    kind = r.choice(
        ("right", "left", "scattered", "nothing") if must else ("none", "none", "right", "left", "scattered")
    )
    if kind == "none":
        return None
    mask = torch.ones(B, L, dtype=torch.bool)
    for b in range(B):
        n = r.randint(0, L)
        if kind == "right":
            mask[b, n:] = False
        elif kind == "left":
            mask[b, :n] = False
        elif kind == "scattered" or b:
            mask[b] = torch.tensor([r.random() < 0.6 for _ in range(L)], dtype=torch.bool)
        else:
            mask[b] = False
    if r.random() < 0.3:
        return mask.T.contiguous().T
    if B and r.random() < 0.1:
        return mask[:1].expand(B, L)
    return mask


class Table(nn.Module):
    """A bias for each pair of positions, possibly -inf; other positions raise an error."""

    def __init__(self, values: Tensor):
        super().__init__()
        self.values = nn.Parameter(values.clone())  # (H, L, L)

    def forward(self, i: Tensor, j: Tensor) -> Tensor:
        L = self.values.shape[-1]
        for at in (i, j):
            assert at.numel() == 0 or (at.min() >= 0 and at.max() < L), (
                f"asked at positions {int(at.min())} to {int(at.max())} of {L}"
            )
        head = torch.arange(self.values.shape[0]).view(1, -1, *[1] * (max(i.dim(), j.dim()) - 2))
        return self.values[head, i, j]


class Root(nn.Module):
    """w_h · √(key position): value and gradient are NaN below position 0."""

    def __init__(self, heads: int):
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-0.5, 0.5, heads, dtype=torch.float64))

    def forward(self, i: Tensor, j: Tensor) -> Tensor:
        i, j = torch.broadcast_tensors(i, j)
        return self.w.view(1, -1, *[1] * (j.dim() - 2)) * j.sqrt()


BIASES = ("alibi", "relative", "table", "root", "holes", "closed rows")


def draw_bias(r: Random, mechanism: Mechanism, L: int, kind: str | None = None) -> nn.Module | None:
    """A position bias, if the mechanism supports one; "holes" has -inf for some pairs, "closed rows" for all of some
    queries."""
    if not mechanism.info.bias:
        return None
    H = mechanism.heads
    kind = kind or r.choice(("none", *BIASES))
    if kind == "none":
        return None
    if kind == "alibi":
        return weft.ALiBi(H)
    if kind == "relative":
        torch.manual_seed(mechanism.seed)
        bias = weft.RelativeBias(H, r.choice((1, 4, 9))).double()
        with torch.no_grad():
            bias.table.copy_(noise(r, *bias.table.shape))
        return bias
    if kind == "root":
        return Root(H)
    values = noise(r, H, L, L)
    if kind == "holes":
        values[noise(r, H, L, L) > 0.7] = float("-inf")
    elif kind == "closed rows":
        values[noise(r, H, L) > 0.7] = float("-inf")
    return Table(values)


@dataclass
class Call:
    """A mechanism and its arguments in float64."""

    mechanism: Mechanism
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    bias: nn.Module | None
    probe: Tensor  # the gradient of the output
    ties: bool  # a maximum has several gradients

    @classmethod
    def draw(
        cls,
        r: Random,
        mechanism: Mechanism,
        *,
        masked: bool = False,
        bias: str | None = None,
        scale: float | None = None,
        longest: int = 45,
        may_be_empty: bool = True,
        cross: bool = True,
    ) -> Call:
        m = mechanism
        B = r.choice((0, 1, 2, 3) if may_be_empty else (1, 2, 2, 3))
        Lk = m.length(r, longest)
        Lq = m.length(r, longest) if cross and m.info.cross and not m.causal and r.random() < 0.4 else Lk
        s = scale or r.choice((0.3, 1.0, 1.0, 2.0))
        q, k, v = (noise(r, B, m.heads, L, m.head_dim, scale=s) for L in (Lq, Lk, Lk))
        ties = r.random() < 0.15
        if ties:
            q, k = q.round(), k.round()
        mask = draw_mask(r, B, Lk, must=masked)
        return cls(m, q, k, v, mask, draw_bias(r, m, max(Lq, Lk), bias), noise(r, *q.shape), ties)

    @property
    def real(self) -> Tensor:
        """(B, 1, Lq, 1): the queries whose output is specified."""
        if self.mask is None or self.q.shape[2] != self.k.shape[2]:
            return torch.ones(self.q.shape[0], 1, self.q.shape[2], 1, dtype=torch.bool)
        return self.mask[:, None, :, None]

    def __str__(self) -> str:
        padding = "no mask" if self.mask is None else f"mask {self.mask.int().tolist()}"
        shapes = f"q {tuple(self.q.shape)} k {tuple(self.k.shape)}"
        return f"{self.mechanism} {shapes} bias {type(self.bias).__name__} {padding}"


@dataclass
class Found:
    """An output, and the gradients of q, k, v, parameters and biases."""

    out: Tensor
    grads: list[Tensor | None]


def run(
    attn: nn.Module,
    inputs: list[Tensor],
    mask: Tensor | None = None,
    bias: nn.Module | None = None,
    probe: Tensor | None = None,
    *,
    real: Tensor | None = None,
    seed: int = 0,
    context: Any = None,
    segments: Tensor | None = None,
) -> Found:
    """The output and, if `probe` is given, the gradients for it, through real queries only."""
    parameters = [*attn.parameters(), *(bias.parameters() if bias is not None else ())]
    torch.manual_seed(seed)  # the same random sample
    with context or contextlib.nullcontext():
        out = attn(*inputs, mask, bias, *([] if segments is None else [segments]))
    if probe is None:
        return Found(out, [])
    wanted = [x for x in (*inputs, *parameters) if x.requires_grad]
    if not out.requires_grad:
        return Found(out, [None for _ in wanted])
    probe = probe.to(out.dtype)
    if real is not None:
        probe = probe.where(real, 0)
    return Found(out, list(torch.autograd.grad(out, wanted, probe, allow_unused=True)))


def twin(module: Any, dtype: torch.dtype) -> Any:
    return None if module is None else copy.deepcopy(module).to(dtype)


def leaf(x: Tensor, grad: bool = True) -> Tensor:
    return x.detach().requires_grad_(grad)


def assert_close(found: Tensor, expected: Tensor, tolerance: float, what: str, scale: Tensor | float = 0.0) -> None:
    """Compare by the relative error of the whole tensor, relative to its norm or `scale`, whichever is larger."""
    assert found.shape == expected.shape, f"{what}: {tuple(found.shape)} instead of {tuple(expected.shape)}"
    if not found.numel():
        return
    assert found.isfinite().all(), f"{what} is not finite"
    error, size = (found.double() - expected.double()).norm().item(), expected.double().norm().item()
    assert error <= tolerance * max(size, float(scale)) + 1e-12, f"{what}: off by {error:.3g} of {size:.3g}"
