"""Devices, precision and processes, through Lightning Fabric.

Fabric rather than Accelerate: it leaves the loop to us, runs the same script under torchrun or alone, and its FSDP
(PyTorch's `fully_shard`) works on the CPU too, so that the tests can run it.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from torch import nn

from ..attention import Attention
from ..tasks.config import TrainConfig


def make_fabric(config: TrainConfig) -> Any:
    """Under torchrun the numbers of processes and nodes are torchrun's."""
    try:
        from lightning.fabric import Fabric
    except ImportError as error:
        raise ImportError("training needs Lightning Fabric: pip install 'weft[lab]'") from error
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", config.devices))
    world = int(os.environ.get("WORLD_SIZE", devices * config.nodes))
    nodes = max(1, world // devices)
    strategy: Any = config.strategy
    if strategy == "fsdp":
        from lightning.fabric.strategies import ModelParallelStrategy

        if world == 1:
            raise ValueError("fsdp shards over several processes: start it with torchrun, or give --devices 2 or more")
        strategy = ModelParallelStrategy(_shard, data_parallel_size=world, tensor_parallel_size=1)
    elif strategy == "auto" and world > 1:
        strategy = "ddp"
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    return Fabric(
        accelerator=config.accelerator,
        devices=devices,
        num_nodes=nodes,
        strategy=strategy,
        precision=config.precision,  # type: ignore[arg-type]
    )


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model: the entries of its outermost module lists that hold attention."""
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList) and any(_has_attention(entry) for entry in child):
                found.extend(child)
            else:
                visit(child)

    visit(model)
    return found


def checkpoint_activations(model: nn.Module) -> None:
    """Let each block store its input only and compute the rest again in the backward pass."""
    from torch.utils.checkpoint import checkpoint

    inner = blocks(model)
    if not inner:
        raise ValueError("checkpoint_activations: this model has no list of blocks to recompute")
    for block in inner:

        def forward(*args: Any, _inner: Any = block.forward, _block: nn.Module = block, **kwargs: Any) -> Any:
            if _block.training and torch.is_grad_enabled():
                return checkpoint(_inner, *args, use_reentrant=False, **kwargs)
            return _inner(*args, **kwargs)

        block.forward = forward  # type: ignore[method-assign]


def _has_attention(module: nn.Module) -> bool:
    return any(isinstance(m, Attention) for m in module.modules())


def _shard(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in blocks(model):
        fully_shard(block, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    return model
