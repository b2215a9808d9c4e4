"""Tiny random models of every architecture that transformers can build, with inputs for them."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Iterator
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from transformers.models.auto import configuration_auto, modeling_auto

L = 11
DEVICE = os.environ.get("WEFT_TEST_DEVICE", "cpu")  # of the models in the sweeps
LARGEST = 30e6  # parameters; what does not shrink below is left out

# Names of a config's integers -> their tiny value. The first rule whose word is in the name decides; None: as it is.
RULES: list[tuple[tuple[str, ...], int | None]] = [
    (("_id", "index", "feat_extract", "use_sliding"), None),
    (("vocab", "max_position", "n_positions", "n_ctx", "max_target_positions", "max_source_positions"), 64),
    (("rotary_dim",), 4),
    (("num_key_value", "kv_heads", "multi_query_group"), 2),
    (("head_dim", "d_kv", "kv_channels", "head_size"), 8),
    (("num_attention_heads", "num_heads", "n_head", "n_heads", "attention_heads", "mamba_num_heads"), 4),
    (("hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "depth", "num_blocks"), 2),
    (("ffn", "intermediate", "d_ff", "n_inner", "mlp_dim", "feedforward", "d_inner"), 48),
    (("per_tok",), 2),
    (("num_experts", "num_local_experts", "n_routed_experts"), 4),
    (("image_size", "img_size"), 32),
    (("sliding_window", "attention_chunk_size", "local_attention"), 5),
    (("lora_rank",), 16),
    (("n_group", "topk_group"), 1),
    (("rate", "theta", "std", "sampling", "hop", "freq"), None),
]
WIDTHS = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "hidden_dim", "projection_dim")
LISTS = {"num_heads": 2, "num_attention_heads": 2, "depths": 1, "conv_dim": 32}  # one number for each stage


def every() -> list[str]:
    """Base models and causal language models, as "model type/class"."""
    found: dict[str, None] = {}
    for kind in configuration_auto.CONFIG_MAPPING_NAMES:
        for mapping in (modeling_auto.MODEL_MAPPING_NAMES, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
            names = mapping.get(kind, ())
            found |= {f"{kind}/{name}": None for name in ([names] if isinstance(names, str) else names)}
    return list(found)


def build(model: str, implementation: str) -> Any:
    """The tiny model, with the same weights for every implementation."""
    kind, name = model.split("/")
    cls, made = getattr(transformers, name), configuration_auto.CONFIG_MAPPING[kind]
    with torch.device("meta"):
        size = sum(p.numel() for p in cls._from_config(_tiny(made, name), attn_implementation="eager").parameters())
    if size > LARGEST:
        raise MemoryError(f"{model} has {size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    return cls._from_config(_tiny(made, name), attn_implementation=implementation).float().eval()


def _tiny(cls: Any, name: str) -> Any:
    config = cls()
    changes: dict[str, Any] = {}
    for part, sub in (cls.sub_configs or {}).items():
        sub = type(getattr(config, part, None)) if sub.__name__ == "AutoConfig" else sub
        if hasattr(sub, "sub_configs"):
            changes[part] = _tiny(sub, "").to_dict()
    for field, value in vars(config).items():
        if isinstance(value, (list, tuple)) and field in LISTS:
            changes[field] = type(value)([LISTS[field]] * len(value))
        elif isinstance(value, int) and not isinstance(value, bool):
            tiny = _size(field, value)
            if tiny is not None:
                changes[field] = tiny
            if field.endswith(("token_id", "token_index")) and value >= 64:
                changes[field] = 3
    if "qk_rope_head_dim" in changes:  # keys have a part that is rotated and a part that is not
        changes |= {"num_key_value_heads": 4, "v_head_dim": 6}
        changes.pop("head_dim", None)
    if isinstance(getattr(config, "window_size", None), int) and hasattr(config, "depths"):  # Swin
        changes |= {"window_size": 2, "image_size": 64}
    if hasattr(config, "attention_types"):  # GPT-Neo
        changes["attention_types"] = [[["global", "local"], 1]]
    if name.endswith("CausalLM") and hasattr(config, "is_decoder"):
        changes["is_decoder"] = True
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    if kinds:  # one layer of each kind
        layers = max(2, len(kinds))
        changes |= {f: layers for f in ("num_hidden_layers", "n_layer", "num_layers") if f in changes}
        changes["layer_types"] = (kinds * 2)[:layers]
    try:
        return cls(**changes)
    except Exception:  # some derive their layer types, and refuse them
        changes.pop("layer_types", None)
        return cls(**changes)


def _size(field: str, value: int) -> int | None:
    if field in WIDTHS:
        return 32
    for words, tiny in RULES:
        if any(word in field for word in words):
            return tiny if tiny is None or field.startswith(("image", "img")) else min(value, tiny)
    if "patch_size" in field:
        return min(value, 8)
    return 32 if value >= 256 and "token" not in field and "position" not in field else None


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def tokens(seed: int = 1) -> torch.Tensor:
    return torch.randint(5, 60, (2, L), generator=torch.Generator().manual_seed(seed))


def inputs_for(model: Any) -> dict[str, torch.Tensor]:
    """The first inputs that the model's forward takes."""
    trouble: Exception = ValueError("nothing to try")
    for inputs in _candidates(model):
        try:
            outputs(model, inputs)
            return inputs
        except Exception as error:
            trouble = error
    raise ValueError(f"no inputs for {type(model).__name__}: {trouble}")


def _candidates(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    takes, config = set(inspect.signature(model.forward).parameters), model.config
    text: dict[str, torch.Tensor] = {}
    decoder = {"decoder_input_ids": tokens(2)} if "decoder_input_ids" in takes else {}
    if "input_ids" in takes:
        text = {"input_ids": tokens()}
        if "attention_mask" in takes:
            text["attention_mask"] = torch.ones(2, L, dtype=torch.long)
        if "bbox" in takes:
            yield {**text, "bbox": torch.zeros(2, L, 4, dtype=torch.long)}
        yield {**text, **decoder}
        yield text
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or getattr(vision, "img_size", None) or 32
    size = size[0] if isinstance(size, (list, tuple)) else size
    channels = getattr(vision, "num_channels", 3)
    if "pixel_values" in takes:
        for side in dict.fromkeys((size, 32, 64, 224)):
            yield {"pixel_values": noise(2, channels, side, side)}
            yield {**text, "pixel_values": noise(2, channels, side, side)}
            yield {"pixel_values": noise(2, getattr(config, "num_frames", 4), channels, side, side)}
        if "grid_thw" in takes or "image_grid_thw" in takes:
            return
    if "hidden_states" in takes and "grid_thw" in takes:
        pixels = channels * vision.patch_size**2 * getattr(vision, "temporal_patch_size", 1)
        yield {"hidden_states": noise(16, pixels), "grid_thw": torch.tensor([[1, 4, 4]])}
    if "input_values" in takes:
        yield {"input_values": noise(2, 2000)}
        yield {"input_values": noise(2, 1, 2000)}
        yield {"input_values": noise(2, getattr(config, "max_length", 64), getattr(config, "num_mel_bins", 32))}
    if "input_features" in takes:
        for field in ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "feature_size"):
            mel = getattr(config, field, None) or 32
            yield {"input_features": noise(2, mel, 128), **decoder}
            yield {"input_features": noise(2, 64, mel), **decoder}
    if "hidden_states" in takes:
        yield {"hidden_states": noise(2, L, 32)}
    if "inputs_embeds" in takes:
        yield {"inputs_embeds": noise(2, L, 32)}
    if "past_values" in takes:
        yield {"past_values": noise(2, getattr(config, "context_length", 64), getattr(config, "num_input_channels", 1))}


def outputs(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Its logits, hidden states or whatever comes first, without gradients and with fixed random numbers."""
    torch.manual_seed(0)
    device = next(model.parameters()).device
    with torch.no_grad():
        found = model(**{name: value.to(device) for name, value in inputs.items()})
    for name in ("logits", "last_hidden_state"):
        if getattr(found, name, None) is not None:
            return getattr(found, name).cpu()
    return next(v for v in found.values() if isinstance(v, torch.Tensor) and v.is_floating_point()).cpu()


def perturbed(inputs: dict[str, torch.Tensor]) -> Iterator[tuple[str, dict, dict, Any]]:
    """Pairs of inputs, and the part of the output that does not tell them apart if masks are followed."""
    key = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    if key in inputs:
        yield "the future", inputs, {**inputs, key: _changed(inputs[key], slice(-3, None))}, (slice(None), slice(-3))
    if "attention_mask" in inputs and "input_ids" in inputs:
        for side, hidden, real in (("right", slice(-4, None), slice(-4)), ("left", slice(4), slice(4, None))):
            mask = inputs["attention_mask"].clone()
            mask[1, hidden] = 0
            first = {**inputs, "attention_mask": mask}
            second = {**first, "input_ids": _changed(inputs["input_ids"], hidden, rows=slice(1, None))}
            yield f"padding on the {side}", first, second, (1, slice(None) if key != "input_ids" else real)


def _changed(ids: torch.Tensor, where: slice, rows: slice = slice(None)) -> torch.Tensor:
    ids = ids.clone()
    ids[rows, where] = (ids[rows, where] + 7) % 50 + 5
    return ids


@functools.cache
def reference(model: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model with eager attention and inputs that it takes; ValueError or MemoryError where there are none."""
    try:
        made = build(model, "eager").to(DEVICE)
    except MemoryError:
        raise
    except Exception as error:
        raise ValueError(f"{model} does not build: {error}") from error
    return made, inputs_for(made)
