"""Names of a package that are imported on first use, so that `weft --help` does not import torch."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy(
    package: str, names: Mapping[str, str], modules: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package; `names` and `modules` say where a name is defined."""
    modules = modules or {}

    def find(name: str) -> Any:
        if name in modules:
            return importlib.import_module(f"{package}.{modules[name]}")
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{names[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return find, lambda: sorted({*vars(sys.modules[package]), *names, *modules})
