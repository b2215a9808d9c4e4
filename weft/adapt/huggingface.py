"""weft mechanisms as attention implementations of Hugging Face transformers.

    weft.huggingface.register()
    AutoModelForCausalLM.from_config(config, attn_implementation="weft:linear")
    weft.huggingface.register("combiner-fixed", as_="weft:combiner-16", block_size=16)

Every mechanism without learned state is registered: its attention function and, under the same name, its mask function
(see `masks.py`), because transformers passes no mask to names without one. `generate()` gives the same tokens with and
without a cache. It keeps the mechanism's decoding state in the cache (see `decoding.py`), or for mechanisms without one
the earlier queries (see `past.py`).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

try:
    from transformers import AttentionInterface, AttentionMaskInterface
except ImportError as error:
    raise ImportError("weft.huggingface needs transformers: pip install 'weft[huggingface]'") from error

from ..attention import Attention, attention_info, attentions, make_attention
from ..core.blocks import both
from ..core.heads import spread
from ..core.precision import autocast
from ..core.segments import Segments
from ..core.unread import connected
from .biases import PairBias, WindowBias, in_blocks, in_window, total
from .core import learns, masked_full, rescaled, rows_are_independent, seeded, trains, watched
from .decoding import StateLayer, begin, note_recording, state_layer
from .guard import called, guard, install
from .loading import load as load
from .masks import CausalMask, fits, last_row, mask_function_of, read, says_causal, window_of
from .packed import documents
from .past import all_queries, is_cross_attention, layer_state, remember

PREFIX = "weft:"
SWAPPED = "weft:swapped"  # layers with different mechanisms in one model: see surgery.py
PATTERNS = ("flash", "sdpa", "flex_attention", "paged|", "/", "eager")  # names with a special meaning in transformers


@dataclass(frozen=True, eq=False)
class Choice:
    """A mechanism with its options, under one implementation name."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    number: str = field(default_factory=lambda: uuid.uuid4().hex)  # unique id, also among those of pickled models

    @property
    def shown(self) -> str:
        return PREFIX + self.name


FULL = Choice("full")
Run = Callable[[Tensor, float], Tensor]  # values and dropout -> output
probed_layers: dict[int, str] | None = None  # during a probe (probe.py): id of a layer -> why it is refused, or ""


def available() -> list[str]:
    """The mechanisms that transformers models can use: those without learned state."""
    return [name for name in attentions() if not learns(name)]


def register(name: str | None = None, *, as_: str | None = None, **options: Any) -> list[str]:
    """Register mechanisms as `attn_implementation`, and return their names there.

    Without arguments: all mechanisms, as "weft:<name>", with default options. With a name: that mechanism with these
    options, as `as_` (default "weft:<name>").
    """
    if name is None:
        if as_ is not None or options:
            raise TypeError("as_ and options need a mechanism: pass its name, as in register('local', block_size=64)")
        return [registered for each in available() for registered in register(each)]
    info = attention_info(name)
    if learns(name):
        raise ValueError(
            f"{name} has learned state, and transformers gives attention functions no place to store it: use "
            f"weft.swap(model, to={name!r}); available by name: {', '.join(available())}"
        )
    key = PREFIX + name if as_ is None else as_
    clash = next((p for p in PATTERNS if p in key), None)
    if clash is not None or (key in AttentionInterface._global_mapping and not key.startswith(PREFIX)):
        raise ValueError(f"{key!r} has a special meaning in transformers: choose a name like {PREFIX}{name}-2")
    if trains(name, not info.bidirectional, options):  # also checks the options
        raise ValueError(
            f"{name} has parameters with {options}, and transformers gives attention functions no place to store them: "
            f"use weft.swap(model, to={name!r}, ...)"
        )
    choice = Choice(name, options)
    AttentionInterface.register(key, attention_function(choice))
    AttentionMaskInterface.register(key, mask_function_of(key, name == "full", info.steps and name != "full"))
    guard(key)
    return [key]


def attention_function(choice: Choice) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The function that a layer calls with q (B, H, Lq, D) and k, v (B, H or fewer, Lk, D)."""

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        out = _repeated(choice, module, query, key, value, attention_mask, kwargs)
        return (out, None) if out is not None else _attend(choice, module, query, key, value, attention_mask, **kwargs)

    return attention


def _repeated(
    choice: Choice,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kwargs: dict[str, Any],
) -> Tensor | None:
    """The output of another token of a cache with a decoding state, without checks; None if some are necessary."""
    layer = state_layer(key)
    if layer is None or not layer.repeats(choice, module, query, mask, kwargs):
        return None
    called()
    return _heads_last(layer.attend_next(rescaled(query, kwargs.get("scaling")), value, mask))


def swapped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """For models with swapped layers: the mechanism chosen for this layer, or full attention."""
    choice = layer_state(module).choice or FULL
    out = _repeated(choice, module, query, key, value, attention_mask, kwargs)
    if out is not None:
        return out, None
    if probed_layers is not None:
        probed_layers.setdefault(id(module), "")
        try:
            return _attend(choice, module, query, key, value, attention_mask, **kwargs)
        except ValueError as error:
            probed_layers[id(module)] = str(error)
            choice = FULL
    return _attend(choice, module, query, key, value, attention_mask, **kwargs)


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
    """(B, Lq, H, D), and the effective matrix (B, H, Lq, Lk) if requested."""
    called()
    dropout = dropout if module.training else 0.0
    state = state_layer(key)
    if state is not None:
        packing = kwargs.get("cu_seq_lens_q") is not None
        biased = position_bias is not None
        state.refuse(output_attentions=output_attentions, position_bias=biased, dropout=dropout, packing=packing)
        return _attend_next(choice, module, state, rescaled(query, scaling), value, mask, kwargs), None
    said, window = says_causal(mask), window_of(mask)
    packed = documents(module, choice.shown, mask, query, key.shape[2], kwargs)
    row = last_row(mask) if choice.name != "full" else None
    if row is not None and not attention_info(choice.name).steps:
        raise ValueError(f"{choice.shown} does not support a static cache: use the default cache, or weft:full")
    mask = _unpacked(choice.shown, module, mask, key.shape[2]) if row is None else row
    special = {"softcap": kwargs.get("softcap"), "sinks": kwargs.get("s_aux", kwargs.get("sinks"))}
    special = {name: value for name, value in special.items() if value is not None and choice.name == "full"}
    _refuse(choice, module, key.shape[2], mask, window, kwargs, special)
    causal = _is_causal(choice.shown, module, said, is_causal)
    if choice.name == "longformer" and causal:
        window = window or kwargs.get("sliding_window")  # the same window before the sequence outgrows it
    k, v = (key, value) if choice.name != "full" else spread(query, key, value)
    q, k, v = autocast(rescaled(query, scaling), k, v)
    of_matrix = mask is not None and mask.dim() == 4
    indexer: Any = getattr(module, "indexer", None)
    chosen = kwargs.get("block_indices")  # MiniMax M3
    chosen = None if chosen is None or choice.name != "full" else in_blocks(chosen, indexer.block_size, *k.shape[1:3])
    over_cache = causal and q.shape[2] != k.shape[2]
    alone = not (of_matrix or output_attentions or dropout or position_bias is not None or packed is not None)
    if causal and choice.name != "full" and alone:
        attn = _instance(choice, module, q, causal, window)
        samples = getattr(attn, "samples_now", False)  # a member of an ensemble: nothing to continue
        if not samples and not _moves(attn):
            began = begin(module, attn, choice.shown, choice.options, key, value, q, k, v, mask, _near(attn, window))
            if began is not None:
                return _heads_last(began), None
    plain = position_bias is None and chosen is None and not (of_matrix or special or over_cache or window)
    seen = watched() and not (special or over_cache) and chosen is None and packed is None
    if choice.name == "full" and not plain and not seen:
        # No earlier queries are needed, so any cache works.
        run = _full(q, k, mask, position_bias, causal, window, special, packed, chosen)
    elif choice.name == "longformer" and window and over_cache and position_bias is None:
        window = min(window, choice.options.get("window", window))
        k, v = spread(q, k, v)
        run = _full(q, k, mask, None, causal, window, special)  # the cache holds little more than the window
    else:
        causal = causal and not (of_matrix and choice.name == "full")  # its matrix contains causality
        bias, mask = _bias(choice, mask, position_bias, causal, over_cache)
        if packed is not None and bias is not None:
            raise ValueError(f"{choice.shown} does not support a pairwise bias of packed sequences: use weft:full")
        run = _mechanism(choice, module, q, k, mask, causal, window, bias, packed)
    out = _heads_last(run(v, dropout))
    if not output_attentions:
        return out, None
    with torch.no_grad():
        return out, run(torch.eye(k.shape[2], dtype=v.dtype, device=v.device).expand(*q.shape[:2], -1, -1), 0.0)


def _attend_next(
    choice: Choice,
    module: nn.Module,
    state: StateLayer,
    q: Tensor,
    v: Tensor,
    mask: Tensor | None,
    kwargs: dict[str, Any],
) -> Tensor:
    """The new tokens of a cache with a decoding state; what the model needs was checked in the prompt."""
    state.refuse_other(choice.shown, choice.options)
    window = window_of(mask)
    if window or kwargs.get("sliding_window"):
        _refuse(choice, module, state.columns, None, window, kwargs, {})
    row = last_row(mask)
    if row is None:
        columns = min(state.columns, mask.shape[-1]) if mask is not None and window else state.columns
        row = state.lengthened(_unpacked(choice.shown, module, mask, columns), columns)
    padding = state.padding_of(row)
    k = state.new_keys
    assert k is not None
    q, k, v = autocast(q, *spread(q, k, v))
    out = _heads_last(state.attend(q, k, v, padding, _near(state.attn, window)))
    if not torch.compiler.is_compiling():
        state.checked = choice
        if padding is not None and type(mask) is CausalMask and q.shape[2] == 1:
            mask.weft_row = padding[:, -1].clone()  # type: ignore[attr-defined]  # for the other layers
    return out


def _heads_last(out: Tensor) -> Tensor:
    return out.transpose(1, 2).contiguous()


def _full(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    position_bias: Tensor | None,
    causal: bool,
    window: int | None,
    special: dict[str, Any],
    packed: Segments | None = None,
    chosen: Tensor | None = None,
) -> Run:
    """Full attention, with the features that only it supports."""
    together = chosen  # which pairs belong to the same document, and to the blocks that the layer has chosen
    if packed is not None:
        numbers = packed.numbers[:, None]
        same = (numbers[..., None] == numbers[..., None, :]) & (numbers > 0)[..., None, :]
        together = both(together, same)
    if mask is not None and mask.dim() == 4:  # the matrix contains causality and padding
        allowed, added = _split(mask, position_bias)
        allowed = allowed if together is None else allowed & together
        return lambda v, p: masked_full(q, k, v, allowed=allowed, added=added, dropout=p, **special)
    near = together
    if window:
        j = torch.arange(k.shape[2], device=q.device)
        near = both(near, in_window(j[k.shape[2] - q.shape[2] :, None], j, window, causal)[None, None])
    return lambda v, p: masked_full(
        q, k, v, mask, causal=causal, allowed=near, added=position_bias, dropout=p, **special
    )


def _bias(
    choice: Choice, mask: Tensor | None, position_bias: Tensor | None, causal: bool, over_cache: bool
) -> tuple[PairBias | None, Tensor | None]:
    """The model's bias and matrix of pairs as a position bias, and the padding mask."""
    pairs = mask is not None and mask.dim() == 4
    if not pairs and position_bias is None:
        return None, mask
    what = "a mask of pairs" if pairs else "a pairwise bias (T5's relative positions)"
    if pairs and torch.compiler.is_compiling():
        what += " (compiled and exported models make one unless they get an attention_mask: pass it)"
    if not attention_info(choice.name).bias:
        raise ValueError(f"{choice.shown} has no matrix of logits and does not support {what}: use weft:full")
    if pairs and causal:
        # The matrix may show a part of the future, as for the prefix of PaliGemma.
        raise ValueError(f"{choice.shown} is causal and does not support {what}: use weft:full")
    if position_bias is not None and over_cache and position_bias.shape[2] > 1 or (over_cache and pairs):
        raise ValueError(f"{choice.shown} does not support {what} with a cache: set use_cache=False, or use weft:full")
    if not pairs:
        assert position_bias is not None
        return PairBias(position_bias), mask
    assert mask is not None
    allowed, added = _split(mask, position_bias)
    return PairBias(allowed if added is None else added.masked_fill(~allowed, float("-inf"))), None


def _mechanism(
    choice: Choice,
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    causal: bool,
    window: int | None = None,
    bias: PairBias | None = None,
    packed: Segments | None = None,
) -> Run:
    """The mechanism over all positions; returns the last Lq rows."""
    name, Lq, Lk = choice.shown, q.shape[2], k.shape[2]
    if not causal and (Lq != Lk or is_cross_attention(module)):
        if not attention_info(choice.name).cross:
            raise ValueError(f"{name} does not support cross attention, which {type(module).__name__} needs")
        # Compiled models have been called once before: see `_instance`.
        if not torch.compiler.is_compiling() and not rows_are_independent(choice.name, choice.options):
            raise ValueError(f"{name} mixes the queries of different positions, which would leak a decoder's future")
    attn = _instance(choice, module, q, causal, window)
    if causal and Lq != Lk:
        if _moves(attn):
            raise ValueError(f"{name} cannot decode with a cache: {attn.info.length_dependent}; or set use_cache=False")
        q = all_queries(module, name, q, Lk)
    elif causal and choice.name != "full" and packed is None:
        remember(module, q)
    near = _near(attn, window)

    def run(v: Tensor, dropout: float) -> Tensor:
        attn.dropout = dropout
        keys = k if k.shape[1] == v.shape[1] else spread(q, k, k)[0]  # v may be one matrix per head of q
        return attn(q, keys, connected(attn, q, keys, v), mask, total(bias, near), packed)[:, :, -Lq:]

    return run


def _near(attn: Attention, window: int | None) -> WindowBias | None:
    """The model's sliding window as a bias, for mechanisms that do not have it built in."""
    return WindowBias(window, attn.causal) if window and getattr(attn, "window", None) is None else None


def _split(pairs: Tensor, position_bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Split a boolean or additive mask into allowed pairs and values to add to the logits."""
    if pairs.dtype == torch.bool:
        return pairs, position_bias
    allowed = pairs > torch.finfo(pairs.dtype).min
    added = pairs.masked_fill(~allowed, 0)
    return allowed, added if position_bias is None else added + position_bias


def _instance(choice: Choice, module: nn.Module, q: Tensor, causal: bool, window: int | None = None) -> Attention:
    """The layer's mechanism instance. Only learned ones are submodules, so that the state dict does not change."""
    kept = layer_state(module).mechanisms
    core: Any = module._modules.get("weft")  # a Core, or PEFT's wrapper for modules_to_save, which has its attributes
    if core is not None and choice is layer_state(module).choice:
        shape = (core.settings["heads"], core.settings["head_dim"])
        if shape != (q.shape[1], q.shape[3]):
            raise ValueError(f"{choice.shown} was made for (heads, head size) {shape}, but q is {tuple(q.shape)}")
        return core.form(causal)
    key = (choice.number, q.shape[1], q.shape[3], causal, window)
    if window and choice.name == "longformer":  # the model's window, or a smaller one
        options = {**choice.options, "window": min(window, choice.options.get("window", window))}
        choice = Choice(choice.name, options, choice.number)
    if key not in kept:
        if torch.compiler.is_dynamo_compiling():
            raise ValueError(
                f"{choice.shown} creates its mechanisms in the first call of a model: call it once before torch.compile"
            )
        longest = getattr(getattr(module, "config", None), "max_position_embeddings", None)
        made = _made(choice, module, q, causal)
        if causal and isinstance(longest, int) and _moves(made):
            # A length-dependent pattern would change during generation, so fix it by the model's maximum length.
            made = _made(choice, module, q, causal, max_length=longest)
        for other in [other for other in kept if other[0] != choice.number]:  # the layer was swapped again
            del kept[other]
        kept[key] = made
    attn: Attention = kept[key]  # type: ignore[assignment]
    if any(b.device != q.device for b in attn.buffers()):
        with torch.inference_mode(False):
            attn.to(q.device)
    return attn.train(module.training)


def _made(choice: Choice, module: nn.Module, q: Tensor, causal: bool, **more: Any) -> Attention:
    # Seed random features with the layer index, so that they are the same in every process and after loading. The first
    # call may be in inference mode, whose tensors cannot be used in training.
    with torch.inference_mode(False), seeded(getattr(module, "layer_idx", None) or 0):
        shape: dict[str, Any] = {"heads": q.shape[1], "head_dim": q.shape[3], "causal": causal}
        return make_attention(choice.name, **shape, **{**choice.options, **more}).to(q.device)


def _unpacked(name: str, module: nn.Module, mask: Tensor | None, keys: int) -> Tensor | None:
    """The padding mask (B, Lk), or a matrix (B, ., Lq, Lk)."""
    if mask is None:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        shape = tuple(mask.shape)
    if len(shape) == 4 and shape[-1] > keys and window_of(mask):  # a layer with a state has seen all tokens
        mask, shape = mask[..., -keys:], (*shape[:-1], keys)
    if len(shape) != 4 or shape[-1] != keys:
        raise ValueError(
            f"{type(module).__name__} passes a mask of shape {shape} to {name}, expected (batch, 1, "
            f"queries, {keys} keys): this model prepares its own masks; use attn_implementation='eager'"
        )
    return read(mask)


def _is_causal(name: str, module: nn.Module, said: bool | None, is_causal: bool | None) -> bool:
    """Whether to run causally: from our mask's type, else from the argument, else from the layer."""
    if said is None:
        said = is_causal if is_causal is not None else getattr(module, "is_causal", None)
    if said is None:
        raise ValueError(f"{name} cannot tell whether {type(module).__name__} is causal: set is_causal on the layer")
    return bool(said)


def _refuse(
    choice: Choice,
    module: nn.Module,
    length: int,
    mask: Tensor | None,
    window: int | None,
    kwargs: dict[str, Any],
    special: dict[str, Any],
) -> None:
    """Reject features beyond softmax(q kᵀ) v that the mechanism does not support; `special` lists those it does."""
    told = kwargs.get("sliding_window")
    sinks = next((kwargs[name] for name in ("s_aux", "sinks") if kwargs.get(name) is not None), None)
    sinks = getattr(module, "sinks", None) if sinks is None else sinks
    of_matrix = mask is not None and mask.dim() == 4
    unseen = told if told and not window and not of_matrix and not fits(length, told) else None
    if window and (not attention_info(choice.name).bias or choice.options.get("global_tokens")):
        unseen = window
    blocks = kwargs.get("block_indices")
    if blocks is not None:
        indexer: Any = module.indexer
        covers = choice.name == "full" or fits(length, indexer.topk_blocks * indexer.block_size)
        blocks = None if covers else blocks
    asked = {
        "a choice of keys for each query": blocks,
        "a soft cap on the logits": None if "softcap" in special else kwargs.get("softcap"),
        "attention sinks": None if "sinks" in special else sinks,
        "a paged cache": kwargs.get("cache") if "cache" in kwargs else kwargs.get("block_table"),
        "a bias on the logits": kwargs.get("attention_bias"),
        f"a sliding window of {unseen} tokens": unseen,
    }
    for what, value in asked.items():
        if value is not None:
            able = "weft:longformer, weft:full or eager" if value is unseen else "weft:full or eager"
            index = getattr(module, "layer_idx", None)
            layer = type(module).__name__ + ("" if index is None else f" {index}")
            raise ValueError(f"{layer} needs {what}, which {choice.shown} does not support: use {able}")


def _moves(attn: Attention) -> bool:
    """Whether the pattern depends on the sequence length, so that earlier outputs change as the sequence grows."""
    return attn.pattern_for(1) != attn.pattern_for(2**30)


AttentionInterface.register(SWAPPED, swapped_attention)
AttentionMaskInterface.register(SWAPPED, mask_function_of(SWAPPED, takes_matrix=True))
install()
note_recording()
