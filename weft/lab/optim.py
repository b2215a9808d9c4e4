"""Optimizers and schedules."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ..tasks.config import TrainConfig


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Applies weight decay to matrices only, not to norms, biases and mixing weights."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
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
        group["lr"] = rate
