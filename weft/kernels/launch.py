"""Launch Triton kernels without their host cost: record the launches of a function once, then replay them.

Triton's launcher inspects every argument on every call, which takes longer than many of our kernels run. A function
that only allocates memory and launches kernels does the same for every call with the same shapes, strides, dtypes and
options. So `Taped` records it: the compiled kernels, their grids and numbers, and where each pointer comes from. A
replay allocates the outputs and one block of scratch memory, and launches. A function that does anything else, such as
copy a tensor, runs as it is.

Kernels take their pointers first. `launch` is the only way to start one.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .driver import Launches, Step

Function = Callable[[Sequence[Any], tuple], Sequence[Tensor]]  # (tensors, options) -> outputs
ALIGNMENT = 256  # bytes, of every tensor in a block of memory
RECORDED = 2  # the call with the same shapes and options that is recorded: recording costs a few calls
REMEMBERED = 1024  # tapes per function; more are forgotten all at once
NOTICE = 5.0  # seconds of compiling after which to say so
# Numbers that change from call to call. Triton would compile a kernel again for every combination of multiples of 16.
SIZES = frozenset("BH n R nodes levels cells groups entries W P S".split())

_log = logging.getLogger("weft")
_current = threading.local()
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# Allocates on the current GPU, in half the time of torch.empty_strided.
_empty = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]
_knobs: Any = None  # Triton's settings
_seen: set[int] = set()  # ids of the kernels launched so far, which are never freed
_compiling = 0.0  # seconds so far, negative once reported


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """`kernel[grid](*args, **options)`, recorded if a `Taped` function is recording."""
    options["enable_fp_fusion"] = True  # Triton 3.10 no longer does by default, and 3.9 warns about it
    recorder: _Recorder | None = getattr(_current, "recorder", None)
    if recorder is None:
        _timed(kernel, grid, args, options)
        return
    recorder.resting = True  # Triton's interpreter runs PyTorch operators
    try:
        recorder.launched(kernel, grid, args, options, _timed(kernel, grid, args, options))
    finally:
        recorder.resting = False


def _timed(kernel: Any, grid: tuple[int, ...], args: tuple, options: dict[str, Any]) -> Any:
    global _compiling
    began = time.perf_counter()
    compiled = _fitting(kernel, grid, args, options)
    took = time.perf_counter() - began
    if took > 0.5 and compiled is not None and _compiling >= 0:
        _compiling += took
        if _compiling > NOTICE:
            _log.warning(
                "compiled Triton kernels for %.0f s so far; they are cached on disk, so the next start is faster",
                _compiling,
            )
            _compiling = -1.0
    return compiled


def _fitting(kernel: Any, grid: tuple[int, ...], args: tuple, options: dict[str, Any]) -> Any:
    """Launch with fewer pipeline stages if the GPU has too little shared memory. `options` get the number that fits."""
    from triton.runtime.errors import OutOfResources

    if id(kernel) not in _seen:
        _seen.add(id(kernel))
        pointers = sum(isinstance(x, Tensor) for x in args)  # first; their alignment matters, whatever their names
        for parameter in getattr(kernel, "params", ())[pointers:]:  # none in Triton's interpreter
            parameter.do_not_specialize |= parameter.name in SIZES and not parameter.is_constexpr
    while True:
        try:
            return kernel[grid](*args, **options)
        except OutOfResources:
            stages = options.get("num_stages") or 3
            if stages == 1:
                raise
            options["num_stages"] = stages - 1
            if "STAGES" in options:
                options["STAGES"] = stages - 1


class Tape:
    """The launches of one call. `play` repeats them on other tensors of the same shapes, strides and dtypes."""

    def __init__(
        self,
        device: torch.device,
        made: list[tuple],  # shape, strides and dtype of the outputs, then of the block of scratch memory
        outputs: int,
        held: list[Tensor],  # tensors that belong to the function, such as tables
        steps: list[Step],
    ):
        self.device, self.outputs, self.held, self.steps = device, outputs, held, steps
        self.made: list[Any] = [(tuple(shape), tuple(strides), dtype) for shape, strides, dtype in made]
        with torch.inference_mode(False):  # empty ones, such as gradients of None, are the same tensors in every call
            self.made = [x if 0 not in x[0] else torch.empty(x[0], dtype=x[2], device=device) for x in self.made]
        self.held_pointers = [x.data_ptr() for x in held]
        self.launches = None if device.type == "cpu" else Launches(steps)
        self.backward: dict[Any, Tape] = {}  # of the backward of this forward, by strides (`operator.py`)

    def ready(self) -> bool:
        """Whether it can be played now: its GPU is the current one, and nobody watches."""
        index = self.device.index
        return (index is None or index == torch._C._cuda_getDevice()) and not _watched()

    def play(self, pointers: list[int]) -> list[Tensor]:
        """Return the outputs for tensors at these addresses."""
        if self.launches is None or torch.are_deterministic_algorithms_enabled():  # PyTorch fills new memory then
            empty = self._empty
        else:
            empty = _empty
        made = [empty(*x) if type(x) is tuple else x for x in self.made]
        pointers = pointers + [x.data_ptr() for x in made] + self.held_pointers
        if self.launches is None:
            self._interpret(pointers)
        else:
            self.launches(pointers, torch._C._cuda_getCurrentRawStream(self.device.index))
        return made[: self.outputs]

    def _empty(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=self.device)

    def _interpret(self, pointers: list[int]) -> None:
        for kernel, grid, options, slots, rest in self.steps:
            kernel[grid](*(_at(pointers[base] + offset, dtype) for base, offset, dtype in slots), *rest, **options)


_taped: weakref.WeakSet[Taped] = weakref.WeakSet()


class Taped:
    """`function(tensors, options) -> outputs`, recorded when it sees the same shapes and options again."""

    def __init__(self, function: Function):
        self.function = function
        self.tapes: dict[Any, Tape | int | None] = {}  # a number: of the next such call; None: cannot be recorded
        _taped.add(self)

    def __call__(self, tensors: Sequence[Tensor | None], options: tuple) -> Sequence[Tensor]:
        return self.run(tensors, options)[0]

    def run(self, tensors: Sequence[Tensor | None], options: tuple) -> tuple[Sequence[Tensor], Tape | None]:
        """The outputs, and the tape if they are a replay."""
        index = -1 if tensors[0] is None else tensors[0].get_device()
        if index >= 0 and index != torch._C._cuda_getDevice():
            with torch.cuda.device(index):
                return self.run(tensors, options)
        key, pointers = _key(tensors, options)
        tape = self.tapes.get(key, 1)
        if type(tape) is Tape and not _watched():
            return tape.play(pointers), tape
        if isinstance(tape, int):
            if len(self.tapes) >= REMEMBERED:
                self.tapes.clear()
            if tape >= RECORDED:
                outputs, self.tapes[key] = self._record(tensors, options)
                return outputs, None
            self.tapes[key] = tape + 1
        return self.function(tensors, options), None

    def recorded(self, tensors: Sequence[Tensor | None], options: tuple) -> Tape | None:
        """The tape of such a call, if there is one."""
        tape = self.tapes.get(_key(tensors, options)[0])
        return tape if type(tape) is Tape else None

    def _record(self, tensors: Sequence[Tensor | None], options: tuple) -> tuple[Sequence[Tensor], Tape | int | None]:
        given = [id(x) for x in tensors if x is not None]
        if len({*given}) < len(given):  # one tensor twice: its arguments cannot be told apart
            return self.function(tensors, options), RECORDED
        recorder = _Recorder(tensors)
        _current.recorder = recorder
        try:
            with recorder:
                outputs = self.function(tensors, options)
        finally:
            _current.recorder = None
        return outputs, recorder.tape(outputs)


def _key(tensors: Sequence[Tensor | None], options: tuple) -> tuple[tuple, list[int]]:
    """What calls with the same tape have in common, and the addresses of the tensors."""
    key: list[Any] = [options]
    pointers, aligned = [], 0
    for x in tensors:
        if x is None:
            key.append(None)
            pointers.append(0)
        else:
            key += x.shape, x.stride(), x.dtype, x.get_device()
            pointer = x.data_ptr()
            pointers.append(pointer)
            aligned |= pointer
    if aligned % 16:
        key += [pointer % 16 for pointer in pointers]
    return tuple(key), pointers


def forget() -> None:
    """Forget all tapes, after a change of something that their functions read, such as tile sizes."""
    for function in _taped:
        function.tapes.clear()


class _Recorder(TorchDispatchMode):
    """Follows every tensor to the argument or the allocation that its memory belongs to."""

    def __init__(self, tensors: Sequence[Tensor | None]):
        super().__init__()
        self.device = next(x.device for x in tensors if x is not None)
        self.given = len(tensors)
        self.origin: dict[int, tuple[str, int, int]] = {}  # id of a tensor: what it belongs to, and the offset in bytes
        self.alive: list[Tensor] = []  # ids are unique among living tensors
        self.allocated: list[Tensor] = []
        self.held: list[Tensor] = []
        self.launches: list[tuple] = []
        self.whole, self.resting = True, False
        for number, x in enumerate(tensors):
            if x is not None:
                self._follow(x, "given", number)

    def _follow(self, x: Tensor, kind: str, number: int, offset: int = 0) -> None:
        self.origin[id(x)] = kind, number, offset
        self.alive.append(x)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if self.resting:
            return out
        if func.overloadpacket.__name__ in _ALLOCATIONS:
            self._follow(out, "allocated", len(self.allocated))
            self.allocated.append(out)
        elif func.is_view and id(args[0]) in self.origin:
            kind, number, offset = self.origin[id(args[0])]
            for x in out if isinstance(out, list | tuple) else [out]:
                moved = x.data_ptr() - args[0].data_ptr() if x.numel() else 0  # an empty tensor has no address
                self._follow(x, kind, number, offset + moved)
        else:
            self.whole = False
        return out

    def launched(self, kernel: Any, grid: tuple[int, ...], args: tuple, options: dict[str, Any], compiled: Any) -> None:
        count = next((n for n, x in enumerate(args) if not isinstance(x, Tensor)), len(args))
        pointers, rest = args[:count], args[count:]
        for x in pointers:
            if id(x) not in self.origin:
                self._follow(x, "held", len(self.held))
                self.held.append(x)
        places = [(*self.origin[id(x)], x.dtype) for x in pointers]
        grid = (*grid, 1, 1)[:3]
        try:
            if compiled is None:  # Triton's interpreter
                self.launches.append((kernel, grid, options, places, rest))
            else:
                rest += tuple(options[name] for name in [*kernel.signature.parameters][len(args) :])
                self.launches.append((compiled, grid, None, places, rest))
        except (AttributeError, KeyError):  # an unknown version of Triton, or an argument left to its default
            self.whole = False
        self.whole &= not any(isinstance(x, Tensor) for x in rest) and not getattr(kernel, "pre_run_hooks", None)

    def tape(self, outputs: Sequence[Tensor]) -> Tape | None:
        """None if the launches are not all that happened. Allocations that are no outputs share a block of memory."""
        sources = [self.origin.get(id(x), ("", 0, 0)) for x in outputs]
        place = {number: (n, 0) for n, (_, number, _) in enumerate(sources)}
        if not self.whole or len(place) < len(outputs):
            return None
        for x, (kind, number, offset) in zip(outputs, sources, strict=True):
            if kind != "allocated" or offset or x.numel() != self.allocated[number].numel():
                return None
        made: list[tuple] = [(x.shape, x.stride(), x.dtype) for x in outputs]
        size = 0
        for number, x in enumerate(self.allocated):
            if number not in place:
                place[number] = len(outputs), size
                size += -(-x.nbytes // ALIGNMENT) * ALIGNMENT
        if size:
            made.append(((size,), (1,), torch.uint8))

        def slot(kind: str, number: int, offset: int, dtype: torch.dtype) -> tuple[int, int, torch.dtype]:
            if kind == "allocated":
                n, start = place[number]
                return self.given + n, start + offset, dtype
            return number if kind == "given" else self.given + len(made) + number, offset, dtype

        steps: list[Step] = [(*launch[:3], [slot(*x) for x in launch[3]], launch[4]) for launch in self.launches]
        return Tape(self.device, made, len(outputs), self.held, steps)


def _at(pointer: int, dtype: torch.dtype) -> Tensor:
    """A tensor at this address, for Triton's interpreter, which takes tensors and reads from their addresses on."""
    if pointer == 0:  # of an empty tensor
        return torch.empty(0, dtype=dtype)
    # Of 16 bytes: the interpreter takes tensors at the same address as views of the first one.
    return torch.frombuffer((ctypes.c_char * 16).from_address(pointer), dtype=dtype, count=1)


def _watched() -> bool:
    """Whether someone counts Triton's launches, as profilers do. Replays would hide from them."""
    global _knobs
    if _knobs is None:
        from triton import knobs

        _knobs = knobs.runtime
    hook = _knobs.launch_enter_hook
    return bool(getattr(hook, "calls", hook))
