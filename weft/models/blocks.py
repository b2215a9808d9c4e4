"""The repeated blocks of a model, which are inspected, recomputed and sharded one by one."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ..attention import Attention
from .crate import CRATELayer


def has_attention(module: nn.Module) -> bool:
    return any(isinstance(m, Attention) for m in module.modules())


def blocks(model: nn.Module, holds: Callable[[nn.Module], bool] = has_attention) -> list[tuple[str, nn.Module]]:
    """The repeated blocks with their paths: a CRATE's layers, or the entries of module lists with attention."""
    layers: list[tuple[str, nn.Module]] = [(name, m) for name, m in model.named_modules() if isinstance(m, CRATELayer)]
    if layers:
        return layers
    found: list[tuple[str, nn.Module]] = []

    def visit(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            holding = sum(holds(entry) for entry in child.children())
            # nn.Sequential also counts as a list of blocks (timm's models), unless it only wraps a model.
            if (isinstance(child, nn.ModuleList) and holding) or (isinstance(child, nn.Sequential) and holding > 1):
                found.extend((f"{path}{name}.{i}", entry) for i, entry in enumerate(child))
            else:
                visit(child, f"{path}{name}.")

    visit(model, "")
    return found
