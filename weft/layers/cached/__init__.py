"""Attention with a memory of earlier training steps: the layer, its gated recurrent cache, and a baseline.

layer.py             CachedAttention: any attention layer, mixed with attention to a cache
memory.py            RecurrentCache: the gated recurrent cache itself
memory_attention.py  MemoryAttention: tokens attend to the slots of a cache
resample.py          the T tokens of a step, brought to the number of slots
projection.py        the heads of a foreign layer, before its output projection
inputs.py            width, heads, mask and grid of the wrapped layer and its calls
options.py           CacheOptions and their presets
maps.py              what the two branches look at, for pictures
previous_batch.py    AttentionCache: the baseline that attends to the batch before
"""

from .layer import CachedAttention
from .maps import BranchMaps, branch_maps
from .memory import RecurrentCache
from .previous_batch import AttentionCache

__all__ = ["AttentionCache", "BranchMaps", "CachedAttention", "RecurrentCache", "branch_maps"]
