"""Context parallelism: one sequence split over several ranks. See `context.py` and docs/scale.md."""

from . import combiner, near, ring, sums
from .context import SHARDED, Context, context, shard, unshard

__all__ = ["SHARDED", "Context", "context", "shard", "unshard"]
