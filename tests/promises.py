"""What the tests that sweep the registry share: cases, inputs and masks."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import weft

DEVICE = os.environ.get("WEFT_TEST_DEVICE", "cpu")  # WEFT_TEST_DEVICE=cuda runs the sweeps on a GPU

HEADS, HEAD_DIM = 2, 6

# Small blocks, so that short sequences cross many of their edges. A mechanism that is not named here is tested with
# its defaults: being registered is enough.
SMALL: dict[str, list[dict[str, Any]]] = {
    "axial": [{"block_size": 4}],
    "bigbird": [{"block_size": 3, "random_blocks": 2}],
    "combiner-axial": [{"block_size": 4}, {"block_size": 3, "key_summary": "none"}],
    "combiner-axial-horizontal": [{"block_size": 4}, {"block_size": 3, "split": True}],
    "combiner-axial-vertical": [{"block_size": 4}],
    "combiner-fixed": [{"block_size": 4}, {"block_size": 2, "levels": 3}, {"block_size": 3, "summary": "deepsets-max"}],
    "combiner-mixture": [{"block_size": 4}, {"block_size": 3, "mixture": "joint"}],
    "combiner-routing": [{"clusters": 3, "capacity": 4}],
    "linformer": [{"rank": 3}],
    "local": [{"block_size": 4}],
    "longformer": [{"window": 4}, {"window": 5, "global_tokens": 2}],
    "performer": [{"features": 5}, {"kernel": "relu"}],
    "reformer": [{"chunk": 3, "buckets": 4, "hashes": 2}],
    "routing": [{"clusters": 3, "capacity": 4}],
    "sinkhorn": [{"block_size": 4}, {"block_size": 3, "iterations": 3}],
    "sparse": [
        {"block_size": 4, "columns": 2},
        {"block_size": 4, "pattern": "strided"},
        {"block_size": 3, "columns": 1, "leading_column": True, "one_way": True},
    ],
    "subsampled": [{"windows": 3}],
    "synthesizer": [
        {"kind": "factorized", "rank": 3},
        {"kind": "random", "dot": False},
        {"kind": "dense", "dot": False},
    ],
}
POOLED = [{"summary": s} for s in ("mean", "sum", "relu-max", "deepsets-max", "deepsets-mean")]
# Settings that only the comparison with `naive` runs. One with "causal" has that direction only.
MORE: dict[str, list[dict[str, Any]]] = {
    "axial": [{"block_size": m} for m in (1, 3, 40)],
    "bigbird": [
        {"block_size": 4, "random_blocks": 3, "seed": 2},
        {"block_size": 1},
        {"block_size": 2, "pattern_length": 23},
    ],
    "combiner-axial": [
        *({"block_size": m, "key_summary": key} for m in (1, 5, 40) for key in ("wsum", "none")),
        {"block_size": 4, "own_span": True, "causal": False},
        {"block_size": 4, "own_span": True, "causal": False, "key_summary": "none"},
    ],
    "combiner-axial-horizontal": [
        *({"block_size": m} for m in (1, 3, 40)),
        *({"block_size": 4, **s} for s in POOLED),
        {"block_size": 4, "split": True, "summary": "mean"},
    ],
    "combiner-axial-vertical": [*({"block_size": m} for m in (1, 3, 40)), *({"block_size": 4, **s} for s in POOLED)],
    "combiner-fixed": [
        *({"block_size": m} for m in (1, 3, 40)),
        *({"block_size": m, "levels": n} for m, n in ((3, 3), (2, 4), (2, 6))),
        {"block_size": 4, "own_span": True, "causal": False},
        *({"block_size": 4, **s} for s in POOLED),
        *({"block_size": 2, "levels": 3, **s} for s in POOLED),
    ],
    "combiner-logsparse": POOLED,
    "combiner-mixture": [
        {"block_size": 1, "mixture": "joint"},
        *({"block_size": 4, "mixture": "joint", **s} for s in POOLED),
        {"block_size": 5, "summary": "sum"},
        {
            "block_size": 5,
            "summary": "mean",
            "factorisations": ["combiner-fixed", ("combiner-axial", {"key_summary": "none"}), "combiner-logsparse"],
        },
    ],
    "combiner-routing": [
        *({"clusters": g, "capacity": c} for g, c in ((3, 2), (4, 64), (1, 1))),
        *({"clusters": 3, "capacity": 4, **s} for s in POOLED),
    ],
    "local": [{"block_size": m} for m in (1, 3, 50)],
    "logsparse": [{"offsets": "powers"}],
    "longformer": [{"window": w, "global_tokens": g} for w, g in ((1, 0), (2, 1), (3, 3), (9, 1), (100, 0))],
    "performer": [{}],
    "routing": [{"clusters": g, "capacity": c} for g, c in ((3, 2), (4, 64), (1, 1))],
    "sinkhorn": [{"block_size": 3, "iterations": 20}],
    "sparse": [
        *({"block_size": m, "columns": c} for m, c in ((5, 2), (3, 7), (1, 1), (40, 3), (4, 0))),
        {"block_size": 5, "columns": 2, "leading_column": True},
        *({"block_size": m, "pattern": "strided"} for m in (1, 3, 40)),
        {"block_size": 4, "columns": 1, "cls": True, "one_way": True, "causal": False},
        {"block_size": 4, "columns": 1, "cls": True, "one_way": True, "leading_column": True, "causal": False},
        {"block_size": 4, "pattern": "strided", "cls": True, "causal": False},
    ],
    "subsampled": [
        {"windows": 4, "keep": 0.4},
        {"windows": 1, "keep": 0.5},
        {"windows": 3, "biased": False},
        {"windows": 2, "noise": "uniform"},
        {"layout": "graph", "keep": 0.5, "causal": False},
    ],
    "synthesizer": [{"kind": kind} for kind in ("random", "dense")] + [{"dot": False}],
}
MAX_LENGTH = 40


@dataclass(frozen=True)
class Case:
    name: str
    causal: bool
    options: tuple[tuple[str, Any], ...] = field(default=())

    def make(self, *, dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any) -> weft.Attention:
        torch.manual_seed(seed)
        settings: dict[str, Any] = {"heads": HEADS, "head_dim": HEAD_DIM, "causal": self.causal, **dict(self.options)}
        if self.info.needs_max_length:
            settings["max_length"] = MAX_LENGTH
        return weft.make_attention(self.name, **{**settings, **changes}).to(DEVICE, dtype).eval()

    @property
    def info(self) -> weft.AttentionInfo:
        return weft.attention_info(self.name)

    def __str__(self) -> str:
        shown = ",".join(f"{k}={v}" for k, v in self.options)
        return f"{self.name}{'-causal' if self.causal else ''}{f'[{shown}]' if shown else ''}"


def _freeze(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def cases(first_setting: bool = False, more: bool = False, **wanted: Any) -> list[Case]:
    """Every mechanism, direction and small setting (or the first, or `MORE`); `wanted` filters on info, e.g.
    causal=True."""
    found = []
    for name in weft.attentions():
        info = weft.attention_info(name)
        settings = MORE.get(name, []) if more else SMALL.get(name, [{}])
        for options in settings[:1] if first_setting else settings:
            frozen = tuple((k, _freeze(v)) for k, v in options.items())
            for causal in (False, True):
                if (info.causal if causal else info.bidirectional) and options.get("causal", causal) == causal:
                    found.append(Case(name, causal, frozen))
    if "causal" in wanted:
        found = [c for c in found if c.causal == wanted["causal"]]
    return [c for c in found if all(getattr(c.info, k) == v for k, v in wanted.items() if k != "causal")]


def sweep(**wanted: Any):
    """Parametrise a test over the registry."""
    return pytest.mark.parametrize("case", cases(**wanted), ids=str)


def qkv(L: int, *, B: int = 2, H: int = HEADS, D: int = HEAD_DIM, dtype=torch.float64, seed: int = 0, grad=False):
    q, k, v = noise(3, B, H, L, D, seed=1000 * L + seed).to(dtype).unbind(0)
    if grad:
        return tuple(x.clone().requires_grad_() for x in (q, k, v))
    return q, k, v


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    """Standard normal float64, the same on every device."""
    g = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64, device="cpu").to(DEVICE)


def masks(L: int) -> dict[str, torch.Tensor]:
    """Right, left and interior padding, in a batch of two whose second row is whole; and a row without any token."""
    right, left, inner, nothing = (torch.ones(2, L, dtype=torch.bool) for _ in range(4))
    right[0, (L + 1) // 2 :] = False
    left[0, : L // 2] = False
    inner[0, L // 3 : max(L // 3 + 1, 2 * L // 3)] = False
    nothing[0] = False
    return {"right": right, "left": left, "inner": inner, "nothing": nothing}
