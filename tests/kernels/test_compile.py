"""Kernels compile for GPUs that are not here: the interpreter accepts code that Triton's compiler does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.machine_code import unset_registers

pytest.importorskip("triton")


def run(*options: str, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-m", "benchmarks.compile_kernels", *options]
    root = Path(__file__).resolve().parents[2]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)


def test_kernels_compile_without_a_gpu(tmp_path):
    done = run("--capability", "8.9", "--only", "combiner-fixed", cache=tmp_path)
    assert done.returncode == 0 and "0 of 1 failed" in done.stdout, done.stdout + done.stderr
    assert "TRITON_DEFAULT_FP_FUSION" not in done.stderr


def test_only_mechanisms_with_kernels_are_compiled(tmp_path):
    done = run("--only", "full", cache=tmp_path)
    assert done.returncode == 2 and "'full' has no kernel" in done.stderr


RIGHT = """R2UR UR10, R13
UIADD3 UR4, UP0, UR10, 0x20, URZ
UIADD3.X UR5, URZ, -0x3ffffff0, URZ, UP0, !UPT
ULDC.64 UR6, c[0x0][0x208]
HGMMA.64x16x16.F32.BF16 R24, gdesc[UR4].tnspA.tnspB, R24
@UP0 UMOV UR8, UR6
UIMAD.WIDE UR14, UR8, 0x4, UR6
HGMMA.64x64x16.F32.BF16 R24, R60, gdesc[UR12].tnspB, R24, gsb0
@P0 BRA 0x10""".splitlines()


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ({}, []),
        ({1: "UIADD3 UR4, UP0, UR26, 0x20, URZ"}, [1]),
        ({2: "UIADD3.X UR5, UR26, -0x3ffffff0, URZ, UP0, !UPT"}, [2]),
        ({3: "ULDC UR6, c[0x0][0x208]"}, [4]),  # the descriptor's last register, UR7
        ({1: "UIADD3 UR4, UR10, 0x20, URZ"}, [2, 5]),  # without the carry, UP0
    ],
)
def test_registers_that_are_read_before_they_are_set(wrong, found):
    code = [wrong.get(i, line) for i, line in enumerate(RIGHT)]
    assert unset_registers(list(enumerate(code))) == [code[i] for i in found]
