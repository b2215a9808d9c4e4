"""Kernels compile for GPUs that are not here: the interpreter accepts code that Triton's compiler does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
