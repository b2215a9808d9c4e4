"""Build the model of a run: the task's model, with a cache or subsampling if the config enables it."""

from __future__ import annotations

from torch import nn

from ..layers import CachedAttention
from ..tasks import TaskData
from ..tasks.config import TrainConfig
from ..tasks.hosts import host_of
from ..tasks.registry import task_of
from .data import seed_everything


def build_model(config: TrainConfig, data: TaskData) -> nn.Module:
    """The initial weights depend only on the config and the data's facts."""
    seed_everything("model", config.seed)
    try:
        model = task_of(config).model(config, data)
    except (TypeError, AttributeError, ZeroDivisionError) as error:
        if not config.attention_options:
            raise
        raise ValueError(
            f"attention_options {config.attention_options} do not fit {config.attention}: {error}"
        ) from error
    inner = host_of(model) or model  # saved with its changes by its own library
    if config.cache and not any(isinstance(module, CachedAttention) for module in model.modules()):
        from ..adapt.surgery import cache

        report = cache(inner, config.cache, **config.options("cache_options"))
        if not report.replaced:
            raise ValueError(f"the model has no attention layer that supports a cache: remove --cache\n{report}")
    if config.subsample:
        from ..adapt.subsample import subsample

        sigma = (config.sigma, config.sigma_last) if config.sigma_last else config.sigma
        subsample(inner, config.subsample, sigma)
    return model
