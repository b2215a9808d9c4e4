"""The kernels in Triton's interpreter, on the CPU: small shapes, every option, every gradient, against float64.

The interpreter must be chosen before Triton is imported, so the cases run in a process of their own. bfloat16 is left
to the GPU script: the interpreter's bfloat16 products are wrong.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

RUN = """
import torch
from weft.kernels.checks import SMALL, compare, failures
from weft.kernels.combiner_fixed import combiner_fixed
seed = int.from_bytes(__import__("os").urandom(4), "little")
torch.manual_seed(seed)
torch.set_num_threads(1)
bad = 0
for case in SMALL:
    wrong = failures(compare(combiner_fixed, case, "cpu"), case.dtype)
    bad += bool(wrong)
    print(case, "FAILED" if wrong else "ok", wrong, "seed", seed)
assert bad == 0
"""


def interpret(script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_combiner_fixed_equals_its_definition():
    interpret(RUN)
