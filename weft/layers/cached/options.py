"""How cached attention may differ: the paper's definition, and what the authors' released code does instead."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from ...attention import Attention
from .resample import RESAMPLINGS


@dataclass(frozen=True)
class CacheOptions:
    """The defaults are the paper's."""

    update_from: str = "input"  # the tokens that are gated into the cache: a slice of the "input" or the "output"
    candidate: str = "linear"  # "ln_gelu": LayerNorm(GELU(linear)), which bounds the cache
    memory: str = "mean"  # a sample reads the batch's "mean" cache, or its own before the mean, "per_sample"
    eval_gate: bool = False  # in eval(), gate each sample into the frozen cache and read the result; keep nothing
    lambda_init: float = 0.0  # σ(λ) is the cached branch's share: 0 gives one half
    mix: str | None = None  # mix "heads" before the inner output projection, or "projected" outputs by channel
    # groups; None: "heads" where the inner layer shows its heads, else "projected", the only one possible
    gate_bias: bool = False  # biases in the three gates,
    qkv_bias: bool = False  # in the cached branch's query, key and value projections,
    out_bias: bool = False  # and in its output projection, which only mix="projected" has
    position: str = "none"  # "conv": a grouped 3 x 3 convolution of the input image is added to the output
    memory_attention: str | Attention = "full"  # how tokens attend to slots: "full", "same" as the inner layer
    # (its spatial reduction, its windows, its mechanism), or a mechanism made for the cached heads
    resample: str = "nearest"  # tokens to slots: "nearest", "linear", "area", or "2d" for images
    sync: str = "exact"  # over ranks: "exact" equals one big batch; "stored" reads this rank's mean and keeps the
    # global one; "none" leaves every rank its own cache
    delayed: bool = False  # read what earlier steps wrote, never the current one: for causal layers
    scope: str = "batch"  # one cache for all, or "stream": one per row of the batch, without a mean
    eval_update: bool = False  # streams only: go on writing in eval(), to carry text from segment to segment

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is one of {', '.join(map(repr, choices))}, got {getattr(self, name)!r}")
        if self.eval_update and self.scope != "stream":
            raise ValueError("eval() freezes a cache that batches share; eval_update needs scope='stream'")
        if self.delayed and self.eval_gate:
            raise ValueError("eval_gate reads the current tokens, delayed promises not to: choose one")
        if self.delayed and self.memory == "per_sample":
            raise ValueError("delayed reads an earlier batch, whose samples are others: use scope='stream' instead")


CHOICES: dict[str, tuple[Any, ...]] = {
    "update_from": ("input", "output"),
    "candidate": ("linear", "ln_gelu"),
    "memory": ("mean", "per_sample"),
    "mix": (None, "heads", "projected"),
    "position": ("none", "conv"),
    "resample": RESAMPLINGS,
    "sync": ("exact", "stored", "none"),
    "scope": ("batch", "stream"),
}

PRESETS = {
    "paper": CacheOptions(),
    "authors": CacheOptions(
        update_from="output",
        candidate="ln_gelu",
        memory="per_sample",
        eval_gate=True,
        lambda_init=-1.0,
        mix="projected",
        gate_bias=True,
        qkv_bias=True,
        out_bias=True,
        position="conv",
        memory_attention="same",
    ),
}


def cache_options(preset: str, changes: dict[str, Any]) -> CacheOptions:
    """The preset with some options changed."""
    if preset not in PRESETS:
        raise ValueError(f"there is no preset {preset!r}; there are {', '.join(PRESETS)}")
    known = [field.name for field in fields(CacheOptions)]
    for name in changes:
        if name not in known:
            raise TypeError(f"cached attention has no option {name!r}; its options: {', '.join(known)}")
    return replace(PRESETS[preset], **changes)
