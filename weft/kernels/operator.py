"""One operator for PyTorch from the Python functions that launch its kernels: forward, backward and their shapes.

Eager code runs the functions directly, inside an autograd.Function, and replays their launches (`launch.py`). Compilers
and everything else that looks at operators (torch.compile, export, fake tensors, dispatch modes, functorch) get an
opaque operator of the same functions: calling one costs more host time than most kernels take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from ..core.tiles import empty_rows, for_operator
from .launch import Tape, Taped

LIBRARY = torch.library.Library("weft", "FRAGMENT")
TAGS = torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag


class Operator:
    """`operator(*tensors, *options)` returns the first `returned` outputs of `forward`.

        forward(*tensors, *options) -> outputs          a tuple of `outputs` new tensors
        fake(*tensors, *options) -> outputs             empty ones, for compilers
        backward(*douts, *tensors, *outputs, *options)  the gradients of the arguments number `gradients`
        fake_backward(*tensors, *options)               by default, empty tensors like these arguments

    `arguments` is the schema: tensors first, then options. A tensor may be optional; if it is None, its gradient (for
    which `backward` returns any tensor) is dropped. `douts` are the gradients of the outputs number `differentiable`.
    `backward` gets None for the arguments and outputs number `unsaved`, counted together: they may change before it
    runs. Eager code may use operators that change tensors in place, see `plain_call`.
    """

    def __init__(
        self,
        name: str,
        arguments: str,
        forward: Callable[..., Sequence[Tensor]],
        fake: Callable[..., Sequence[Tensor]],
        backward: Callable[..., Sequence[Tensor]],
        *,
        outputs: int,
        returned: int = 1,
        differentiable: tuple[int, ...] = (0,),
        gradients: tuple[int, ...] = (0, 1, 2),
        fake_backward: Callable[..., Sequence[Tensor]] | None = None,
        unsaved: tuple[int, ...] = (),
    ):
        words = [word.strip() for word in arguments.split(",")]
        n = self.tensors = sum(word.startswith("Tensor") for word in words)
        self.returned, self.differentiable, self.gradients = returned, differentiable, gradients
        self.unsaved, self.backward_tensors = unsaved, len(differentiable) + n + outputs
        first = len(gradients)
        # Whether the gradients are those of the first arguments, which are always there; None for the rest.
        self.leading = gradients == (*range(first),) and not any(word.startswith("Tensor?") for word in words[:first])
        self.rest = (None,) * (n - first)
        self.run, self.fake, self.run_backward = forward, fake, backward  # for operators that contain this one
        self.forward = Taped(lambda tensors, options: forward(*tensors, *options))
        self.backward = Taped(lambda tensors, options: backward(*tensors, *options))

        given = ", ".join([f"Tensor dout{i}" for i in differentiable] + words[:n])
        saved = ", ".join([f"Tensor{'?' * (n + i in unsaved)} output{i}" for i in range(outputs)] + words[n:])
        _define(name, arguments, outputs, self._run, fake)
        first, after = len(differentiable), self.backward_tensors
        like = fake_backward or self._like
        _define(
            f"{name}_backward", f"{given}, {saved}", len(gradients), self._run_backward,
            lambda *all: like(*all[first : first + n], *all[after:]),
        )  # fmt: skip
        self.operator = getattr(torch.ops.weft, name).default
        self.backward_operator = getattr(torch.ops.weft, f"{name}_backward").default
        torch.library.register_autograd(f"weft::{name}", self._traced_backward, setup_context=self._save, lib=LIBRARY)

    def __call__(self, *arguments: Any) -> Any:
        if torch.compiler.is_compiling() or _looked_at(arguments[0]):
            found = self.operator(*arguments)
            return found[0] if self.returned == 1 else found[: self.returned]
        tensors, options = arguments[: self.tensors], arguments[self.tensors :]
        if torch.is_grad_enabled():
            for x in tensors:
                if x is not None and x.requires_grad:
                    return _apply(self, options, *tensors)
        outputs = self.forward(tensors, options)
        return outputs[0] if self.returned == 1 else tuple(outputs[: self.returned])

    def spread(self, tensors: Sequence[Tensor | None], gradients: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """One gradient for each tensor argument."""
        if self.leading:
            return *gradients, *self.rest
        found: list[Tensor | None] = [None] * self.tensors
        for i, gradient in zip(self.gradients, gradients, strict=True):
            if tensors[i] is not None:
                found[i] = gradient
        return found

    def _like(self, *arguments: Any) -> list[Tensor]:
        return [empty_rows(arguments[i]) for i in self.gradients]

    # The opaque operator.

    def _run(self, *arguments: Any) -> tuple[Tensor, ...]:
        return tuple(self.forward(arguments[: self.tensors], _hashable(arguments[self.tensors :])))

    def _run_backward(self, *arguments: Any) -> tuple[Tensor, ...]:
        count = self.backward_tensors
        return tuple(self.backward(arguments[:count], _hashable(arguments[count:])))

    def _save(self, ctx: Any, inputs: tuple, output: Sequence[Tensor]) -> None:
        ctx.save_for_backward(*inputs[: self.tensors], *output)
        ctx.options = inputs[self.tensors :]
        ctx.set_materialize_grads(False)

    def _traced_backward(self, ctx: Any, *douts: Tensor | None) -> tuple:
        saved = ctx.saved_tensors  # read once: checkpointing unpacks them only once
        given = self.wanted(douts, saved[self.tensors :])
        nothing = (None,) * len(ctx.options)
        if given is None:
            return *(None,) * self.tensors, *nothing
        gradients = self.backward_operator(*given, *saved, *ctx.options)
        return *self.spread(saved, gradients), *nothing

    def wanted(self, douts: Sequence[Tensor | None], outputs: Sequence[Tensor]) -> Sequence[Any] | None:
        """The gradients that `backward` takes; zeros for a missing one; None if all are missing."""
        if self.differentiable == (0,):
            return None if douts[0] is None else douts[:1]
        given = [douts[i] for i in self.differentiable]
        missing = sum(x is None for x in given)
        if missing == len(given):
            return None
        if missing:
            wanted = zip(self.differentiable, given, strict=True)
            given = [torch.zeros_like(outputs[i]) if x is None else x for i, x in wanted]
        return given


class InPlace:
    """`operator(*tensors, *options)` returns one new tensor and changes the tensors marked "Tensor(a!)" in the schema.
    It has no gradients. `run` returns its output as a tuple, like the functions of `Operator`; `fake` returns one
    tensor."""

    def __init__(self, name: str, arguments: str, run: Callable[..., Sequence[Tensor]], fake: Callable[..., Tensor]):
        n = self.tensors = sum(word.strip().startswith("Tensor") for word in arguments.split(","))
        self.run = Taped(lambda tensors, options: run(*tensors, *options))
        LIBRARY.define(f"{name}({arguments}) -> Tensor", tags=TAGS)
        LIBRARY.impl(name, lambda *all: self.run(all[:n], all[n:])[0], "CompositeExplicitAutograd")
        torch.library.register_fake(f"weft::{name}", fake, lib=LIBRARY)
        self.operator = getattr(torch.ops.weft, name).default

    def __call__(self, *arguments: Any) -> Tensor:
        if torch.compiler.is_compiling() or _looked_at(arguments[0]):
            return self.operator(*arguments)
        return self.run(arguments[: self.tensors], arguments[self.tensors :])[0]


class Bound:
    """An `InPlace` operator with its options and all tensors but q, k, v, the mask and the position, which come with
    every call. They must have the same shapes and dtypes in all calls, so that a replay finds its tape by strides.

    `position(i, device)` returns a tensor of 64-bit integers and the entry that holds i. None: the operator takes none.
    """

    def __init__(
        self,
        operator: InPlace,
        tensors: Sequence[Tensor | None],
        options: tuple,
        position: Callable[..., tuple[Tensor, int]] | None = None,
    ):
        self.operator, self.tensors, self.options, self.position = operator, tensors, options, position
        self.tapes: dict[Any, Tape] = {}
        self.pointers: list[int] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, i: int | Tensor) -> Tensor:
        if mask is not None:  # often a column of a larger one; a copy inside the operator could not be replayed
            mask = for_operator(mask.contiguous())
        table, entry = (None, 0) if self.position is None else self.position(i, q.device)
        if torch.compiler.is_compiling() or _looked_at(q):
            return self.operator(q, k, v, mask, *_entry(table, entry), *self.tensors, *self.options)
        pointers = [q.data_ptr(), k.data_ptr(), v.data_ptr(), 0 if mask is None else mask.data_ptr()]
        aligned = (pointers[0] | pointers[1] | pointers[2]) % 16 == 0
        key = q.stride(), k.stride(), v.stride(), mask is None, pointers[3] % 16 > 0
        tape = self.tapes.get(key) if aligned else None
        if tape is not None and tape.ready():
            if table is not None:
                pointers.append(table.data_ptr() + 8 * entry)
            return tape.play(pointers + self.pointers)[0]
        tensors = q, k, v, mask, *_entry(table, entry), *self.tensors
        out = self.operator(*tensors, *self.options)
        tape = self.operator.run.recorded(tensors, self.options) if aligned else None
        if tape is not None:
            self.pointers = [0 if x is None else x.data_ptr() for x in self.tensors]
            self.tapes[key] = tape
        return out


def _entry(table: Tensor | None, entry: int) -> tuple[Tensor, ...]:
    return () if table is None else (table if table.dim() == 0 else table[entry],)


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operator: Operator, options: tuple, *tensors: Tensor | None) -> Any:
        outputs, tape = operator.forward.run(tensors, options)
        ctx.call = operator, options, tape
        saved = *tensors, *outputs
        if operator.unsaved:
            saved = (*(None if n in operator.unsaved else x for n, x in enumerate(saved)),)
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        if operator.returned == 1:
            return outputs[0]
        returned = tuple(outputs[: operator.returned])
        ctx.mark_non_differentiable(*(x for i, x in enumerate(returned) if i not in operator.differentiable))
        return returned

    @staticmethod
    def backward(ctx: Any, *douts: Tensor | None) -> Any:
        if torch.is_grad_enabled():  # create_graph=True
            return _refuse_second(ctx, *douts)
        return _gradients(ctx, *douts)


# `_Eager.apply` without its preparations for functorch, which are not needed after `_looked_at`.
_apply = super(torch.autograd.Function, _Eager).apply


def _gradients(ctx: Any, *douts: Tensor | None) -> tuple:
    operator, options, forward = ctx.call
    saved = ctx.saved_tensors
    given = operator.wanted(douts, saved[operator.tensors :])
    if given is None:
        return (None,) * (2 + operator.tensors)
    if torch.compiler.is_compiling() or _looked_at(given[0]):
        gradients = operator.backward_operator(*given, *saved, *options)
    elif forward is None:
        gradients = operator.backward((*given, *saved), options)
    else:
        gradients = _replayed(operator.backward, forward, (*given, *saved), options)
    return None, None, *operator.spread(saved, gradients)


def _replayed(backward: Taped, forward: Tape, tensors: tuple, options: tuple) -> Sequence[Tensor]:
    """The gradients, by a tape that belongs to the tape of the forward. Shapes, dtypes and options are the same for
    both, so it is found by strides: those of the gradients, and of tensors that hooks may have saved elsewhere."""
    pointers, strides, aligned = [], [], 0
    for x in tensors:
        if x is None:
            pointers.append(0)
        else:
            pointer = x.data_ptr()
            aligned |= pointer
            pointers.append(pointer)
            strides.append(x.stride())
    key = *strides, aligned % 16
    tape = forward.backward.get(key)
    if tape is not None and tape.ready():
        return tape.play(pointers)
    gradients, tape = backward.run(tensors, options)
    if tape is not None and aligned % 16 == 0:
        forward.backward[key] = tape
    return gradients


_refuse_second = once_differentiable(_gradients)


def plain_call(x: Tensor) -> bool:
    """Whether an operator with this argument runs its functions directly, not as an opaque operator."""
    return not torch.compiler.is_compiling() and not _looked_at(x)


def _looked_at(x: Any) -> bool:
    """Whether something other than plain eager code handles this tensor: a subclass, a mode, functorch, a tracer."""
    return (
        type(x) not in (Tensor, Parameter)
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
    )


def _define(name: str, arguments: str, outputs: int, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    returns = ", ".join(["Tensor"] * outputs)
    LIBRARY.define(f"{name}({arguments}) -> ({returns})", tags=TAGS)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"weft::{name}", lambda *all: tuple(fake(*all)), lib=LIBRARY)


def _hashable(options: Sequence[Any]) -> tuple:
    return tuple(tuple(x) if isinstance(x, list) else x for x in options)
