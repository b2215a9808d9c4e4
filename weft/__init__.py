"""weft: attention that is cheaper, wider, remembering, or explainable, as layers for PyTorch."""

from . import layers, models
from .attention import Attention, AttentionInfo, attention_info, attentions, make_attention, register
from .attention.decoding import state_size
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
    "layers",
    "make_attention",
    "models",
    "register",
    "state_size",
]
