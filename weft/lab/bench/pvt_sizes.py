"""Parameters and multiply-adds of PVT and timm models, plain and cached, compared with the cache paper.

Counted for one 224 x 224 image in training mode on meta tensors: all matrix products and convolutions, without biases,
norms and softmax.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ...models.pvt import pvt
from ...models.sizes import parameters
from .report import Table
from .throughput import TIMM, build

# Zhang et al., Cached Transformers (2312.12742): Table 9, plain and cached, and Table 10, by caching ratio; G.
PRINTED = {"tiny": (1.90, 2.15), "small": (3.80, 4.29), "medium": (6.70, 7.61)}
PRINTED_BY_RATIO = {0.125: 1.93, 0.25: 1.96, 0.5: 2.15, 1.0: 2.97}


@dataclass(frozen=True)
class CostRow:
    """One model: parameters, and multiply-adds for one image.

    `products` are the matrix products of the cached branch (scores and values), which the paper seems not to count.
    """

    model: str
    ratio: float | None  # None: not cached
    preset: str
    parameters: int
    multiply_adds: int
    products: int
    printed: float | None = None

    @property
    def as_printed(self) -> float:
        """G multiply-adds, as the paper seems to count them."""
        return (self.multiply_adds - self.products) / 1e9


def multiply_adds(model: nn.Module, *inputs: Any) -> tuple[int, int]:
    """Total multiply-adds of one forward pass, and those of the cached branches' scores and values."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(*inputs)
    products = sum(
        sum(counts.values()) for name, counts in counter.get_flop_counts().items() if name.endswith(".memory.attention")
    )
    return counter.get_total_flops() // 2, products // 2


def cost(name: str, model: nn.Module, ratio: float | None, preset: str, printed: float | None = None) -> CostRow:
    total, products = multiply_adds(model.train(), torch.empty(1, 3, 224, 224, device="meta"))
    return CostRow(name, ratio, preset, parameters(model), total, products, printed)


def pvt_sizes(presets: Iterable[str] = ("paper", "authors")) -> list[CostRow]:
    """PVT-Tiny, Small and Medium plain and cached, and PVT-Tiny by caching ratio."""
    rows = []
    with torch.device("meta"):
        for size, (plain, cached) in PRINTED.items():
            name = f"PVT-{size.capitalize()}"
            rows.append(cost(name, pvt(size), None, "", plain))
            rows += [cost(name, pvt(size, cached=True, preset=p), 0.5, p, cached) for p in presets]
        for ratio, printed in PRINTED_BY_RATIO.items():
            if ratio != 0.5:  # already in the row above
                rows += [
                    cost("PVT-Tiny", pvt("tiny", cached=True, ratio=ratio, preset=p), ratio, p, printed)
                    for p in presets
                ]
    return rows


def timm_sizes(names: Iterable[str] = tuple(TIMM)) -> list[CostRow]:
    """The paper's other models, from timm, plain and cached; the paper prints no counts for them."""
    rows = []
    for name in names:
        with torch.device("meta"):
            rows.append(cost(TIMM[name], build(name, cached=False), None, ""))
            rows.append(cost(TIMM[name], build(name, cached=True), 0.5, "paper"))
    return rows


def show_costs(rows: Iterable[CostRow]) -> None:
    """Print the rows as a table."""
    headings = ("model", "cache", "r", "parameters, M", "mult-adds, G", "less products", "paper", "differs")
    table = Table("one image of 224 x 224, training", headings)
    for row in rows:
        cached = ("-", "-") if row.ratio is None else (row.preset, f"{row.ratio:g}")
        beside = ("-", "-")
        if row.printed is not None:
            beside = f"{row.printed:.2f}", f"{row.as_printed / row.printed - 1:+.1%}"
        counts = f"{row.parameters / 1e6:.3f}", f"{row.multiply_adds / 1e9:.3f}", f"{row.as_printed:.3f}"
        table.rows.append((row.model, *cached, *counts, *beside))
    table.show()
    print(
        "less products: without the cached branch's scores and values, which is close to the paper's values\n"
        "(Cached Transformers, arXiv 2312.12742, Tables 9 and 10). The last column compares these."
    )
