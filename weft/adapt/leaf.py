"""Swapped layers as single nodes in FX graphs: mechanisms depend on shapes, which FX does not know."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.fx import Proxy


def fx_leaf(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a layer's forward: while FX traces it, record the call of the layer instead of running it."""

    @functools.wraps(forward)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        for arg in (*args, *kwargs.values()):
            if isinstance(arg, Proxy):
                tracer: Any = arg.tracer
                return tracer.create_proxy("call_module", tracer.path_of_module(self), args, kwargs)
        return forward(self, *args, **kwargs)

    return wrapped
