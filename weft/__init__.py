"""weft: attention that is cheaper, wider, remembering, or explainable, as layers for PyTorch."""

from typing import Any

from . import inspect, layers, models
from .adapt.surgery import cache, swap
from .attention import Attention, AttentionInfo, attention_info, attentions, make_attention, register
from .attention.decoding import state_size
from .lab.ensemble import ensemble
from .lab.subsample import make_dense, subsample, subsampling
from .layers import (
    ISTA,
    MSSA,
    ALiBi,
    CachedAttention,
    MixedAttention,
    MultiheadAttention,
    RelativeBias,
    RelativeBias2d,
    Rotary,
)

__version__ = "0.1.0"

__all__ = [
    "ALiBi",
    "Attention",
    "AttentionInfo",
    "CachedAttention",
    "ISTA",
    "MSSA",
    "MixedAttention",
    "MultiheadAttention",
    "RelativeBias",
    "RelativeBias2d",
    "Rotary",
    "attention_info",
    "attentions",
    "cache",
    "ensemble",
    "inspect",
    "layers",
    "make_attention",
    "make_dense",
    "models",
    "register",
    "state_size",
    "subsample",
    "subsampling",
    "swap",
]


def __getattr__(name: str) -> Any:
    """weft.huggingface and weft.timm, when they are asked for: each needs its library."""
    if name in ("huggingface", "timm"):
        import importlib

        return importlib.import_module(f".adapt.{name}", __name__)
    raise AttributeError(f"module 'weft' has no attribute {name!r}")
