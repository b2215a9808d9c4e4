"""Compare a compiled model with the same model in eager mode: torch 2.11 has miscompiled models without an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..layers import MultiheadAttention
from ..layers.encoder import EncoderBlock
from ..tasks.base import Task
from ..tasks.config import TrainConfig
from .data import Rows, seed_everything, seed_of

TOLERANCE = 0.1  # relative difference of compiled losses: well above rounding, well below compiler bugs
ROUNDINGS = 3  # tolerate up to 3x autocast's own rounding error
WAY_OUT = "Continue with --resume --no-compile."


class Miscompiled(Exception):
    """Compilation failed, or compiled results differ from eager mode; the run can continue without compilation."""


# Inductor of torch 2.11 pads the strides of large tensors, and then computes wrong results: `performer` with 48 heads,
# 2,001 tokens and a batch of 32 had a relative error of 1.2.
OPTIONS: Any = {"comprehensive_padding": False}


MANY = 6  # blocks: below, compiling the whole model is fast enough


def compile_model(model: nn.Module, packed: bool = False) -> Any:
    """torch.compile of the whole model, or of its blocks: many equal blocks share one graph, which takes a tenth of the
    time. If blocks differ or are packed, of their parts around attention."""
    blocks = [module for module in model.modules() if isinstance(module, EncoderBlock)]
    if not blocks or not packed and len(blocks) < MANY:
        return torch.compile(model, options=OPTIONS)
    equal = len({repr(block) for block in blocks}) == 1
    for block in blocks:
        if equal and not packed:
            block.forward = Part(block.forward)  # type: ignore[method-assign]
            continue
        block.finish = Part(block.finish, packed)  # type: ignore[method-assign]
        for layer in block.attention.modules():
            if isinstance(layer, MultiheadAttention):
                layer.project = Part(layer.project, packed)  # type: ignore[method-assign]
    return model


class Part:
    """A method that runs compiled where gradients are computed. All blocks share its graphs.

    The number of packed tokens and the tables of their attention differ in every batch. A compiled model would break at
    each attention and compile every function around it, first for one number of tokens and then for any."""

    def __init__(self, function: Callable[..., Any], packed: bool = False):
        self.function, self.compiled, self.packed = function, torch.compile(function, options=OPTIONS), packed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        # The last block computes only one token of each document: (documents, dim), or with another context.
        if not torch.is_grad_enabled() or tensors[0].dim() < 3 or len({x.shape[1] for x in tensors}) > 1:
            return self.function(*args, **kwargs)
        for x in tensors if self.packed else ():
            torch._dynamo.maybe_mark_dynamic(x, 1)
        return self.compiled(*args, **kwargs)


def has_parts(model: nn.Module) -> bool:
    return any(
        isinstance(module.__dict__.get(name), Part) for module in model.modules() for name in ("forward", "finish")
    )


def check_compiled(
    fabric: Any, compiled: nn.Module, eager: nn.Module, task: Task, rows: Rows, config: TrainConfig
) -> str:
    """Raise Miscompiled if the losses differ by more than rounding explains. Returns a warning, or an empty string."""
    off = disagreement(fabric, compiled, eager, task, rows, config)
    if off <= TOLERANCE:
        return ""
    own = rounding(fabric, eager, task, rows, config)
    if off <= ROUNDINGS * own:  # false if the compiled losses are NaN
        return (
            f"{config.precision} changes this model's losses by {own:.0%}, compilation by {off:.0%}: rounding is as "
            "large as what the model has learned. Consider --precision 32-true."
        )
    raise Miscompiled(
        f"the compiled model's losses differ by {off:.0%} from eager mode (rounding: {own:.0%}): torch "
        f"{torch.__version__} compiles this model wrongly. The run was saved. {WAY_OUT}"
    )


def compiler_error(error: Exception) -> str:
    """The message for an error of the compiler; an empty string for any other error."""
    from torch._dynamo.exc import BackendCompilerFailed  # slow to import, but torch.compile has imported it already

    if not isinstance(error, BackendCompilerFailed):
        return ""
    cause = getattr(error, "inner_exception", error)
    reason = f"{type(cause).__name__}: {cause}".splitlines()[0]
    return f"torch {torch.__version__} cannot compile this model ({reason}). {WAY_OUT}"


def disagreement(
    fabric: Any, compiled: nn.Module, eager: nn.Module, task: Task, rows: Rows, config: TrainConfig
) -> float:
    """Relative difference between the compiled and eager losses of the first rows."""
    with fabric.autocast():
        with torch.set_grad_enabled(has_parts(eager)):
            found = first_losses(compiled, task, rows, config)
        with torch.no_grad():
            expected = first_losses(eager, task, rows, config)
    return distance(found, expected)


@torch.no_grad()
def rounding(fabric: Any, eager: nn.Module, task: Task, rows: Rows, config: TrainConfig) -> float:
    """Relative difference between the losses of the first rows with and without autocast."""
    expected = first_losses(eager, task, rows, config)
    with fabric.autocast():
        return distance(first_losses(eager, task, rows, config), expected)


def first_losses(model: nn.Module, task: Task, rows: Rows, config: TrainConfig) -> Tensor:
    numbers = np.arange(config.batch_size).clip(max=len(rows) - 1)
    index = torch.from_numpy(numbers).to(rows.device)
    model.eval()
    seed_everything("evaluate", config.seed)
    generator = torch.Generator(device=rows.device).manual_seed(seed_of("evaluate", config.seed, 0))
    batch = rows.pack(task.batch(rows.take(index), config, generator, training=False), numbers)
    with task.evaluating(model):
        return task.score(model, batch)["loss"].detach().double()


def distance(found: Tensor, expected: Tensor) -> float:
    """Relative difference. Losses are clamped at 0.1 so that near-zero losses don't dominate. 0 if the expected
    losses are not finite."""
    if not expected.isfinite().all():
        return 0.0
    return float((found - expected).norm() / expected.clamp(min=0.1).norm())
