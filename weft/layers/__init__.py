"""What blocks are made of."""

from .mixed import MixedAttention
from .multihead import MultiheadAttention
from .positions import ALiBi, RelativeBias, RelativeBias2d, Rotary, sinusoids

__all__ = ["ALiBi", "MixedAttention", "MultiheadAttention", "RelativeBias", "RelativeBias2d", "Rotary", "sinusoids"]
