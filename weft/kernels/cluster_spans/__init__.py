"""Attention to a token's own cluster and to summaries of the others: `combiner-routing`."""
