"""Attention within a block and to a sorted mixture of all blocks: `sinkhorn`."""
