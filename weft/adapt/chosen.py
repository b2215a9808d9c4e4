"""Which layers of a model are changed: the argument `where` of `swap`, `cache` and `subsample`."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable

from torch import nn

Where = str | Callable[[str, nn.Module], bool] | None


def is_chosen(where: Where, path: str, layer: nn.Module) -> bool:
    if where is None:
        return True
    if isinstance(where, str):
        return fnmatch.fnmatchcase(path, where)
    if not callable(where):
        raise TypeError(
            f"where must be a pattern on paths, such as 'layers.*.self_attn', or a function of path and layer, got "
            f"{where!r}; for a list of paths, use where=lambda path, layer: path in paths"
        )
    return bool(where(path, layer))
