"""Attention to near keys, in blocks or windows, and to a few keys that all see: `local`, `longformer`, `sparse`."""
