"""Combiner: full attention at the cost of a sparse one, https://arxiv.org/abs/2107.05768."""
