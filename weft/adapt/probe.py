"""Test the swapped layers of a transformers model with forward passes over a few tokens, and collect all errors.

If a mechanism does not support what its layer needs (a window, a bias, a pairwise mask), the layer computes full
attention in this pass, so that the following layers run too. If a pass does not reach every layer, other inputs follow,
and then the models inside the model, such as the tower of images beside that of texts.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from . import huggingface, masks
from .core import seeded

LENGTH = 8


def refusals(model: nn.Module, layers: list[nn.Module], max_length: int | None) -> dict[int, str]:
    """id of a layer -> why its mechanism cannot be used there. Raises ValueError if the whole model cannot run."""
    if any(p.is_meta for p in model.parameters()):
        return {}
    refused: dict[int, str] = {}
    left = {id(layer) for layer in layers if "_weft" in vars(layer)}
    models = [module for module in model.modules() if hasattr(type(module), "set_attn_implementation")]
    for part in dict.fromkeys([model, *models]):
        longest = max_length or getattr(getattr(part, "config", None), "max_position_embeddings", None)
        longest = longest if isinstance(longest, int) else 2**31
        inputs, inside = _inputs(part, min(LENGTH, longest)), {id(module) for module in part.modules()}
        while left & inside and (given := next(inputs, None)) is not None:
            trouble, probed = _try(part, given, longest)
            if trouble is None:
                refused |= {layer: why for layer, why in probed.items() if why and layer in left}
                left -= probed.keys()
            elif _runs_as_it_was(part, layers, given):
                raise ValueError(f"{type(part).__name__} does not run with its layers swapped: {trouble}") from trouble
    return refused  # errors of layers that no known inputs reach will appear in the first forward pass


def _try(model: nn.Module, inputs: dict[str, Any], longest: int) -> tuple[Exception | None, dict[int, str]]:
    probed: dict[int, str] = {}
    masks.longest, huggingface.probed_layers = longest, probed
    try:
        with _quietly(model):
            model(**inputs)
        return None, probed
    except Exception as error:
        return error, probed
    finally:
        masks.longest, huggingface.probed_layers = None, None


def _runs_as_it_was(model: nn.Module, layers: list[nn.Module], inputs: dict[str, Any]) -> bool:
    configs: dict[int, Any] = {id(layer.config): layer.config for layer in layers if hasattr(layer, "config")}
    names = {key: config._attn_implementation_internal for key, config in configs.items()}
    for config in configs.values():
        config._attn_implementation_internal = "eager"
    try:
        with _quietly(model):
            model(**inputs)
        return True
    except Exception:
        return False
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = names[key]


@contextmanager
def _quietly(model: nn.Module) -> Iterator[None]:
    """eval mode without gradients and compiled code, and restore the caller's random state."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), seeded(0), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _inputs(model: Any, length: int) -> Iterator[dict[str, Any]]:
    """Common model inputs: tokens, for an encoder and a decoder, an image, or sound."""
    takes = inspect.signature(model.forward).parameters
    like = next((p for p in model.parameters() if p.is_floating_point()), None)
    if like is None:
        return
    cache = {"use_cache": False} if "use_cache" in takes else {}
    tokens = torch.arange(2, 2 + length, device=like.device)[None]
    if "input_ids" in takes:
        text: dict[str, Tensor] = {"input_ids": tokens}
        if "attention_mask" in takes:  # without it, some models run bidirectional attention (Aimv2)
            text["attention_mask"] = torch.ones_like(tokens)
        if "decoder_input_ids" in takes:
            yield {**text, "decoder_input_ids": tokens, **cache}
        yield {**text, **cache}
    if "pixel_values" in takes:
        config = getattr(model.config, "vision_config", model.config)
        size = getattr(config, "image_size", 224)
        height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        image = torch.zeros(1, getattr(config, "num_channels", 3), height, width, device=like.device, dtype=like.dtype)
        yield {"pixel_values": image, **cache}
        if "input_ids" in takes:
            both = {**text, "pixel_values": image}
            yield {**{name: x.repeat(2, *[1] * (x.dim() - 1)) for name, x in both.items()}, **cache}  # detectors
    sound = {"decoder_input_ids": tokens, **cache} if "decoder_input_ids" in takes else cache
    if "input_values" in takes:  # samples; convolutions need a few hundred
        for shape in ((1, 2000), (1, 1, 2000)):
            yield {"input_values": torch.zeros(shape, device=like.device, dtype=like.dtype), **sound}
    if "input_features" in takes:  # a spectrum, with its frames first or last
        sizes = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "feature_size")
        configs = (model.config, getattr(model.config, "encoder_config", None))
        found = [getattr(config, name, None) for config in configs for name in sizes]
        mel = next((size for size in found if isinstance(size, int)), 80)
        frames = 2 * getattr(model.config, "max_source_positions", 32)  # Whisper takes only its full length
        for shape in ((1, 64, mel), (1, mel, frames)):
            yield {"input_features": torch.zeros(shape, device=like.device, dtype=like.dtype), **sound}
