"""Outputs of the papers' published code: `tests/golden/`, and more cases from the folder in WEFT_GOLDEN."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


def _files(file: str) -> Iterator[Path]:
    folders = [REPOSITORY / "tests" / "golden", *filter(None, [os.environ.get("WEFT_GOLDEN")])]
    return (Path(folder) / file for folder in folders if (Path(folder) / file).is_file())


def cases(file: str) -> dict[str, dict[str, np.ndarray]]:
    """Arrays by case and by name within the case: "linear/w/cls" is cases(file)["linear"]["w/cls"]."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for path in _files(file):
        grouped: dict[str, dict[str, np.ndarray]] = {}
        with np.load(path) as arrays:
            for key in arrays.files:
                case, _, name = key.partition("/")
                grouped.setdefault(case, {})[name] = arrays[key]
        found |= grouped
    return found


def case(file: str, name: str) -> dict[str, np.ndarray]:
    """The arrays of one case; the test is skipped if no file has it."""
    found = cases(file)
    if name not in found:
        pytest.skip(f"no golden file {file} has a case {name}")
    return found[name]


def names(file: str) -> list[str]:
    """The cases of a file, for parametrize."""
    return sorted(cases(file))
