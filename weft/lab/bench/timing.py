"""Measurements for `weft bench`: alternating calls, their medians and their memory.

    round r:   a, b, c        round r + 1:   c, b, a        …

Variants are measured in the same rounds, so that ratios are reliable on a shared machine. On a GPU, every call is
synchronised before its timer starts and before it stops.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ...attention import attention_info, attentions
from ..compiled import compile_model

PRECISIONS = ("32-true", "tf32", "bf16-mixed", "bf16-true")
WARMUP = {"cpu": 1, "cuda": 2}  # warm-up calls
Call = Callable[[], Any]


@dataclass(frozen=True)
class How:
    """How to measure: device, precision, number of rounds."""

    device: str = "cpu"
    precision: str = "32-true"
    repeats: int = 10  # rounds; fewer if they take longer than `budget`
    budget: float = 8.0  # seconds for the rounds of one comparison; there is always at least one round
    compile: bool = False
    cpu_time: bool = False  # CPU seconds of all threads, for shared machines
    memory: bool = True

    def __post_init__(self) -> None:
        if self.device not in WARMUP:
            raise ValueError(f"device must be {' or '.join(WARMUP)}, got {self.device!r}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("no CUDA device is available: use --device cpu")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}")
        if self.precision == "tf32" and self.device != "cuda":
            raise ValueError("tf32 needs a GPU: use --precision 32-true on the CPU")
        if self.cpu_time and self.device != "cpu":
            raise ValueError("--cpu-time does not measure GPU work: remove it, or use --device cpu")
        if self.repeats < 1 or self.budget <= 0:
            raise ValueError(f"repeats must be at least 1 and the budget positive, got {self.repeats}, {self.budget}")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and inputs; with mixed precision, both are float32."""
        return torch.bfloat16 if self.precision == "bf16-true" else torch.float32

    def place(self, model: nn.Module) -> Any:
        """The model on its device, compiled if requested."""
        model = model.to(device=self.device, dtype=self.dtype)
        return compile_model(model) if self.compile else model

    @contextmanager
    def arithmetic(self) -> Iterator[None]:
        """Set autocast and TF32 according to `precision`."""
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if self.precision == "tf32" else "highest")
        try:
            with torch.autocast(self.device, torch.bfloat16, enabled=self.precision == "bf16-mixed"):
                yield
        finally:
            torch.set_float32_matmul_precision(before)

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


@dataclass
class Timing:
    """The time of one call, round by round."""

    seconds: list[float] = field(default_factory=list)
    memory: int | None = None  # peak bytes that the call adds
    error: str = ""  # why the measurement failed

    @property
    def median(self) -> float:
        return statistics.median(self.seconds) if self.seconds else float("nan")

    def record(self) -> dict[str, Any]:
        """For the JSON file."""
        if self.error:
            return {"error": self.error}
        milliseconds = [1e3 * s for s in self.seconds]
        found = {"ms": self.median * 1e3, "fastest_ms": min(milliseconds), "rounds": len(milliseconds)}
        return {**found, "peak_mib": self.memory / 2**20} if self.memory is not None else found


def take_turns(calls: Mapping[str, Call], how: How) -> dict[str, Timing]:
    """Warm up every call, measure its memory, then alternate until the rounds or the budget are used up.

    A call that fails is excluded from the rounds; its Timing has the error.
    """
    found = {name: Timing() for name in calls}
    clock = time.process_time if how.cpu_time else time.perf_counter

    def attempt(name: str, work: Call) -> None:
        if found[name].error:
            return
        try:
            work()
        except Exception as error:  # show failures in the table, and continue
            found[name].error = reason(error)
            if how.device == "cuda":
                torch.cuda.empty_cache()

    def prepare(name: str) -> None:
        for _ in range(WARMUP[how.device]):
            with how.arithmetic():
                calls[name]()
        how.wait()
        if how.memory:
            with how.arithmetic():
                found[name].memory = peak_memory(calls[name], how.device)

    def once(name: str) -> None:
        how.wait()
        with how.arithmetic():  # for each call, as in training: autocast keeps the weights that it casts until its end
            start = clock()
            calls[name]()
            how.wait()
            found[name].seconds.append(clock() - start)

    for name in calls:
        attempt(name, partial(prepare, name))
    begin = time.perf_counter()
    for number in range(how.repeats):
        for name in list(calls) if number % 2 == 0 else list(calls)[::-1]:
            attempt(name, partial(once, name))
        if time.perf_counter() - begin > how.budget:
            break
    return found


def reason(error: BaseException) -> str:
    """An error in a few words."""
    text = str(error).splitlines()[0] if str(error) else ""
    of_libraries = ("allocate memory", "out of memory", "ALLOC_FAILED")  # the system, Triton, cuBLAS
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(words in text for words in of_libraries):
        return "out of memory"
    return f"{type(error).__name__}: {text}"[:160]


def peak_memory(call: Call, device: str) -> int:
    """Peak bytes of the tensors that `call` creates, as counted by PyTorch."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    from torch.profiler import ProfilerActivity, profile

    with _silence(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    assert recorded.profiler is not None and recorded.profiler.kineto_results is not None
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


@contextmanager
def _silence() -> Iterator[None]:
    """Hide the profiler's output, which goes directly to the process's stderr."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def forget(how: How) -> None:
    """Free the memory of the last comparison, including models in reference cycles."""
    gc.collect()
    if how.device == "cuda":
        torch.cuda.empty_cache()
    if how.compile:
        torch.compiler.reset()


def ratio(above: float | None, below: float | None) -> float | None:
    """above / below, or None if either is missing."""
    return above / below if above and below and above == above and below == below else None


def names_of(chosen: str, default: Sequence[str], causal: bool = False) -> list[str]:
    """Comma-separated mechanisms; `all` for all that support this direction, empty for the default."""
    if chosen == "all":
        infos = [attention_info(name) for name in attentions()]
        return [info.name for info in infos if (info.causal if causal else info.bidirectional)]
    names = [name.strip() for name in chosen.split(",") if name.strip()] or list(default)
    for name in names:
        if name != "mixed":
            attention_info(name)  # raises an error with suggestions for unknown names
    return names
