"""Load a Hugging Face model that was saved after `weft.swap` or `weft.cache`.

config.json describes the changes (see `saved.py`). The plain model is loaded first, then changed, and then gets the
tensors of its caches and mechanisms.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from .saved import apply


def load(folder: str | Path, **options: Any) -> Any:
    """Load a model that was saved with `save_pretrained(folder)` after `weft.swap` or `weft.cache`, with its changes.

    `options` go to `from_pretrained`.
    """
    config = transformers.AutoConfig.from_pretrained(folder)
    described = {path: vars(part).pop("weft") for path, part in _configs(config).items() if "weft" in vars(part)}
    if not described:
        raise ValueError(
            f"{folder}/config.json describes no swap or cache: use from_pretrained. If only a part of the model was "
            "changed, change it through the whole model (weft.swap with where=...), and save it again"
        )
    cached = any(description.get("cached") for description in described.values())
    cls = getattr(transformers, config.architectures[0])
    plain: dict[str, Tensor] = {}
    own: dict[str, Tensor] = {}
    for key, value in _tensors(Path(folder)).items():
        name = key.replace(".cached.inner.", ".", 1) if cached else key
        if _is_own(name):
            own[key] = value
        else:
            plain[name] = value
    if not own:
        model = cls.from_pretrained(folder, config=config, **options)
        apply(model, _joined(described, model))
        return model
    model = cls.from_pretrained(None, config=config, state_dict=plain, **options)
    settings = Path(folder) / "generation_config.json"
    if "generation_config" not in options and model.can_generate() and settings.exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    apply(model, _joined(described, model))
    own = _renamed(own, model)
    unknown = model.load_state_dict(own, strict=False).unexpected_keys
    lost = [key for key in model.state_dict() if _is_own(key) and key not in own]
    if unknown or lost:
        raise ValueError(f"{folder} does not have the tensors that its config.json describes: {[*unknown, *lost]}")
    return model


def _configs(config: Any, path: str = "") -> dict[str, Any]:
    """The config and those of the model's parts, such as vision_config, by path."""
    found = {path: config}
    for name, part in vars(config).items():
        if isinstance(part, transformers.PreTrainedConfig):
            found |= _configs(part, f"{path}.{name}" if path else name)
    return found


def _joined(described: dict[str, dict[str, Any]], model: Any) -> dict[str, Any]:
    """One description with the paths of this model. Those of parts are the latest, see `saved.note`."""
    known, configs = dict(model.named_modules()), _configs(model.config)
    joined: dict[str, Any] = {}
    for path, description in described.items():
        if path:
            places = [p for p, module in known.items() if p and getattr(module, "config", None) is configs[path]]
            wanted = [layer for layers in description.values() for layer in layers]
            place = next((p for p in places if all(f"{p}.{layer}" in known for layer in wanted)), path)
            found = {k: {f"{place}.{p}": s for p, s in layers.items()} for k, layers in description.items()}
        else:
            found = _rooted(description, model)
        for kind, layers in found.items():
            joined[kind] = {**joined.get(kind, {}), **layers}
    return joined


def _rooted(description: dict[str, Any], model: Any) -> dict[str, Any]:
    """The description with the paths of this model: it may have been changed or saved as a part of another one."""
    prefix, known = f"{model.base_model_prefix}.", {path for path, _ in model.named_modules()}

    def here(path: str) -> str:
        return next((p for p in (path, prefix + path, path.removeprefix(prefix)) if p in known), path)

    return {kind: {here(path): settings for path, settings in layers.items()} for kind, layers in description.items()}


def _renamed(tensors: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """The tensors with the names of this model: save_pretrained may have written others, and those of another model, of
    which this one is a part, or which is a part of this one."""
    prefix, places = f"{model.base_model_prefix}.", {}
    for key in filter(_is_own, model.state_dict()):
        (saved,) = revert_weight_conversion(model, {key: torch.empty(0)})
        names = (f(name) for name in (saved, key) for f in (str, prefix.__add__, lambda n: n.removeprefix(prefix)))
        places[next((name for name in names if name in tensors), key)] = key
    return {places.get(name, name): value for name, value in tensors.items()}


def _is_own(key: str) -> bool:
    """Whether a tensor belongs to a cache or to a mechanism, and not to the plain model."""
    return ".weft." in key or (".cached." in key and ".cached.inner." not in key)


def _tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {key: value for file in sorted(folder.glob("*.safetensors")) for key, value in load_file(file).items()}
