"""Start compiled Triton kernels through the CUDA driver, with arguments that were prepared once.

Triton's launcher converts every argument of every launch: up to 60 numbers that never change when launches are
replayed. Here they lie in memory as the driver reads them. A replay writes the addresses, each once for all its
launches, and calls the driver.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

Step = tuple[Any, tuple[int, int, int], Any, list[tuple], tuple]  # compiled kernel, grid, options, places, numbers

# Types of Triton's signatures, as characters of `struct`. Other types are left to Triton's launcher.
_CHARACTERS = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I"}
_CHARACTERS |= {"u64": "Q", "fp32": "f", "f32": "f", "fp64": "d"}
_LARGEST_SHARED = 227 * 1024  # bytes; Triton's launcher sets an attribute for more


class _Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


class Launches:
    """The launches of a tape. A place (base, offset, dtype) is the address pointers[base] + offset."""

    def __init__(self, steps: Sequence[Step]):
        self.steps = [step for step in steps if 0 not in step[1]]
        self.prepared: list[tuple[int, int, int]] | None = None  # addresses of configuration, kernel and arguments
        try:
            self._prepare(self.steps)
        except (AttributeError, KeyError, OSError, ValueError, struct.error):  # not a plain launch, or no driver
            pass

    def _prepare(self, steps: Sequence[Step]) -> None:
        self.start = _driver()
        self.places = sorted({place[:2] for step in steps for place in step[3]})
        slot = {place: 8 * n for n, place in enumerate(self.places)}
        self.write = struct.Struct(f"{len(self.places)}Q").pack_into
        self.addresses = (ctypes.c_uint64 * len(self.places))()
        self.configs: list[_Config] = []
        self.memory: list[ctypes.Array[Any]] = []  # must live as long as the launches
        prepared = []
        for compiled, grid, _, places, numbers in steps:
            about, kinds = compiled.metadata, [*compiled.src.signature.values()]
            scratch = about.global_scratch_size, getattr(about, "profile_scratch_size", 0)
            special = about.num_ctas > 1, about.launch_cooperative_grid, about.launch_pdl
            if any((*scratch, *special, about.shared > _LARGEST_SHARED)):
                raise ValueError("not a plain launch")
            if len(kinds) != len(places) + len(numbers):
                raise ValueError("arguments do not match the signature")
            values = (ctypes.c_uint64 * (len(kinds) + 1))()  # the last one is 0, for Triton's own two pointers
            first, arguments = ctypes.addressof(values), []
            for n, kind in enumerate(kinds):
                if kind == "constexpr":  # compiled into the kernel
                    continue
                if n < len(places):
                    arguments.append(ctypes.addressof(self.addresses) + slot[places[n][:2]])
                else:
                    struct.pack_into(_CHARACTERS[kind], values, 8 * n, numbers[n - len(places)])
                    arguments.append(first + 8 * n)
            arguments += [first + 8 * len(kinds)] * 2
            table = (ctypes.c_void_p * len(arguments))(*arguments)
            config = _Config(*grid, 32 * about.num_warps, 1, 1, about.shared)
            self.configs.append(config)
            self.memory += values, table
            prepared.append((ctypes.addressof(config), compiled.function, ctypes.addressof(table)))
        self.stream, self.lock, self.prepared = 0, threading.Lock(), prepared

    def __call__(self, pointers: Sequence[int], stream: int) -> None:
        if self.prepared is None:
            self._through_triton(self.steps, pointers, stream)
            return
        start = self.start
        with self.lock:  # the addresses of a launch must not change before the driver has read them
            if stream != self.stream:
                for x in self.configs:
                    x.stream = stream
                self.stream = stream
            self.write(self.addresses, 0, *[pointers[base] + offset for base, offset in self.places])
            for n, (config, kernel, arguments) in enumerate(self.prepared):
                if start(config, kernel, arguments, None):
                    # Triton's launcher sets the thread's context, if that was missing, or reports the error.
                    self._through_triton(self.steps[n : n + 1], pointers, stream)

    def _through_triton(self, steps: Sequence[Step], pointers: Sequence[int], stream: int) -> None:
        for compiled, grid, _, places, numbers in steps:
            given = [pointers[base] + offset for base, offset, _ in places]
            # No hooks: nobody replays while someone counts launches.
            compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *given, *numbers)


_start: list[Callable[..., int]] = []


def _driver() -> Callable[..., int]:
    if not _start:
        function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
        function.argtypes, function.restype = [ctypes.c_void_p] * 4, ctypes.c_int
        _start.append(function)
    return _start[0]
