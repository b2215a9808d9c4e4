"""Devices, precision and processes, through Lightning Fabric.

Fabric rather than Accelerate: it leaves the loop to us, runs the same script under torchrun or alone, and its FSDP
(PyTorch's `fully_shard`) works on the CPU too, so that the tests can run it.
"""

from __future__ import annotations

import os
import warnings
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.rendezvous import rendezvous

from ..models.blocks import blocks
from ..tasks.augment import cpus
from ..tasks.config import TrainConfig
from ..tasks.registry import task_of


def make_fabric(config: TrainConfig) -> Any:
    """Under torchrun, torchrun sets the numbers of processes and nodes."""
    try:
        from lightning.fabric import Fabric
    except ImportError as error:
        raise ImportError("training needs Lightning Fabric: pip install 'weft[lab]'") from error
    _check_devices(config)
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", config.devices))
    world = int(os.environ.get("WORLD_SIZE", devices * config.nodes))
    nodes = max(1, world // devices)
    strategy: Any = config.strategy
    if strategy == "fsdp":
        from lightning.fabric.strategies import ModelParallelStrategy

        if world == 1:
            raise ValueError("fsdp needs several processes: start it with torchrun, or set --devices 2 or more")
        strategy = ModelParallelStrategy(_shard, data_parallel_size=world, tensor_parallel_size=1)
    elif strategy == "auto" and world > 1:
        strategy = "ddp"
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    _connect_again(config)
    return Fabric(
        accelerator=config.accelerator,
        devices=devices,
        num_nodes=nodes,
        strategy=strategy,
        precision=config.precision,  # type: ignore[arg-type]
    )


def check_alone(config: TrainConfig) -> None:
    """Raise an error if torchrun has started several processes of a run that needs a single one."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    for what, needed in ((config.task, task_of(config).streams), ("time_budget", config.time_budget > 0)):
        if world > 1 and needed:
            raise ValueError(f"{what} needs a single process, but torchrun has started {world}: start one")


def _connect_again(config: TrainConfig) -> None:
    """After a restart by torchrun, connect the processes before Fabric does. torch 2.15 keeps one store for all
    attempts, where the new processes would find the addresses of the dead ones and wait for them."""
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    if not attempt or dist.is_initialized():
        return
    store, rank, world = next(rendezvous("env://"))
    on_gpu = config.accelerator in ("cuda", "gpu") or config.accelerator == "auto" and torch.cuda.is_available()
    store = dist.PrefixStore(f"attempt {attempt}", store)
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=world)


def _check_devices(config: TrainConfig) -> None:
    """Raise an error for missing devices; Fabric would fail later, or hang."""
    here = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    here["gpu"] = here["cuda"] or here["mps"]
    kind = config.accelerator
    if kind == "auto":
        kind = "cuda" if here["cuda"] else "mps" if here["mps"] else "cpu"
    if kind != "cpu" and not here[kind]:
        found = ", ".join(name for name in ("cuda", "mps") if here[name]) or "none"
        raise ValueError(f"--device {kind}: no such device here (found: {found}); use --device cpu")
    if "WORLD_SIZE" in os.environ:  # torchrun has already started the processes
        return
    most = here[kind] if kind != "cpu" else max(2, cpus())
    if config.devices > most:
        what = "processor cores" if kind == "cpu" else f"{kind} devices"
        raise ValueError(f"devices is {config.devices}, but this machine has only {most} {what}; lower --devices")
    if config.nodes > 1 and not {"MASTER_ADDR", "SLURM_NTASKS", "NODE_RANK"} & set(os.environ):
        raise ValueError(f"nodes is {config.nodes}: start one process per device with torchrun, or omit --nodes")


def checkpoint_activations(model: nn.Module, offload: bool = False) -> None:
    """Store only the input of each block, with `offload` in CPU memory, and recompute the rest in the backward pass."""
    from torch.autograd.graph import save_on_cpu
    from torch.utils.checkpoint import checkpoint

    inner = blocks(model)
    if not inner:
        raise ValueError("checkpoint_activations: this model has no list of attention blocks")
    for _, block in inner:

        def forward(*args: Any, _inner: Any = block.forward, _block: nn.Module = block, **kwargs: Any) -> Any:
            if not _block.training or not torch.is_grad_enabled():
                return _inner(*args, **kwargs)
            with save_on_cpu(pin_memory=args[0].is_cuda) if offload else nullcontext():
                return checkpoint(_inner, *args, use_reentrant=False, **kwargs)

        block.forward = forward  # type: ignore[method-assign]


def _shard(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for _, block in blocks(model):
        fully_shard(block, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    return model
