"""Context parallelism: one sequence split over several ranks. See `context.py` and docs/scale.md."""

from . import combiner, near, ring, sums  # noqa: F401  (they register their mechanisms)
from .context import SHARDED, Context, context, shard, shard_sequence, unshard
from .traffic import traffic

__all__ = ["SHARDED", "Context", "context", "shard", "shard_sequence", "traffic", "unshard"]
