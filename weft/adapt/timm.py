"""Mechanisms in timm's vision transformers.

    rows = weft.timm.layer("combiner-axial-vertical", block_size=14, prefix=1)
    timm.create_model("vit_small_patch16_224", pretrained=True, attn_layer=rows)

The class is timm's layer with another core. Parameter names do not change, so pretrained weights load, and `weft.swap`
can convert an existing layer and back. timm's other layers are in timm_layers.py.
"""

from __future__ import annotations

import copyreg
import json
from pathlib import Path
from typing import Any

from torch import Tensor

try:
    import timm.layers
    import timm.models
except ImportError as error:
    raise ImportError("weft.timm needs timm: pip install 'weft[timm]'") from error

from ..core.registry import check_options
from .added import pairs
from .core import Core, fx_leaf
from .saved import RECORD, apply, describe


class TimmAttention(timm.layers.Attention):
    """timm's `Attention` (ViT, DeiT and others) with a mechanism.

    The first `prefix` tokens (class and register tokens) are moved behind the patches before attention and back
    afterwards, so that a block size equal to the width of the patch grid cuts it into rows.
    """

    weft: Core
    prefix: int

    def __init__(self, dim: int, num_heads: int = 8, *args: Any, weft: dict[str, Any], **kwargs: Any):
        super().__init__(dim, num_heads, *args, **kwargs)
        settings = dict(weft)
        self.prefix = settings.pop("prefix")
        core = Core(heads=self.num_heads, head_dim=self.head_dim, dropout=self.attn_drop.p, **settings)
        self.weft = core.to(device=self.qkv.weight.device, dtype=self.qkv.weight.dtype)

    @fx_leaf
    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        gate = getattr(self, "gate", None)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)
        out = self._core(self.q_norm(q), self.k_norm(k), v, attn_mask, is_causal)
        out = self.norm(out.transpose(1, 2).flatten(2))
        if gate is not None:
            out = out * gate(x).sigmoid()
        return self.proj_drop(self.proj(out))

    def _core(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        if self.prefix and (mask is not None or causal):
            raise ValueError("prefix moves tokens, so it does not support masks and causality: use prefix=0")
        if self.prefix:
            q, k, v = (t.roll(-self.prefix, 2) for t in (q, k, v))
        given = {} if mask is None else pairs(mask, k.shape[0])
        out = self.weft(q, k, v, causal=causal, dropout=self.attn_drop.p, **given)
        return out.roll(self.prefix, 2) if self.prefix else out


def layer(
    name: str, *, causal: bool = False, max_length: int | None = None, prefix: int = 0, **options: Any
) -> type[timm.layers.Attention]:
    """A class for timm's `attn_layer`; `prefix` is the number of class and register tokens before the patches."""
    check_options(name, options)  # also rejects unknown names
    weft = {"name": name, "causal": causal, "max_length": max_length, "prefix": prefix, **options}

    def make(cls: type, *args: Any, **kwargs: Any) -> TimmAttention:
        made = TimmAttention(*args, weft=weft, **kwargs)
        made.__dict__[RECORD] = {"to": name, **{key: value for key, value in weft.items() if key != "name"}}
        return made

    # timm needs a class. Its instances are plain TimmAttentions, which can be pickled.
    made: Any = _Chosen(f"TimmAttention[{name}]", (timm.layers.Attention,), {"__new__": make, "chosen": weft})
    return made


class _Chosen(type):
    """The classes that `layer` makes. Models of timm keep theirs since timm 1.0.31."""

    chosen: dict[str, Any]


copyreg.pickle(_Chosen, lambda cls: (_chosen, (cls.chosen,)))


def _chosen(chosen: dict[str, Any]) -> Any:
    return layer(**chosen)


def save(model: Any, folder: str | Path, **model_args: Any) -> None:
    """Save a timm model and its changes by `weft.swap` and `weft.cache` in timm's folder format.

    `model_args` are the arguments of `timm.create_model` that created it, such as img_size.
    """
    kept = vars(model).get("_model_args", {})
    # `load` changes a plain model instead.
    model._model_args = {key: value for key, value in kept.items() if not isinstance(value, _Chosen)}
    try:
        timm.models.save_for_hf(
            model, str(folder), model_config={"weft": describe(model)}, model_args=model_args, safe_serialization=True
        )
    finally:
        model._model_args = kept


def load(folder: str | Path, **model_args: Any) -> Any:
    """The model that `save` wrote."""
    config = json.loads((Path(folder) / "config.json").read_text())
    if "weft" not in config:
        raise ValueError(f"{folder} was not written by weft.timm.save: use timm.create_model('local-dir:{folder}')")
    from safetensors.torch import load_file

    settings = {"num_classes": config["num_classes"], **config.get("model_args", {}), **model_args}
    model = timm.create_model(config["architecture"], **settings)
    apply(model, config["weft"])
    model.load_state_dict(load_file(Path(folder) / "model.safetensors"))
    return model
