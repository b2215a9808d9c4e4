"""Subsampled attention in two data-parallel processes: each draws its own samples, or all the same with an option."""

from __future__ import annotations

import tempfile
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from on_cpu import on_cpu  # noqa: F401
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


def forwards() -> dict[tuple[str, bool], list[Tensor]]:
    """Two training forwards of every kind, with separate and with shared samples; same seed, input and weights."""
    found = {}
    for kind, (build, options) in KINDS.items():
        for alike in (False, True):
            torch.manual_seed(0)
            layer, inputs = build(**options, **({"same_on_all_ranks": True} if alike else {}))
            if dist.is_initialized():
                layer = nn.parallel.DistributedDataParallel(layer)
            found[kind, alike] = [layer(*inputs).detach() for _ in range(2)]
            layer.eval()
            found[kind, alike].append(layer(*inputs).detach())
    return found


def rank(number: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=number, world_size=2)
    torch.save(forwards(), f"{folder}/{number}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks() -> list[dict[tuple[str, bool], list[Tensor]]]:
    with tempfile.TemporaryDirectory() as folder:
        context = mp.spawn(rank, (folder,), nprocs=2, join=False)
        deadline = time.monotonic() + 120
        while not context.join(timeout=1):
            if time.monotonic() > deadline:
                for process in context.processes:
                    process.kill()
                pytest.fail("two ranks did not finish within two minutes")
        return [torch.load(f"{folder}/{number}.pt", map_location="cpu") for number in range(2)]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_draw_their_own_samples_unless_asked_otherwise(kind: str, ranks: list[dict]) -> None:
    mine, yours = (found[kind, False] for found in ranks)
    for step in range(2):
        assert not torch.allclose(mine[step], yours[step], atol=1e-4)
        assert not torch.allclose(mine[0], mine[1], atol=1e-4)  # and another one at every forward
    torch.testing.assert_close(mine[2], yours[2])  # eval() is dense everywhere
    mine, yours = (found[kind, True] for found in ranks)
    for step in range(2):
        assert torch.equal(mine[step], yours[step])
    assert not torch.allclose(mine[0], mine[1], atol=1e-4)


def test_the_first_rank_draws_what_one_process_draws(ranks: list[dict]) -> None:
    alone = forwards()
    for key, outputs in alone.items():
        torch.testing.assert_close(outputs, ranks[0][key])
