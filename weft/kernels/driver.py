"""Start compiled Triton kernels through the CUDA driver, with arguments that were prepared once.

Triton's launcher converts every argument of every launch: up to 60 numbers that never change when launches are
replayed. Here they lie in memory as the driver reads them. A replay writes the addresses, each once for all its
launches, and calls the driver: in a C function, which is compiled once like Triton's launchers, or in a loop here.
Many launches are one CUDA graph, whose nodes get new arguments if an address has changed: the driver queues it in the
time of a few launches.
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
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

Step = tuple[Any, tuple[int, int, int], Any, list[tuple], tuple]  # compiled kernel, grid, options, places, numbers

# Types of Triton's signatures, as characters of `struct`. Other types are left to Triton's launcher.
_CHARACTERS = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I"}
_CHARACTERS |= {"u64": "Q", "fp32": "f", "f32": "f", "fp64": "d"}
_LARGEST_SHARED = 227 * 1024  # bytes; Triton's launcher sets an attribute for more
GRAPH_FROM = 4  # launches, from which on they are a graph
GRAPHED = 4  # the replay that makes the graph, which costs as much as several replays
# `play` starts the launches from number `first` on. It returns the number of the first one that failed, or `count`.
# `play_graph` returns 0, or an error.
_SOURCE = """
#include <stdint.h>
typedef int (*Start)(const void *, void *, void **, void **);
typedef int (*Change)(void *, void *, const void *);
typedef int (*Run)(void *, void *);
typedef struct {
    Start start;
    void **launches;           /* configuration, kernel and arguments of each */
    uint64_t count;
    const uint64_t *pointers;
    const uint64_t *places;    /* of each address: number of a pointer, offset */
    uint64_t slots;
    uint64_t *addresses;
    uint64_t changed;          /* whether the graph's nodes have other addresses */
} Tape;
typedef struct {
    Change change;
    Run run;
    void *graph;
    void **nodes;
    const char *arguments;     /* of each node */
    uint64_t size;
} Graph;
static void place(Tape *tape) {
    for (uint64_t n = 0; n < tape->slots; n++) {
        uint64_t address = tape->pointers[tape->places[2 * n]] + tape->places[2 * n + 1];
        tape->changed |= address ^ tape->addresses[n];
        tape->addresses[n] = address;
    }
}
int play(Tape *tape, int first) {
    place(tape);
    for (uint64_t n = first; n < tape->count; n++) {
        void **launch = tape->launches + 3 * n;
        if (tape->start(launch[0], launch[1], (void **)launch[2], 0)) return (int)n;
    }
    return (int)tape->count;
}
int play_graph(Tape *tape, const Graph *graph, void *stream) {
    place(tape);
    if (tape->changed)
        for (uint64_t n = 0; n < tape->count; n++) {
            int error = graph->change(graph->graph, graph->nodes[n], graph->arguments + n * graph->size);
            if (error) return error;
        }
    tape->changed = 0;
    return graph->run(graph->graph, stream);
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


class _Node(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2 of cuda.h."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        *((name, ctypes.c_void_p) for name in ("arguments", "extra", "kernel", "context")),
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
        self.replays, self.graph = 0, 0  # the graph: address of its description, or 0
        self.player, self.graph_player = _players()
        if self.player is not None:
            self._prepare_player(prepared)

    def _prepare_player(self, prepared: list[tuple[int, int, int]]) -> None:
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
        tape = (ctypes.c_uint64 * 8)(*values, 1)
        self.memory += launches, places, tape
        self.tape = at(tape)

    def _prepare_graph(self, prepared: list[tuple[int, int, int]]) -> None:
        """One node for each launch, in order."""
        nodes, described = (ctypes.c_uint64 * len(prepared))(), (_Node * len(prepared))()
        for n, ((_, function, arguments), c) in enumerate(zip(prepared, self.configs, strict=True)):
            described[n] = _Node(function, c.grid_x, c.grid_y, c.grid_z, c.block_x, 1, 1, c.shared, arguments)
        try:
            graph, change, run, forget = _make_graph(described, nodes)
        except (AttributeError, OSError, RuntimeError):  # replays stay single launches
            return
        weakref.finalize(self, forget).atexit = False
        values = change, run, graph, ctypes.addressof(nodes), ctypes.addressof(described), ctypes.sizeof(_Node)
        table = (ctypes.c_uint64 * 6)(*values)
        self.memory += nodes, described, table
        self.graph = ctypes.addressof(table)

    def __call__(self, pointers: Sequence[int], stream: int) -> None:
        if self.prepared is None:
            self._through_triton(self.steps, pointers, stream)
            return
        start = self.start
        with self.lock:  # the addresses of a launch must not change before the driver has read them
            # While a graph is captured, no other can start.
            if len(self.prepared) >= GRAPH_FROM and self.player is not None and not _capturing():
                self.replays += 1
                if self.replays == GRAPHED:
                    self._prepare_graph(self.prepared)
                if self.graph:
                    self.pack(self.given, 0, *pointers[: self.most])
                    if not self.graph_player(self.tape, self.graph, stream):
                        return
                    self.graph = 0
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
_capturing = torch.cuda.is_current_stream_capturing


def _driver() -> Callable[..., int]:
    if not _start:
        function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
        function.argtypes, function.restype = [ctypes.c_void_p] * 4, ctypes.c_int
        _start.append(function)
    return _start[0]


def _make_graph(described: Any, nodes: Any) -> tuple[int, int, int, Callable[[], Any]]:
    """A graph of kernels in a row, the addresses of the functions that change its nodes and start it, and a function
    that frees it."""
    cuda = ctypes.CDLL("libcuda.so.1")
    graph, ready, node = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    error = cuda.cuGraphCreate(ctypes.byref(graph), 0)
    for n, x in enumerate(described):
        before = (ctypes.c_void_p * 1)(node.value)
        given = before, ctypes.c_size_t(n > 0), ctypes.byref(x)
        error = error or cuda.cuGraphAddKernelNode_v2(ctypes.byref(node), graph, *given)
        nodes[n] = node.value or 0
    error = error or cuda.cuGraphInstantiateWithFlags(ctypes.byref(ready), graph, ctypes.c_ulonglong(0))
    if error:
        raise RuntimeError(f"CUDA error {error}")
    functions = cuda.cuGraphExecKernelNodeSetParams_v2, cuda.cuGraphLaunch
    change, run = (ctypes.cast(x, ctypes.c_void_p).value or 0 for x in functions)
    return ready.value or 0, change, run, lambda: (cuda.cuGraphExecDestroy(ready), cuda.cuGraphDestroy(graph))


@functools.cache
def _players() -> tuple[Callable[[int, int], int] | None, Any]:
    """The functions of `_SOURCE`, in Triton's cache on disk; None if they cannot be compiled."""
    try:
        from triton.runtime.cache import get_cache_manager

        name = "weft_play.so"
        cache = get_cache_manager(hashlib.sha256(f"{_SOURCE} {platform.machine()}".encode()).hexdigest())
        path = cache.get_file(name)
        if path is None:
            compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
            if compiler is None:
                return None, None
            with tempfile.TemporaryDirectory() as folder:
                source, built = Path(folder, "play.c"), Path(folder, name)
                source.write_text(_SOURCE)
                command = [compiler, "-O2", "-shared", "-fPIC", str(source), "-o", str(built)]
                subprocess.run(command, check=True, capture_output=True, timeout=60)
                path = cache.put(built.read_bytes(), name, binary=True)
        library = ctypes.CDLL(path)
        library.play.argtypes, library.play_graph.argtypes = [ctypes.c_void_p, ctypes.c_int], [ctypes.c_void_p] * 3
        return library.play, library.play_graph
    except Exception:  # the loop in Python does the same
        return None, None
