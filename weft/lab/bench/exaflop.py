"""The cost of training in exaFLOP, counted on the model itself.

The Information Pathways Hypothesis, https://arxiv.org/abs/2306.01705, Table 7. The paper does not say how it counts.
Its figures are those of the forward pass, two operations per multiply-add, with all L² pairs of causal attention:
2 · layers · (12 D² + 2 L D) per token gives its 7.6, 1.7 and 23.8 for WikiText-103, Enwik8 and CIFAR-10.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


def exaflop(model: nn.Module, inputs: tuple[Any, ...], examples: int) -> float:
    """10^18 operations of the forward pass over `examples` rows; `inputs` is one row. The model may be on meta.

    Subsampled layers are counted as dense if the model is in eval().
    """
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(*inputs)
    return counter.get_total_flops() * examples / 1e18
