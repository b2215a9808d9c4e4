"""Reject a weft name on a transformers model that does not use transformers' attention interface.

transformers accepts any registered name for any model, but many models compute attention themselves. Such a model
raises an error as early as possible:

- when the name is set (construction, `set_attn_implementation`): its modelling file has attention layers and never
  mentions the interface;
- in the forward pass: it computes with the mask itself (see `masks.WeftMask`);
- after the first forward pass: none of its layers has called weft.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .kinds import find_layers
from .masks import modules_on_the_stack
from .saved import note

NAMES: set[str] = set()  # the attention implementations that weft has registered
_calls = 0  # of weft's attention functions, in eager mode


def called() -> None:
    """Note that a layer has called one of weft's attention functions."""
    global _calls
    if not torch.compiler.is_compiling():
        _calls += 1


def guard(name: str) -> None:
    """Check every model that uses this attention implementation."""
    NAMES.add(name)
    install()


def install() -> None:
    """Check models when they are built and when their attention is set: every name passes through these methods."""
    if not hasattr(PreTrainedModel.get_correct_attn_implementation, "weft"):
        _wrap("get_correct_attn_implementation", after=_check_and_watch)
        _wrap("set_attn_implementation", before=_check_parts)
        _wrap("save_pretrained", before=lambda model, folder: note(model))  # several models may share a config


def _wrap(method: str, *, before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None) -> None:
    """Call these functions with the model and the first argument of a method of PreTrainedModel."""
    original = getattr(PreTrainedModel, method)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def wrapped(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        first = list(signature.bind(self, *args, **kwargs).arguments.values())[1]
        if before is not None:
            before(self, first)
        result = original(self, *args, **kwargs)
        if after is not None:
            after(self, first)
        return result

    wrapped.weft = True  # type: ignore[attr-defined]
    setattr(PreTrainedModel, method, wrapped)


def _check_and_watch(model: PreTrainedModel, implementation: Any) -> None:
    if isinstance(implementation, str) and implementation in NAMES:
        _refuse_if_by_hand(model, implementation)
        if _begin not in model._forward_pre_hooks.values():
            model.register_forward_pre_hook(_begin)
            model.register_forward_hook(_end)


def _check_parts(model: PreTrainedModel, implementation: Any) -> None:
    """Check the parts of a model: transformers skips parts that cannot change their attention, and only logs it."""
    if isinstance(implementation, str) and implementation in NAMES:
        for part in model.modules():
            if isinstance(part, PreTrainedModel):
                _refuse_if_by_hand(part, implementation)


def _refuse_if_by_hand(model: PreTrainedModel, name: str) -> None:
    code = vars(sys.modules.get(type(model).__module__, sys))
    own = [
        value.__name__
        for value in code.values()
        if isinstance(value, type)
        and issubclass(value, nn.Module)
        and value.__module__ == type(model).__module__
        and "attention" in value.__name__.lower()
    ]
    if own and "ALL_ATTENTION_FUNCTIONS" not in code:
        raise ValueError(_refusal(model, name, f"{own[0]} does not use transformers' attention interface"))
    for key, table in code.items():  # tables with a class per implementation
        if isinstance(table, dict) and "eager" in table and isinstance(table["eager"], type) and name not in table:
            raise ValueError(_refusal(model, name, f"{key}, which selects its layers, has no entry for it"))


def _refusal(model: nn.Module, name: str, reason: str) -> str:
    return (
        f"{type(model).__name__} cannot use attn_implementation={name!r}: {reason}, so the model would ignore it or "
        "attend to padding and to the future. Use attn_implementation='eager' for this model. If a part of it uses the "
        f"interface, you can change only that part: attn_implementation={{'text_config': {name!r}}}"
    )


def _begin(model: nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling():
        model.__dict__["_weft_calls"] = _calls


def _end(model: PreTrainedModel, args: Any, output: Any) -> None:
    """After the first forward pass of a whole model, check whether any layer has called weft."""
    if torch.compiler.is_compiling():
        return
    before = model.__dict__.pop("_weft_calls", None)
    outer = any(isinstance(m, PreTrainedModel) and m is not model for m in modules_on_the_stack())
    if before is None or outer:  # a part of a model may have no attention
        return
    name = model.config._attn_implementation
    if before == _calls and name in NAMES:
        raise ValueError(_refusal(model, name, "none of its layers calls transformers' attention interface"))
    for part in model.modules():
        for hooks in (part._forward_pre_hooks, part._forward_hooks):
            for key in [key for key, hook in hooks.items() if hook in (_begin, _end)]:
                del hooks[key]
    unchanged = {type(layer.module).__name__ for layer in find_layers(model) if not layer.kind}
    if unchanged:
        warnings.warn(
            f"{type(model).__name__}: {', '.join(sorted(unchanged))} do not use transformers' attention interface and "
            f"keep their own attention; only the other layers use {name}",
            stacklevel=2,
        )
