"""Combiner: full attention at the cost of sparse attention, https://arxiv.org/abs/2107.05768."""
