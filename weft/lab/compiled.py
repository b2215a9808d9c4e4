"""Compare a compiled model with the same model in eager mode: torch 2.11 has miscompiled models without an error."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..core.contract import quiet_padding
from ..core.precision import autocast
from ..core.segments import Segments
from ..layers import MultiheadAttention
from ..layers.dropout import HashedDropout
from ..layers.encoder import EncoderBlock
from ..models.encoder import TextEncoder
from ..tasks.base import Task
from ..tasks.config import TrainConfig
from .data import Rows, seed_everything, seed_of

TOLERANCE = 0.1  # relative difference of compiled losses: well above rounding, well below compiler bugs
GRADIENTS = 0.5  # the same of a parameter's gradient
SMALL = 1e-3  # part of the whole gradient's norm: what is below, such as the gradient of a key's bias, may be rounding
ROUNDINGS = 3  # tolerate up to 3x autocast's own rounding error
WAY_OUT = "Continue with --resume --no-compile."


class Miscompiled(Exception):
    """Compilation failed, or compiled results differ from eager mode; the run can continue without compilation."""


# Inductor's defaults that compute wrong results without an error, and what replaces them:
# - torch 2.11 pads the strides of large tensors: `performer` with 48 heads, 2,001 tokens and a batch of 32 had a
#   relative error of 1.2.
# - torch 2.10 to 2.13 sum over rows and columns in one kernel in the backward of a norm, with bugs (pytorch issues
#   190796, 193061; in 178080 a wrong shape). It is not fast either: 240 us for 33,000 packed tokens of 512 on an H200,
#   where memory needs 100.
SAFE = {"comprehensive_padding": False, "triton.mix_order_reduction": False}


@functools.cache
def compile_options() -> dict[str, Any]:
    """`SAFE`, as far as this torch has it."""
    known = torch._inductor.list_options()
    return {name: value for name, value in SAFE.items() if name in known}


MANY = 6  # blocks: below, compiling the whole model is fast enough


def compile_model(model: nn.Module, packed: bool = False, whole_blocks: bool = False) -> Any:
    """torch.compile of the whole model, or of its blocks: equal blocks share one graph, which compiles several times
    faster. With packed documents, of what an encoder computes between two attentions; if blocks differ, or if something
    is attached to their forward (`whole_blocks`: FSDP, activation checkpointing), of their parts around attention."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Dropout:
                setattr(module, name, HashedDropout(child.p).train(child.training))
    blocks: list[Any] = [module for module in model.modules() if isinstance(module, EncoderBlock)]
    if not blocks or not packed and len(blocks) < MANY:
        return torch.compile(model, options=compile_options())
    equal = len({repr(block) for block in blocks}) == 1
    if packed and not whole_blocks and all(type(block.attention) is MultiheadAttention for block in blocks):
        for encoder in model.modules():
            if isinstance(encoder, TextEncoder):
                encoder._through = Blocks(encoder)  # type: ignore[method-assign]
        return model
    for block in blocks:
        if equal and not packed:
            block.forward = Part(block.forward)
            continue
        block.finish = Part(block.finish, packed)
        for layer in block.attention.modules():
            if isinstance(layer, MultiheadAttention):
                layer.project = Part(layer.project, packed)  # type: ignore[method-assign]
    return model


class Part:
    """A function that runs compiled where gradients are computed. All blocks share its graphs.

    The number of packed tokens and the tables of their attention differ in every batch. A compiled model would break at
    each attention and compile every function around it, first for one number of tokens and then for any."""

    off = False  # for all parts, in `eager_parts`

    def __init__(self, function: Callable[..., Any], packed: bool = False):
        self.function, self.packed = function, packed
        self.compiled = torch.compile(function, options=compile_options())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        places = [2 if x.dim() == 4 else 1 for x in tensors]  # of the tokens: heads are (B, H, L, D)
        # The last block computes only one token of each document: (documents, dim), or with another context.
        lengths = {x.shape[place] if x.dim() > 1 else 0 for x, place in zip(tensors, places, strict=True)}
        if Part.off or not torch.is_grad_enabled() or tensors[0].dim() < 3 or len(lengths) > 1:
            return self.function(*args, **kwargs)
        for x, place in zip(tensors, places, strict=True):
            if self.packed:
                torch._dynamo.maybe_mark_dynamic(x, place)
        return self.compiled(*args, **kwargs)


class Blocks:
    """The blocks of an encoder with packed documents. What is computed between two attentions is one graph: the end of
    a block and the start of the next."""

    def __init__(self, encoder: TextEncoder):
        self.encoder, self.eager = encoder, encoder._through
        # Dynamo limits the graphs of a code object, so no two models or places in a model share one.
        self.start, self.between, self.end = (
            Part(FunctionType(between.__code__.replace(), between.__globals__), packed=True) for _ in range(3)
        )

    def __call__(
        self, x: Tensor, at: Any, mask: Tensor | None, documents: Segments | None, first: bool = False
    ) -> Tensor:
        if Part.off or documents is None or not len(documents) or not torch.is_grad_enabled():
            return self.eager(x, at, mask, documents, first)
        real, heads, before = documents.real(mask), None, self.encoder
        blocks: Any = list(self.encoder.blocks)
        for block in blocks:
            alone = first and block is blocks[-1]
            part = self.start if heads is None else self.end if alone else self.between
            x, *inputs = part(x, heads, real, at, before, block, alone)
            if alone:
                return block.first(x, inputs[0], mask, documents=documents)
            q, k, v, *more = (z.transpose(1, 2) if z.dim() == 4 else z for z in inputs)
            options = {"x": more[0]} if more else {}
            heads, before = block.attention.attention(q, k, v, mask, None, documents, **options), block
        return self.end(x, heads, real, at, before, None, False)[0]


def between(
    x: Tensor,
    heads: Tensor | None,
    real: Tensor | None,
    at: Tensor,
    before: Any,
    block: Any,
    alone: bool,
) -> tuple[Tensor, ...]:
    """From the embeddings, or the attention of the block `before`, to that of `block`: the input x of `block`, then the
    inputs of its attention. They are not projected if only the first tokens are read, `alone`."""
    if heads is None:
        x = before._placed(x, at)
    else:
        x = before.finish(x, before.attention.merge(heads))
    if block is None:
        return (x,)
    x = quiet_padding(x, real)
    y = quiet_padding(block.attention_norm(x), real)
    if alone:
        return x, *autocast(y)
    layer = block.attention
    qkv = layer.project(y, positions=None if layer.rope is None else at)
    # By token: for any number of tokens, AOTAutograd wants contiguous gradients, and would copy those of heads.
    return x, *(z.transpose(1, 2) for z in qkv), *layer.input(y).values()


def has_parts(model: nn.Module) -> bool:
    names = ("forward", "finish", "_through")
    return any(isinstance(module.__dict__.get(name), Part | Blocks) for module in model.modules() for name in names)


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
        f"{torch.__version__} miscompiles this model. The run was saved. {WAY_OUT}"
    )


@contextmanager
def eager_parts() -> Iterator[None]:
    Part.off = True
    try:
        yield
    finally:
        Part.off = False


def check_gradients(
    fabric: Any, compiled: nn.Module, eager: nn.Module, loss: Callable[[nn.Module], Tensor], seed: int
) -> str:
    """Raise Miscompiled if gradients in training mode differ by more than rounding explains. Returns why they were not
    compared, or an empty string. The model's state is restored."""
    parameters = dict(eager.named_parameters(remove_duplicate=False))
    before = {name: x.clone() for name, x in eager.state_dict().items() if name not in parameters}

    def restore() -> None:
        eager.zero_grad()
        eager.load_state_dict(before, strict=False)

    def gradients(model: nn.Module, how: Any) -> dict[str, Tensor]:
        restore()
        seed_everything("gradients", seed)
        with how():
            value = loss(model)
        fabric.backward(value)
        return {name: p.grad for name, p in parameters.items() if p.grad is not None}

    @torch.no_grad()
    def value(seed: int) -> float:
        restore()
        seed_everything("gradients", seed)
        with fabric.autocast():
            return float(loss(eager))

    try:
        with eager_parts():
            if value(seed) != value(seed + 1):
                return "dropout is random"  # and differs in compiled code
            expected = gradients(eager, fabric.autocast)
        off = _differences(gradients(compiled, nullcontext), expected)
        if off is None:
            return "those of eager mode are not finite"
        if all(x <= GRADIENTS for x in off.values()):
            return ""
        with eager_parts(), in_float32(eager):
            own = _differences(gradients(eager, nullcontext), expected) or {}
    except torch.OutOfMemoryError:
        return "eager mode needs too much memory"
    finally:
        restore()
        if fabric.device.type == "cuda":
            torch.cuda.empty_cache()  # eager mode needs more memory
    wrong = [name for name in off if not off[name] <= max(GRADIENTS, ROUNDINGS * own.get(name, 0.0))]  # NaN is wrong
    worst = max(wrong or off, key=lambda name: math.inf if math.isnan(off[name]) else off[name])
    if not wrong:
        return f"{worst} is mostly rounding"
    raise Miscompiled(
        f"the compiled model's gradient of {worst} differs by {off[worst]:.0%} from eager mode (rounding: "
        f"{own.get(worst, 0.0):.0%}): torch {torch.__version__} miscompiles this model. {WAY_OUT}"
    )


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Compute with weights of 16 bits in float32: without autocast, eager mode would round as before."""
    kept = [(x, x.data) for x in (*model.parameters(), *model.buffers()) if x.dtype in (torch.bfloat16, torch.float16)]
    try:
        for x, data in kept:
            x.data = data.float()
        yield
    finally:
        model.zero_grad()  # a gradient has the dtype of its parameter
        for x, data in kept:
            x.data = data


def _differences(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float] | None:
    """The relative difference of each parameter's gradient; a missing one is zero. None if `expected` is not finite."""
    names = list({**expected, **found})
    norms = []
    for name in names:
        zero = torch.zeros_like(expected[name] if name in expected else found[name])
        g, e = (gradients.get(name, zero).float() for gradients in (found, expected))
        norms.append(torch.stack([(g - e).norm(), e.norm()]).double())
    off, size = torch.stack(norms).T.tolist()  # waits for the device once
    total = math.hypot(*size)
    if not math.isfinite(total):
        return None
    return {name: x / max(n, SMALL * total, 1e-30) for name, x, n in zip(names, off, size, strict=True)}


def compiler_error(error: Exception) -> str:
    """The message for an error of the compiler; an empty string for any other error."""
    from torch._dynamo.exc import BackendCompilerFailed  # slow to import, but torch.compile has imported it already

    # Inductor of torch 2.11 may give a gradient the wrong shape, which autograd then refuses.
    invalid = isinstance(error, RuntimeError) and "CompiledFunctionBackward returned an invalid gradient" in str(error)
    if not invalid and not isinstance(error, BackendCompilerFailed):
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
