"""The model of a run: the task's own, with a cache or subsampling put in where the config asks for them."""

from __future__ import annotations

from torch import nn

from ..tasks import TaskData, get_task
from ..tasks.config import TrainConfig
from .data import seed_everything


def build_model(config: TrainConfig, data: TaskData) -> nn.Module:
    """A function of the config and the data's facts: the same weights every time."""
    seed_everything("model", config.seed)
    model = get_task(config.task).model(config, data)
    if config.cache:
        from ..adapt.surgery import cache

        report = cache(model, config.cache)
        if not report.replaced:
            raise ValueError(f"there is no attention layer that a cache goes around; leave --cache out:\n{report}")
    if config.subsample:
        from .subsample import subsample

        sigma = (config.sigma, config.sigma_last) if config.sigma_last else config.sigma
        subsample(model, config.subsample, sigma)
    return model
