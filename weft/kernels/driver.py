"""Start compiled Triton kernels through the CUDA driver, with arguments that were prepared once.

Triton's launcher converts every argument of every launch: up to 60 numbers that never change when launches are
replayed. Here they lie in memory as the driver reads them. A replay writes the addresses, each once for all its
launches, and calls the driver: in a C function, which is compiled once like Triton's launchers, or in a loop here.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Step = tuple[Any, tuple[int, int, int], Any, list[tuple], tuple]  # compiled kernel, grid, options, places, numbers

# Types of Triton's signatures, as characters of `struct`. Other types are left to Triton's launcher.
_CHARACTERS = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I"}
_CHARACTERS |= {"u64": "Q", "fp32": "f", "f32": "f", "fp64": "d"}
_LARGEST_SHARED = 227 * 1024  # bytes; Triton's launcher sets an attribute for more
# Starts the launches from number `first` on. Returns the number of the first one that failed, or `count`.
_SOURCE = """
#include <stdint.h>
typedef int (*Start)(const void *, void *, void **, void **);
typedef struct {
    Start start;
    void **launches;           /* configuration, kernel and arguments of each */
    uint64_t count;
    const uint64_t *pointers;
    const uint64_t *places;    /* of each address: number of a pointer, offset */
    uint64_t slots;
    uint64_t *addresses;
} Tape;
int play(const Tape *tape, int first) {
    for (uint64_t n = 0; n < tape->slots; n++)
        tape->addresses[n] = tape->pointers[tape->places[2 * n]] + tape->places[2 * n + 1];
    for (uint64_t n = first; n < tape->count; n++) {
        void **launch = tape->launches + 3 * n;
        if (tape->start(launch[0], launch[1], (void **)launch[2], 0)) return (int)n;
    }
    return (int)tape->count;
}
"""


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
        self.player = _player()
        if self.player is not None:
            self._prepare_player(self.player, prepared)

    def _prepare_player(self, player: Callable[[int, int], int], prepared: list[tuple[int, int, int]]) -> None:
        try:
            start = ctypes.cast(self.start, ctypes.c_void_p).value or 0  # type: ignore[arg-type]
        except (TypeError, ctypes.ArgumentError):  # not a C function
            self.player = None
            return
        self.most = max((base for base, _ in self.places), default=-1) + 1  # pointers in use
        self.given, self.pack = (ctypes.c_uint64 * self.most)(), struct.Struct(f"{self.most}Q").pack_into
        launches = (ctypes.c_uint64 * (3 * len(prepared)))(*(x for row in prepared for x in row))
        places = (ctypes.c_uint64 * (2 * len(self.places)))(*(x for place in self.places for x in place))
        at = ctypes.addressof
        values = start, at(launches), len(prepared), at(self.given), at(places), len(self.places), at(self.addresses)
        tape = (ctypes.c_uint64 * 7)(*values)
        self.memory += launches, places, tape
        self.tape = at(tape)

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
            if self.player is not None:
                self.pack(self.given, 0, *pointers[: self.most])
                n, count = self.player(self.tape, 0), len(self.prepared)
                while n < count:
                    self._through_triton(self.steps[n : n + 1], pointers, stream)
                    n = self.player(self.tape, n + 1)
                return
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


@functools.cache
def _player() -> Callable[[int, int], int] | None:
    """The function of `_SOURCE`, in Triton's cache on disk; None if it cannot be compiled."""
    try:
        from triton.runtime.cache import get_cache_manager

        name = "weft_play.so"
        cache = get_cache_manager(hashlib.sha256(f"{_SOURCE} {platform.machine()}".encode()).hexdigest())
        path = cache.get_file(name)
        if path is None:
            compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
            if compiler is None:
                return None
            with tempfile.TemporaryDirectory() as folder:
                source, built = Path(folder, "play.c"), Path(folder, name)
                source.write_text(_SOURCE)
                command = [compiler, "-O2", "-shared", "-fPIC", str(source), "-o", str(built)]
                subprocess.run(command, check=True, capture_output=True, timeout=60)
                path = cache.put(built.read_bytes(), name, binary=True)
        function = ctypes.CDLL(path).play
    except Exception:  # the loop in Python does the same
        return None
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int], ctypes.c_int
    return function
