"""How the processes of a run share its work.

    process = data rank x context_parallel + context rank

Processes with the same data rank have the same examples, each a part of their tokens.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..core import sharding
from ..tasks.base import Columns, Task
from ..tasks.config import TrainConfig


class Split:
    def __init__(self, fabric: Any, config: TrainConfig, length: int):
        self.parts, self.config = config.context_parallel, config
        if fabric.world_size % self.parts:
            raise ValueError(
                f"context_parallel={self.parts} needs a multiple of {self.parts} processes, got {fabric.world_size}: "
                "set --devices, or --nproc-per-node of torchrun"
            )
        self.world, self.rank = fabric.world_size // self.parts, fabric.global_rank // self.parts  # data ranks
        self.context: Any = None
        if self.parts > 1:
            from torch.distributed.device_mesh import init_device_mesh

            from ..parallel import Context

            mesh = init_device_mesh(fabric.device.type, (self.world, self.parts), mesh_dim_names=("data", "context"))
            self.context = Context(mesh["context"], length)

    def region(self) -> AbstractContextManager[None]:
        """Around the model's calls and their backward pass, which may recompute them."""
        return nullcontext() if self.context is None else sharding.use(self.context)

    def part(self, task: Task, batch: Columns) -> Columns:
        """This process's part of the tokens."""
        if self.context is None:
            return batch
        return task.part(batch, slice(self.context.start, self.context.stop))

    def loss(self, task: Task, model: nn.Module, batch: Columns) -> Tensor:
        """The loss of this process's part. Its mean over all processes is the mean over all targets, even if parts
        differ in their number of targets."""
        loss = task.loss(model, batch, self.config)
        if self.context is None:
            return loss
        own = task.count(batch).to(loss.dtype)
        total = own.clone()
        dist.all_reduce(total, group=self.context.group)
        return loss * (own / total * self.parts)
