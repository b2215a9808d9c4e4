"""Attention mechanisms, one file or folder each. Importing this package registers all of them."""

import importlib
import pkgutil
from collections.abc import Iterable

from .._interrupt import listen
from ..core.contract import Attention
from ..core.registry import AttentionInfo, attention_info, attentions, make_attention, register


def _import_all(path: Iterable[str], package: str) -> None:
    for found in pkgutil.iter_modules(path, f"{package}."):
        module = importlib.import_module(found.name)
        if found.ispkg and not hasattr(module, "naive"):  # a folder without `naive` holds several mechanisms
            _import_all(module.__path__, found.name)


_import_all(__path__, __name__)
listen()

__all__ = ["Attention", "AttentionInfo", "attention_info", "attentions", "make_attention", "register"]
