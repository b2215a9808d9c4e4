"""Build a model's blocks from its `attention` argument."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ..attention import Attention, attention_info
from ..layers import EncoderBlock, MixedAttention, MultiheadAttention

Named = str | tuple[str, dict[str, Any]]
Choice = Named | Sequence[Named] | Attention
AttentionChoice = Choice | Callable[[int], Choice]


def attention_layer(
    choice: AttentionChoice, layer: int, dim: int, heads: int, *, options: dict[str, Any] | None = None, **common: Any
) -> nn.Module:
    """The attention layer of block number `layer`.

    `choice` is a registered name, (name, {options}), a list of these for mixed attention, or a function from the block
    number to one of them or to a mechanism instance. `options` belong to a single name. If a mechanism has an option
    `seed`, the block number is added to it, so that no two blocks draw the same numbers; the result of a function is
    used unchanged.
    """
    if callable(choice) and not isinstance(choice, Attention):
        if options:
            raise TypeError("attention is a function: return (name, {options}) from it instead of attention_options")
        choice, layer = choice(layer), 0
    elif isinstance(choice, Attention):
        raise TypeError("blocks cannot share one mechanism instance: pass a function of the block number")
    if isinstance(choice, Attention):
        kept = {name: common[name] for name in ("head_dim", "causal", "device", "dtype", "qk_norm") if name in common}
        return MultiheadAttention(dim, heads, attention=choice, **kept)
    if _is_named(choice):
        name, own = _seeded(choice, layer, options or {})
        return MultiheadAttention(dim, heads, attention=name, **common, **own)
    if options:
        raise TypeError("attention is a list: pass the options of each mechanism as (name, {options})")
    return MixedAttention(dim, heads, [_seeded(entry, layer, {}) for entry in choice], **common)


def encoder_blocks(
    layers: int,
    attention: AttentionChoice,
    dim: int,
    heads: int,
    *,
    mlp_dim: int,
    dropout: float,
    attention_dropout: float | None,
    options: dict[str, Any] | None,
    place: dict[str, Any],
    mlp_dropout: float | None = None,
    norm: str = "layer",
    **common: Any,
) -> nn.ModuleList:
    """A model's stack of pre-norm blocks. `attention_dropout` and `mlp_dropout` default to `dropout`; `place` is
    device and dtype."""
    sizes: dict[str, Any] = dict(mlp_dim=mlp_dim, dropout=dropout, mlp_dropout=mlp_dropout, norm=norm)
    blocks = nn.ModuleList()
    inside = dropout if attention_dropout is None else attention_dropout
    for layer in range(layers):
        inner = attention_layer(attention, layer, dim, heads, options=options, dropout=inside, **common, **place)
        blocks.append(EncoderBlock(dim, inner, **sizes, **place))
    return blocks


def check_takes_bias(blocks: nn.ModuleList, advice: str) -> None:
    """Raise an error if a mechanism of the blocks does not support the position bias of the model."""
    for module in blocks.modules():
        if isinstance(module, Attention) and module.info is not None and not module.info.bias:
            raise ValueError(f"{module.name} does not support ALiBi, which is a position bias: {advice}")


def _is_named(choice: Any) -> bool:
    return isinstance(choice, str) or (isinstance(choice, tuple) and len(choice) == 2 and isinstance(choice[1], dict))


def _seeded(choice: Any, layer: int, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if not _is_named(choice):
        raise TypeError(f"attention must be a name or (name, {{options}}), got {choice!r}")
    name, own = (choice, {}) if isinstance(choice, str) else choice
    own = {**own, **options}
    defaults = attention_info(name).options
    if "seed" in defaults:
        own["seed"] = own.get("seed", defaults["seed"]) + layer
    return name, own
