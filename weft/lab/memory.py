"""Check that a step fits into memory. On a CPU, the system kills a process that uses too much, without a message.

    at least = weights + gradients + optimizer + batch x saved activations of one example

A forward pass of one or two examples counts the bytes that autograd saves. All of them are in memory when the backward
pass begins, so this is a lower bound.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ..tasks.base import Columns, Task
from ..tasks.config import TrainConfig
from ..tasks.files import free_memory

MOMENTS = {"adam": 2, "adamw": 2, "lion": 1}


class TooLarge(Exception):
    """A step needs more memory than available."""


def check_memory(fabric: Any, model: nn.Module, task: Task, rows: Columns, config: TrainConfig) -> None:
    """Raise TooLarge if a step cannot fit; `rows` are one or two examples. CPU only: GPUs raise their own error."""
    if fabric.device.type != "cpu" or config.checkpoint_activations or config.context_parallel > 1:
        return
    world = fabric.world_size // fabric.strategy.num_nodes if hasattr(fabric.strategy, "num_nodes") else 1
    free = free_memory() // max(1, world)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    base = weights * (2 + MOMENTS[config.optimizer])
    count = len(next(iter(rows.values())))
    one = kept_for_backward(fabric, model, task, rows, config, limit=count * (free - base) // config.batch_size)
    one //= count
    need = base + one * config.batch_size
    if need > free:
        fits = max(1, int((free - base) * 0.6 // max(one, 1)))
        way_out = "Choose a smaller model."
        if free > base + one and config.batch_size > 1:
            each = next(n for n in range(min(fits, config.batch_size - 1), 0, -1) if config.batch_size % n == 0)
            accumulate = config.accumulate * config.batch_size // each
            way_out = f"Try --batch-size {each} --accumulate {accumulate}, or add --checkpoint-activations."
        raise TooLarge(
            f"a step needs at least {need / 2**30:.1f} GiB of memory, but only {free / 2**30:.1f} GiB are free "
            f"({one / 2**20:,.0f} MiB for each of {config.batch_size} examples). {way_out}"
        )


def kept_for_backward(
    fabric: Any, model: nn.Module, task: Task, rows: Columns, config: TrainConfig, limit: float
) -> int:
    """Bytes that autograd saves for these rows; counting stops above `limit`."""
    twin = copy.deepcopy(model).train()  # a forward pass may change module state
    own = {t.untyped_storage().data_ptr() for t in [*twin.parameters(), *twin.buffers()]}
    seen: dict[int, int] = {}

    class Enough(Exception):
        pass

    def keep(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
            if sum(seen.values()) > limit:
                raise Enough
        return t

    generator = torch.Generator(device=fabric.device).manual_seed(0)
    batch = task.batch(rows, config, generator, training=True)
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), fabric.autocast():
            loss = task.loss(twin, batch, config)  # noqa: F841  keeps the graph alive while it is counted
    except Enough:
        pass
    return sum(seen.values())
