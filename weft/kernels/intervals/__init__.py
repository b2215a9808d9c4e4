"""Attention within runs of a permuted sequence: `routing`, `reformer`."""
