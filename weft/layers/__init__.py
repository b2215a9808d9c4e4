"""Attention layers, feed-forward layers and blocks."""

from ..core.positions import ALiBi, RelativeBias, RelativeBias2d, Rotary, sinusoids
from .cached import AttentionCache, BranchMaps, CachedAttention, branch_maps
from .encoder import EncoderBlock
from .feedforward import FeedForward
from .graph_attention import EdgeAttention
from .ista import ISTA
from .memory_tokens import MemoryTokens, RecurrentMemory
from .mixed import MixedAttention
from .mssa import MSSA
from .multihead import MultiheadAttention
from .subsampled_window import SubsampledWindowAttention
from .transformer_xl import SegmentMemory, TransformerXLAttention

__all__ = [
    "ALiBi",
    "AttentionCache",
    "BranchMaps",
    "CachedAttention",
    "EdgeAttention",
    "EncoderBlock",
    "FeedForward",
    "ISTA",
    "MSSA",
    "MemoryTokens",
    "MixedAttention",
    "MultiheadAttention",
    "RecurrentMemory",
    "RelativeBias",
    "RelativeBias2d",
    "Rotary",
    "SegmentMemory",
    "SubsampledWindowAttention",
    "TransformerXLAttention",
    "branch_maps",
    "sinusoids",
]
