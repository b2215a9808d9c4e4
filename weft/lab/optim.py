"""Optimizers, schedules and averages of weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..models.blocks import blocks
from ..models.image import Normalised
from ..tasks.config import TrainConfig


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Applies weight decay to matrices only, not to norms, biases and mixing weights."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]]
    if config.layer_decay < 1:
        groups = layer_groups(model, config)
    else:
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
    betas = (config.beta1, config.beta2)
    if config.optimizer == "lion":
        try:
            from timm.optim import Lion
        except ImportError as error:
            raise ImportError("Lion needs timm: pip install 'weft[timm]'") from error
        return Lion(groups, lr=config.learning_rate, betas=betas)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.optimizer]
    fused = all(p.device.type == "cuda" for p in parameters)
    return kind(groups, lr=config.learning_rate, betas=betas, eps=config.eps, fused=fused)


def layer_groups(model: nn.Module, config: TrainConfig) -> list[dict[str, Any]]:
    """timm's groups for layer decay. Models without timm's `group_matcher` have one group per attention block, one for
    the parameters before the first block and one for those after the last."""
    try:
        from timm.optim import param_groups_layer_decay
    except ImportError as error:
        raise ImportError("layer_decay needs timm: pip install 'weft[timm]'") from error
    host: Any = model.model if isinstance(model, Normalised) else model
    if not hasattr(host, "group_matcher"):
        number = {p: i for i, (_, block) in enumerate(blocks(host), 1) for p in block.parameters()}
        if not number:
            raise ValueError("layer_decay: this model has no list of attention blocks; remove --layer-decay")
        last, reached, layer = max(number.values()), 0, {}
        for name, p in host.named_parameters():
            reached = max(reached, number.get(p, 0))
            layer[name] = number.get(p, last + 1 if reached == last else reached)
        host = SimpleNamespace(named_parameters=host.named_parameters, group_matcher=lambda coarse: layer.__getitem__)
    return param_groups_layer_decay(host, config.weight_decay, layer_decay=config.layer_decay)


class Average:
    """The moving average of the weights, which starts with those of the first step. At least in float32: bfloat16 would
    round its small changes away."""

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.weights = {
            name: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
            for name, p in model.named_parameters()
        }

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        mine = list(self.weights.values())
        values = [p.to(own.dtype) for own, p in zip(mine, model.parameters(), strict=True)]
        torch._foreach_lerp_(mine, values, 1 - self.decay if step > 1 else 1.0)


@contextmanager
def averaged(model: nn.Module, average: Average | None) -> Iterator[None]:
    """The model has the weights of its average (if any) inside, and its own again afterwards."""
    if average is None:
        yield
        return
    own = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        _copy(model.parameters(), average.weights.values())
        try:
            yield
        finally:
            _copy(model.parameters(), own)


def _copy(to: Iterable[Tensor], source: Iterable[Tensor]) -> None:
    for mine, value in zip(to, source, strict=True):
        mine.copy_(value)


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of a step, counted from 1.

    inverse_sqrt   base · min(1, t/w) / √max(t, w)
    others         peak · t/w while t ≤ w, then the curve from peak to final over the rest
    steps          × 0.1 after 8/12 of all steps and × 0.01 after 11/12, as usual for detectors
    """
    t, w, base = step, config.warmup, config.learning_rate
    if config.schedule == "inverse_sqrt":
        return base * min(1.0, t / max(w, 1)) / math.sqrt(max(t, w, 1))
    if t < w:
        return base * t / w
    if config.schedule == "constant":
        return base
    if config.schedule == "steps":
        return base * (0.1 if 12 * t > 8 * config.steps else 1.0) * (0.1 if 12 * t > 11 * config.steps else 1.0)
    done = min(1.0, (t - w) / max(1, config.steps - w))
    final = config.final_learning_rate
    if config.schedule == "linear":
        return base + (final - base) * done
    return final + (base - final) * 0.5 * (1 + math.cos(math.pi * done))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)
