"""Subsampled attention on data-parallel ranks: each draws its own samples, or all the same with an option."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weft import MultiheadAttention
from weft.layers import EdgeAttention, SubsampledWindowAttention

LENGTH = 36  # also 6 x 6 cells


def one_d(**options: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    layer = MultiheadAttention(16, 2, attention="subsampled", **{"windows": 3, **options})
    return layer, (noise(2, LENGTH, 16),)


def swin(**options: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return SubsampledWindowAttention(16, 2, window=4, **options), (noise(2, 8, 8, 16),)


def edges(**options: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return EdgeAttention(16, 2, 3, source_dropout=0.5, **options), (noise(2, 9, 16), noise(2, 9, 9, 3))


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "bidirectional": (one_d, {}),
    "causal": (one_d, {"causal": True}),
    "thinned": (one_d, {"keep": 0.5}),
    "unbiased": (one_d, {"biased": False}),
    "image": (one_d, {"layout": (6, 6), "windows": (2, 3)}),
    "graph": (one_d, {"layout": "graph", "keep": 0.5}),
    "Swin": (swin, {}),
    "Swin, unbiased": (swin, {"biased": False}),
    "EGT": (edges, {}),
}


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def forwards(**options: bool) -> dict[str, list[Tensor]]:
    """Two training forwards and one in eval() of every kind, with the same seed, input and weights."""
    found = {}
    for kind, (build, settings) in KINDS.items():
        torch.manual_seed(0)
        layer, inputs = build(**settings, **options)
        found[kind] = [layer(*inputs).detach() for _ in range(2)] + [layer.eval()(*inputs).detach()]
    return found


def test_ranks_draw_their_own_samples_unless_asked_otherwise(monkeypatch):
    alone = forwards()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    ranks, alike = [], []
    for rank in range(2):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        ranks.append(forwards())
        alike.append(forwards(same_on_all_ranks=True))
    for kind, (first, second, dense) in ranks[0].items():
        torch.testing.assert_close([first, second, dense], alone[kind])  # the first rank draws what one process draws
        assert not torch.allclose(first, second, atol=1e-4)  # another sample in every forward
        for mine, yours in zip((first, second), ranks[1][kind], strict=False):
            assert not torch.allclose(mine, yours, atol=1e-4), kind
        torch.testing.assert_close(dense, ranks[1][kind][2])
        assert all(torch.equal(a, b) for a, b in zip(alike[0][kind], alike[1][kind], strict=True)), kind
