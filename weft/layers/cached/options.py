"""Options of cached attention, with presets for the paper and for the authors' released code."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from ...attention import Attention
from .resample import RESAMPLINGS


@dataclass(frozen=True)
class CacheOptions:
    """The defaults follow the paper."""

    update_from: str = "input"  # write a slice of the layer's "input" or "output" to the cache
    candidate: str = "linear"  # "ln_gelu": LayerNorm(GELU(linear)), which bounds the cache
    memory: str = "mean"  # what a sample reads: the batch "mean", or "per_sample", its own update before the mean
    eval_gate: bool = False  # in eval(), gate each sample into the frozen cache and read the result; store nothing
    lambda_init: float = 0.0  # σ(λ) is the weight of the cached branch: 0 gives one half
    mix: str | None = None  # "heads": mix before the inner output projection (equation 2 of the paper). "projected":
    # mix channel groups of the output, and project the cached branch separately, as the authors' code does. None:
    # "heads", except for layers whose heads weft cannot reach
    gate_bias: bool = False  # biases in the three gates
    qkv_bias: bool = False  # biases in the cached branch's query, key and value projections
    out_bias: bool = False  # bias in its output projection, which exists only with mix="projected"
    position: str = "none"  # "conv": add a grouped 3 x 3 convolution of the input image to the output
    memory_attention: str | Attention = "full"  # how tokens attend to slots: "full", "same" as the inner layer
    # (its spatial reduction, windows or mechanism), or a mechanism created for the cached heads
    pool: int = 1  # average-pool the image of slots by this factor before they are read; needs memory_attention="full"
    resample: str = "nearest"  # tokens to slots: "nearest", "linear", "area", or "2d" for images
    sync: str = "exact"  # over ranks: "exact" equals one large batch; "stored" reads this rank's mean and stores the
    # global one; "none": every rank has its own cache
    delayed: bool = False  # read only what earlier steps wrote; required for causal layers
    scope: str = "batch"  # one cache for all rows, or "stream": one per row of the batch, without a mean
    eval_update: bool = False  # for streams: keep writing in eval(), to carry text from segment to segment

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {getattr(self, name)!r}")
        if self.pool < 1 or not isinstance(self.pool, int):
            raise ValueError(f"pool must be an integer of at least 1, got {self.pool!r}")
        if self.pool > 1 and self.memory_attention == "same":
            raise ValueError("pool and memory_attention='same' both shrink the cache: use memory_attention='full'")
        if self.eval_update and self.scope != "stream":
            raise ValueError("eval_update=True needs scope='stream': eval() freezes a shared cache")
        if self.eval_update and self.eval_gate:
            raise ValueError("eval_gate=True stores nothing in eval(), but eval_update=True keeps writing: choose one")
        if self.delayed and self.eval_gate:
            raise ValueError("eval_gate=True reads the current tokens, which delayed=True forbids: choose one")
        if self.delayed and self.memory == "per_sample":
            raise ValueError(
                "delayed=True reads an earlier batch with other samples: use scope='stream' instead of "
                "memory='per_sample'"
            )


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
    """The preset, with `changes` applied."""
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}; available: {', '.join(PRESETS)}")
    known = [field.name for field in fields(CacheOptions)]
    for name in changes:
        if name not in known:
            options = ", ".join(["ratio", "length", "preset", *known])
            raise TypeError(f"cached attention has no option {name!r}; its options: {options}")
    return replace(PRESETS[preset], **changes)
