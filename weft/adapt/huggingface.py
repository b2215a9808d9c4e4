"""Mechanisms in Hugging Face transformers, by name.

    weft.huggingface.register()
    AutoModelForCausalLM.from_config(config, attn_implementation="weft:linear")
    weft.huggingface.register("combiner-fixed", as_="weft:combiner-16", block_size=16)

Every mechanism that has nothing of its own to learn is registered: its attention function and, under the same name,
its mask function (see `masks.py`), because a name without one would get no mask at all. `generate()` with a cache gives
the tokens it gives without one (see `past.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ..attention import Attention, attention_info, attentions, make_attention
from .core import learns, masked_full, one_dtype, rescaled, rows_are_independent, seeded
from .guard import called, guard, install
from .masks import fits, mask_function_of, read, says_causal
from .past import all_queries, is_cross_attention, layer_state, remember
from .saved import apply

PREFIX = "weft:"
SWAPPED = "weft:swapped"  # the layers of one model do not all use the same mechanism: see surgery.py
PATTERNS = ("flash", "sdpa", "flex_attention", "paged|", "/", "eager")  # names that transformers reads a meaning into


@dataclass(frozen=True, eq=False)
class Choice:
    """A mechanism with its options, as one implementation name stands for it."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    number: int = field(default_factory=itertools.count().__next__)  # tells choices apart

    @property
    def shown(self) -> str:
        return PREFIX + self.name


FULL = Choice("full")
Run = Callable[[Tensor, float], Tensor]  # values and dropout -> output
refused_layers: dict[int, str] | None = None  # while a model is tried out (probe.py): id of a layer -> why


def available() -> list[str]:
    """The mechanisms that a transformers model can use: those that training does not change."""
    return [name for name in attentions() if not learns(name)]


def register(name: str | None = None, *, as_: str | None = None, **options: Any) -> list[str]:
    """Make mechanisms available as `attn_implementation`, and return the names they have there.

    Without arguments: all of them, as "weft:<name>", with their defaults. With a name: that one, with these options,
    as `as_` (default "weft:<name>").
    """
    if name is None:
        if as_ is not None or options:
            raise TypeError("as_ and options belong to one mechanism: name it, as in register('local', block_size=64)")
        return [registered for each in available() for registered in register(each)]
    info = attention_info(name)
    if learns(name):
        raise ValueError(
            f"{name} learns something of its own, and transformers gives an attention function nowhere to keep it; "
            f"these do not: {', '.join(available())}"
        )
    key = PREFIX + name if as_ is None else as_
    clash = next((p for p in PATTERNS if p in key), None)
    if clash is not None or (key in AttentionInterface._global_mapping and not key.startswith(PREFIX)):
        raise ValueError(f"{key!r} would be taken for a name of transformers' own; choose one like {PREFIX}{name}-2")
    make_attention(name, heads=2, head_dim=8, causal=not info.bidirectional, **options)  # refuses wrong options now
    choice = Choice(name, options)
    AttentionInterface.register(key, attention_function(choice))
    AttentionMaskInterface.register(key, mask_function_of(key, takes_matrix=name == "full"))
    guard(key)
    return [key]


def load(folder: str | Path, **options: Any) -> Any:
    """The model that `save_pretrained(folder)` wrote after `weft.swap` or `weft.cache`, changed in the same way.

    `options` are those of `from_pretrained`.
    """
    config = transformers.AutoConfig.from_pretrained(folder)
    description = vars(config).pop("weft", None)
    if description is None:
        raise ValueError(f"{folder}/config.json describes no swap or cache: load the model with from_pretrained")
    cls = getattr(transformers, config.architectures[0])
    if "cached" not in description:
        model = cls.from_pretrained(folder, config=config, **options)
        apply(model, description)
        return model
    plain, own = {}, {}
    for key, value in _tensors(Path(folder)).items():
        path = next((path for path in description["cached"] if key.startswith(path + ".cached.")), None)
        inner = f"{path}.cached.inner."
        if path is None:
            plain[key] = value
        elif key.startswith(inner):
            plain[path + "." + key.removeprefix(inner)] = value
        else:
            own[key] = value
    model = cls.from_pretrained(None, config=config, state_dict=plain, **options)
    apply(model, description)
    unknown = model.load_state_dict(own, strict=False).unexpected_keys
    lost = [key for key in model.state_dict() if ".cached." in key and ".cached.inner." not in key and key not in own]
    if unknown or lost:
        raise ValueError(f"{folder} does not hold the caches that its config.json describes: {[*unknown, *lost]}")
    return model


def _tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {key: value for file in sorted(folder.glob("*.safetensors")) for key, value in load_file(file).items()}


def attention_function(choice: Choice) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The function that a layer calls with its q (B, H, Lq, D) and k, v (B, fewer H, Lk, D)."""

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        return _attend(choice, module, query, key, value, attention_mask, **kwargs)

    return attention


def swapped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """For a model whose layers were swapped one by one: the mechanism chosen for this layer, or full attention."""
    choice = layer_state(module).choice or FULL
    if refused_layers is not None:
        try:
            return _attend(choice, module, query, key, value, attention_mask, **kwargs)
        except ValueError as error:
            refused_layers[id(module)] = str(error)
            choice = FULL
    return _attend(choice, module, query, key, value, attention_mask, **kwargs)


def register_swapped() -> None:
    AttentionInterface.register(SWAPPED, swapped_attention)
    AttentionMaskInterface.register(SWAPPED, mask_function_of(SWAPPED, takes_matrix=True))


def _attend(
    choice: Choice,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """(B, Lq, H, D), and the effective matrix (B, H, Lq, Lk) where it is asked for."""
    called()
    said = says_causal(mask)
    mask = _unpacked(choice.shown, module, mask, key.shape[2])
    special = {"softcap": kwargs.get("softcap"), "sinks": kwargs.get("s_aux")}
    special = {name: value for name, value in special.items() if value is not None and choice.name == "full"}
    _refuse(choice.shown, module, key, mask, kwargs, special)
    groups = query.shape[1] // key.shape[1]
    k, v = (t.repeat_interleave(groups, 1) if groups > 1 else t for t in (key, value))
    q, k, v = one_dtype(rescaled(query, scaling), k, v)
    causal = _is_causal(choice.shown, module, said, is_causal)
    of_matrix = mask is not None and mask.dim() == 4 or position_bias is not None
    if choice.name == "full" and (of_matrix or special or (causal and q.shape[2] != k.shape[2])):
        # No earlier query is needed, so any cache will do.
        run = _full(q, k, mask, position_bias, causal, special)
    elif of_matrix:
        what = "a mask of pairs"
        if position_bias is not None:
            what = "a bias on the logits of pairs (T5's relative positions)"
        elif kwargs.get("sliding_window"):
            what = f"a mask of pairs for its sliding window of {kwargs['sliding_window']} tokens"
        raise ValueError(f"{choice.shown} is given {what} and forms no matrix to lay it on; weft:full takes it")
    else:
        run = _mechanism(choice, module, q, k, mask, causal)
    out = run(v, dropout if module.training else 0.0).transpose(1, 2).contiguous()
    if not output_attentions:
        return out, None
    with torch.no_grad():
        return out, run(torch.eye(k.shape[2], dtype=v.dtype, device=v.device).expand(*k.shape[:2], -1, -1), 0.0)


def _full(
    q: Tensor, k: Tensor, mask: Tensor | None, position_bias: Tensor | None, causal: bool, special: dict[str, Any]
) -> Run:
    """Full attention with what only it can follow."""
    if mask is None or mask.dim() != 4:
        return lambda v, p: masked_full(q, k, v, mask, causal=causal, added=position_bias, dropout=p, **special)
    allowed, added = _split(mask, position_bias)  # the matrix holds causality and padding
    return lambda v, p: masked_full(q, k, v, allowed=allowed, added=added, dropout=p, **special)


def _mechanism(choice: Choice, module: nn.Module, q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> Run:
    """The mechanism over all positions, of which the last Lq rows are asked for."""
    name, Lq, Lk = choice.shown, q.shape[2], k.shape[2]
    if not causal and (Lq != Lk or is_cross_attention(module)):
        if not attention_info(choice.name).cross:
            raise ValueError(f"{name} is self-attention only, and {type(module).__name__} reads another sequence here")
        if not rows_are_independent(choice.name, choice.options):
            raise ValueError(f"{name} mixes the queries of different positions, which would show a decoder its future")
    attn = _instance(choice, module, q, causal)
    if causal and Lq != Lk:
        _refuse_if_length_matters(name, attn)
        q = all_queries(module, name, q, Lk)
    elif causal and choice.name != "full":
        remember(module, q)

    def run(v: Tensor, dropout: float) -> Tensor:
        attn.dropout = dropout
        return attn(q, k, v, mask)[:, :, -Lq:]

    return run


def _split(pairs: Tensor, position_bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """What is allowed and what is added to the logits, from a mask that is boolean or is itself added."""
    if pairs.dtype == torch.bool:
        return pairs, position_bias
    allowed = pairs > torch.finfo(pairs.dtype).min
    added = pairs.masked_fill(~allowed, 0)
    return allowed, added if position_bias is None else added + position_bias


def _instance(choice: Choice, module: nn.Module, q: Tensor, causal: bool) -> Attention:
    """The layer's own instance. It is no submodule, so that the state dict stays that of the library."""
    kept = layer_state(module).mechanisms
    key = (choice.number, q.shape[1], q.shape[3], causal)
    if key not in kept:
        longest = getattr(getattr(module, "config", None), "max_position_embeddings", None)
        made = _made(choice, module, q, causal)
        if causal and isinstance(longest, int) and _moves(made):
            # A pattern that follows the length would move while a decoder generates: the model says how long it gets.
            made = _made(choice, module, q, causal, max_length=longest)
        kept[key] = made
    attn: Attention = kept[key]  # type: ignore[assignment]
    if any(b.device != q.device for b in attn.buffers()):
        attn.to(q.device)
    return attn.train(module.training)


def _made(choice: Choice, module: nn.Module, q: Tensor, causal: bool, **more: Any) -> Attention:
    # Random features are drawn from the layer's number: the same in every process and after loading.
    with seeded(getattr(module, "layer_idx", None) or 0):
        shape: dict[str, Any] = {"heads": q.shape[1], "head_dim": q.shape[3], "causal": causal}
        return make_attention(choice.name, **shape, **{**choice.options, **more}).to(q.device)


def _unpacked(name: str, module: nn.Module, mask: Tensor | None, keys: int) -> Tensor | None:
    """The padding mask (B, Lk), or a matrix (B, ., Lq, Lk)."""
    if mask is None:
        return None
    if mask.dim() != 4 or mask.shape[-1] != keys:
        raise ValueError(
            f"{type(module).__name__} gives {name} a mask of shape {tuple(mask.shape)}, and it should be (batch, 1, "
            f"queries, {keys} keys): this model prepares masks in its own way; use attn_implementation='eager'"
        )
    return read(mask)


def _is_causal(name: str, module: nn.Module, said: bool | None, is_causal: bool | None) -> bool:
    """A mask of ours says whether it is causal; without one the argument does, or else the layer."""
    if said is None:
        said = is_causal if is_causal is not None else getattr(module, "is_causal", None)
    if said is None:
        raise ValueError(f"{type(module).__name__} does not say whether it is causal: set is_causal on it for {name}")
    return bool(said)


def _refuse(
    name: str, module: nn.Module, key: Tensor, mask: Tensor | None, kwargs: dict[str, Any], special: dict[str, Any]
) -> None:
    """What a layer may ask for beyond softmax(q kᵀ) v, and the mechanism does not do; `special` is what it does."""
    window = kwargs.get("sliding_window")
    sinks = kwargs.get("s_aux") if kwargs.get("s_aux") is not None else getattr(module, "sinks", None)
    asked = {
        "a soft cap on the logits": None if "softcap" in special else kwargs.get("softcap"),
        "attention sinks": None if "sinks" in special else sinks,
        "a paged cache": kwargs.get("cache") if "cache" in kwargs else kwargs.get("block_table"),
        "packed sequences": kwargs.get("cu_seq_lens_q"),
        "a bias on the logits": kwargs.get("attention_bias"),
        "a sliding window": window
        if window and not fits(key.shape[2], window) and (mask is None or mask.dim() != 4)
        else None,
    }
    for what, value in asked.items():
        if value is not None:
            raise ValueError(
                f"{type(module).__name__} asks for {what}, which {name} does not do; use weft:full or eager"
            )


def _refuse_if_length_matters(name: str, attn: Attention) -> None:
    """A pattern that moves as the sequence grows makes yesterday's keys wrong: nothing cached would be right."""
    refusal = _moves(attn)
    if refusal:
        raise ValueError(
            f"{name} cannot decode with a cache: {attn.info.length_dependent}; use use_cache=False ({refusal})"
        )


def _moves(attn: Attention) -> str:
    """Why the pattern depends on the length of the sequence; "" where it does not, or its options pin it down."""
    if not attn.info.length_dependent:
        return ""
    try:
        attn.start(1)  # one whose pattern stays can decode step by step, and says so here
    except ValueError as refusal:
        return str(refusal)
    return ""


install()
