"""Attention transfer: train every swapped layer to give the output of its original on the same input.

    loss_l = ‖student_l(x_l) − teacher_l(x_l)‖² / ‖teacher_l(x_l)‖²,   x_{l+1} from teacher_l(x_l)

As in LoLCATs (https://arxiv.org/abs/2410.10254): all inputs come from the original model, so the layers do not depend
on each other. The rest of the model runs without gradients, and each layer's backward pass follows its forward pass,
so that the activations of only one layer are in memory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...adapt.kinds import Where, find_layers, is_chosen

CACHES = ("past_key_values", "past_key_value", "layer_past")  # arguments of transformers layers


def originals(model: nn.Module, where: Where) -> dict[nn.Module, nn.Module]:
    """Frozen copies of the attention layers, made before the swap. A swapped layer stays the same object."""
    chosen = [layer for layer in find_layers(model) if layer.kind and is_chosen(where, layer.path, layer.module)]
    return {layer.module: frozen(layer.module) for layer in chosen}


def frozen(module: nn.Module) -> nn.Module:
    config = getattr(module, "config", None)  # shared by the layers of transformers models
    return copy.deepcopy(module, {id(config): config}).eval().requires_grad_(False)


def teacher_of(module: nn.Module, original: nn.Module) -> nn.Module:
    """A layer that computes what the original did, from the inputs that the swapped model passes.

    A swapped transformers model passes masks that only weft can read, so the teacher runs weft's full attention, with
    the windows, biases and caps of the layer; or the mechanism of a layer that was swapped before.
    """
    before = original.__dict__.get("_weft")
    if module.__dict__.get("_weft") is None or (before is not None and before.choice is not None):
        return original
    from ...adapt.huggingface import FULL
    from ...adapt.past import LayerState

    original.__class__ = module.__class__
    original.__dict__["_weft"] = LayerState(choice=FULL)
    original.config = module.config  # type: ignore[assignment]
    return original


class Transfer:
    """Within `with transfer.on(mask, learn=True)`, a forward pass computes the losses and gradients of the layers.

    `share`: of the batch that the forward pass has; it scales the gradients.
    """

    def __init__(self, layers: dict[str, nn.Module], teachers: dict[str, nn.Module]):
        self.layers, self.teachers = layers, teachers
        self.errors: dict[str, Tensor] = {}  # of the last forward pass
        self.mask: Tensor | None = None  # (B, L), True for real tokens

    @contextmanager
    def on(self, mask: Tensor | None, learn: bool, share: float = 1.0) -> Iterator[None]:
        self.errors, self.mask, self.share = {}, mask, share
        before = {path: vars(layer).get("forward") for path, layer in self.layers.items()}
        for path, layer in self.layers.items():
            layer.forward = self._forward(path, layer.forward, self.teachers[path], learn)  # type: ignore[method-assign]
        try:
            with torch.no_grad():
                yield
        finally:
            for path, layer in self.layers.items():
                del layer.forward
                if before[path] is not None:
                    vars(layer)["forward"] = before[path]

    def _forward(self, path: str, student: Any, teacher: nn.Module, learn: bool) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            # Teacher and student would both append to a key-value cache.
            kwargs = {key: None if key in CACHES else value for key, value in kwargs.items()}
            with torch.set_grad_enabled(learn):
                out = _first(student(*args, **kwargs))
            target = teacher(*args, **kwargs)  # last, because later layers may read its keys (Gemma 3n)
            with torch.set_grad_enabled(learn):
                error = relative_error(out, _first(target), self.mask)
                if learn:
                    with torch.autocast(error.device.type, enabled=False):
                        (error * self.share).backward()
            self.errors[path] = self.errors.get(path, 0) + error.detach()  # shared layers are called more than once
            return target

        return forward

    @property
    def mean(self) -> Tensor:
        return torch.stack(list(self.errors.values())).mean()


def relative_error(out: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
    out, target = out.float(), target.float()
    difference, size = (out - target).square(), target.square()
    if mask is not None and mask.shape == out.shape[:2]:
        real = mask.bool()[..., None]
        difference, size = difference.masked_fill(~real, 0), size.masked_fill(~real, 0)
    return difference.sum() / size.sum().clamp_min(1e-12)


def _first(out: Any) -> Tensor:
    return out[0] if isinstance(out, (tuple, list)) else out
