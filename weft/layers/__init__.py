"""What blocks are made of."""

from .cached import CachedAttention
from .encoder import EncoderBlock
from .feedforward import FeedForward
from .ista import ISTA
from .mixed import MixedAttention
from .mssa import MSSA
from .multihead import MultiheadAttention
from .positions import ALiBi, RelativeBias, RelativeBias2d, Rotary, sinusoids

__all__ = [
    "ALiBi",
    "CachedAttention",
    "EncoderBlock",
    "FeedForward",
    "ISTA",
    "MSSA",
    "MixedAttention",
    "MultiheadAttention",
    "RelativeBias",
    "RelativeBias2d",
    "Rotary",
    "sinusoids",
]
