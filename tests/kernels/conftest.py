"""On a CPU, every test of the kernels also checks that they read and write only inside the tensors of their launch."""

import numpy as np
import pytest
from promises import DEVICE


class Guarded:
    """The memory accesses of Triton's interpreter, noting kernels that leave the memory of their tensors."""

    def __init__(self, memory):
        self.memory, self.kernel, self.ranges, self.outside = memory, "", [], set()

    def __getattr__(self, name):
        return getattr(self.memory, name)

    def load(self, pointers, mask, other, dtype):
        self.check(pointers, mask, np.dtype(dtype).itemsize)
        return self.memory.load(pointers, mask, other, dtype)

    def store(self, pointers, value, mask):
        self.check(pointers, mask, value.dtype.itemsize)
        return self.memory.store(pointers, value, mask)

    def check(self, pointers, mask, size):
        used = pointers[np.broadcast_to(mask, pointers.shape)].astype(np.int64)
        if not self.ranges or not used.size:
            return
        low, high = used.min(), used.max() + size
        if any(first <= low and high <= end for first, end in self.ranges):
            return
        inside = np.zeros(used.shape, bool)  # a tile can have rows of several tensors
        for first, end in self.ranges:
            inside |= (first <= used) & (used + size <= end)
        if not inside.all():
            self.outside.add(self.kernel)


@pytest.fixture(autouse=True)
def stays_inside(monkeypatch):
    if DEVICE != "cpu":
        yield
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    from torch import Tensor

    from weft.kernels import launch

    guarded, start = Guarded(interpreter._interpreter), launch._timed

    def started(kernel, grid, args, options):
        memory = [x.untyped_storage() for x in args if isinstance(x, Tensor)]
        guarded.kernel = getattr(kernel, "__name__", "")  # tests launch other objects
        guarded.ranges = [(x.data_ptr(), x.data_ptr() + x.nbytes()) for x in memory]
        try:
            return start(kernel, grid, args, options)
        finally:
            guarded.ranges = []

    monkeypatch.setattr(interpreter, "_interpreter", guarded)
    monkeypatch.setattr(launch, "_timed", started)
    yield
    assert not guarded.outside, f"these kernels left the memory of their tensors: {guarded.outside}"
