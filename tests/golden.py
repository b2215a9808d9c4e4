"""The golden files: outputs of the papers' own code, kept outside the repository.

The folder is the environment variable WEFT_GOLDEN, else `../shared/golden` beside the repository. Tests run every case
they find in a file and skip when the file is not there.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


def folder() -> Path:
    return Path(os.environ.get("WEFT_GOLDEN") or REPOSITORY.parent / "shared" / "golden")


def path(file: str) -> Path:
    """Where the file lies; the test is skipped when it does not."""
    found = folder() / file
    if not found.is_file():
        pytest.skip(f"no golden file {file} in {folder()}: set WEFT_GOLDEN to its folder")
    return found


def cases(file: str) -> dict[str, dict[str, np.ndarray]]:
    """Arrays by case and by name within the case: "linear/w/cls" is cases(file)["linear"]["w/cls"]."""
    grouped: dict[str, dict[str, np.ndarray]] = {}
    with np.load(path(file)) as arrays:
        for key in arrays.files:
            case, _, name = key.partition("/")
            grouped.setdefault(case, {})[name] = arrays[key]
    return grouped


def names(file: str) -> list[str]:
    """The cases of a file, for parametrize; one stand-in when there is no file, which `cases` then skips."""
    found = folder() / file
    if not found.is_file():
        return ["no golden file"]
    with np.load(found) as arrays:
        return sorted({key.partition("/")[0] for key in arrays.files})
