"""The cost of training in exaFLOP, counted on the model itself.

The Information Pathways Hypothesis, https://arxiv.org/abs/2306.01705, Table 7. The paper does not say how it counts.
Its figures are those of the forward pass, two operations per multiply-add, with all L² pairs of causal attention:
2 · layers · (12 D² + 2 L D) per token gives its 7.6, 1.7 and 23.8 for WikiText-103, Enwik8 and CIFAR-10. Its 3.2 for
Swin-T is that of the blocks' linear layers alone; attention, patches and merging make it 3.76. PCQM4Mv2 (0.5) is
missing here, because the paper does not give its number of steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ...models.language import LanguageModel

# data set -> tokens per example, size of the softmax (0: the adaptive one is not counted), steps x batch, the paper's
TABLE_7 = {
    "WikiText-103": (3072, 0, 64_000 * 64, 7.6),
    "Enwik8": (4096, 256, 10_000 * 64, 1.7),
    "CIFAR-10": (3072, 256, 100_000 * 128, 23.8),
}


def exaflop(model: nn.Module, inputs: tuple[Any, ...], examples: int) -> float:
    """10^18 operations of the forward pass over `examples` rows; `inputs` is one row. The model may be on meta.

    Subsampled layers are counted as dense if the model is in eval().
    """
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(*inputs)
    return counter.get_total_flops() * examples / 1e18


def table_7() -> Iterator[tuple[str, float, float]]:
    """Data set, exaFLOP of the paper's decoder (16 layers, width 1,024) or Swin-T, and the paper's figure."""
    for name, (length, vocab, examples, paper) in TABLE_7.items():
        with torch.device("meta"):
            model = LanguageModel(
                max(1, vocab), max_length=length, dim=1024, heads=8, head_dim=128, layers=16, mlp_dim=4096
            )
            ids = torch.zeros(1, length, dtype=torch.long)
            yield name, exaflop(model.eval(), (ids,), examples), paper
    if find_spec("timm"):
        from timm import create_model

        with torch.device("meta"):
            swin = create_model("swin_tiny_patch4_window7_224", window_size=14)
            yield "ImageNet-1k", exaflop(swin.eval(), (torch.zeros(1, 3, 224, 224),), 300 * 1_281_167), 3.2
